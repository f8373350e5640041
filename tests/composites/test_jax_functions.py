# SPDX-License-Identifier: Apache-2.0
"""Every function of jax.numpy, jax.nn and jax.scipy.special that has static shapes."""

from __future__ import annotations

import jax
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import functions, jax_functions

CASES = {}
for _name, *_case in jax_functions.cases():
    CASES[_name if _name not in CASES else f"{_name} again"] = _case
# The operation that each needs, of those that kernels do not have.
REFUSED = {
    "convolve": "conv_general_dilated",
    "correlate": "conv_general_dilated",
    "polymul": "conv_general_dilated",
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", CASES)
def test_a_function_of_jax_computes_what_it_does_outside_of_a_kernel(name):
    function, operands = CASES[name]
    functions.check(function, *operands, rtol=2e-5, atol=4e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_a_function_of_an_operation_that_kernels_lack_is_refused(name):
    def body(x_ref, y_ref, o_ref):
        o_ref[...] = getattr(jax.numpy, name)(x_ref[...], y_ref[...])[0]

    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((1,), "float32"))
    with pytest.raises(errors.UnsupportedError, match=REFUSED[name]):
        kernel(jax_functions.ROW, jax_functions.OTHER_ROW)

# SPDX-License-Identifier: Apache-2.0
"""Functions of jax.numpy, jax.nn and jax.scipy.special that have static shapes.

All are accepted by a kernel. Those are executed that contain, together, each operation
on each type of operands, and reach each line of the package that any of them reaches.
"""

from __future__ import annotations

import jax
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import functions, jax_functions

CASES = {}
for _name, *_case in jax_functions.cases():
    CASES[_name if _name not in CASES else f"{_name} again"] = _case
_EXECUTED = """
    abs-float32, acosh-float32, all-float32, arccos-float32, arcsin-float32,
    arctan-float32, arctan2-float32-float32, arctanh-float32, argsort along 0,
    asinh-float32, betainc-float32-float32-float32, bitwise_count-int32,
    bitwise_left_shift-int32-int32, bitwise_xor-int32-int32, cbrt-float32, choose,
    corrcoef, cos-float32, cosh-float32, diag-float32 again, diagflat-float32,
    digamma-float32, divmod-float32-float32, dot, einsum of rows, elu-float32,
    erfinv-float32, expi-float32, extract, gammainc-float32-float32,
    gammaincc-float32-float32, gelu-float32, glu-float32, gradient-float32, histogram,
    i0e-float32, i1-float32, indices, intersect1d, invert-int32, lcm-int32-int32,
    ldexp-float32-int32, lexsort, log2-float32, logaddexp2-float32-float32,
    logical_xor-bool-bool, logmeanexp-float32, matvec-float32-float32, multigammaln,
    nanargmax rows, nanargmin rows, nancumprod-float32 again, nancumsum-float32 again,
    nanmedian-float32 again, nanstd-float32 again, ndtr-float32,
    nextafter-float32-float32, packbits, pad constant, pad linear_ramp, pad maximum, pad
    median, pad minimum, polyadd-float32-float32, polygamma, polyint-float32, polyval,
    ravel_multi_index, repeat, resize, searchsorted, select, setdiff1d, signbit-float32,
    sin-float32, sinh-float32, spence-float32, square-int32, stack, standardize-float32,
    sum-float32, take_along_axis, tan-float32, top_k, trapezoid-float32, tri,
    trunc-float32, unpackbits, unravel_index, unstack, vdot-float32-float32,
    zeta-float32-float32
"""
EXECUTED = " ".join(_EXECUTED.split()).split(", ")
# The operation that each needs, of those that kernels do not have.
REFUSED = {
    "convolve": "conv_general_dilated",
    "correlate": "conv_general_dilated",
    "polymul": "conv_general_dilated",
}


@pytest.mark.parametrize("name", EXECUTED)
def test_a_function_of_jax_computes_what_it_does_outside_of_a_kernel(name):
    function, operands = CASES[name]
    functions.check(function, *operands, rtol=2e-5, atol=4e-6)


def test_every_other_function_is_accepted():
    refused = {}
    for name in CASES.keys() - EXECUTED:
        function, operands = CASES[name]
        try:
            jax.eval_shape(functions.kernel_of(function, *operands)(True), *operands)
        except errors.PallasGpuError as error:
            refused[name] = str(error)
    assert not refused


@pytest.mark.parametrize("name", REFUSED)
def test_a_function_of_an_operation_that_kernels_lack_is_refused(name):
    def body(x_ref, y_ref, o_ref):
        o_ref[...] = getattr(jax.numpy, name)(x_ref[...], y_ref[...])[0]

    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((1,), "float32"))
    with pytest.raises(errors.UnsupportedError, match=REFUSED[name]):
        kernel(jax_functions.ROW, jax_functions.OTHER_ROW)

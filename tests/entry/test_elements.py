# SPDX-License-Identifier: Apache-2.0
"""Single elements of references."""

import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.entry_kernels import make, numbers

TILED = plgpu.SMEM(
    (64, 64),
    jnp.float32,
    transforms=(plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)),
)


@pytest.mark.parametrize("use", [lambda s: s[3, 4], lambda s: s.set(1.0, (3, 4))])
def test_one_element_of_tiled_smem_is_refused(use):
    def body(x, o, s):
        use(s)

    with pytest.raises(errors.UnsupportedError) as info:
        make(body, scratch_types=[TILED])(numbers())
    assert info.value.what.startswith("a single element of a tiled or swizzled SMEM")
    assert "without transforms" in str(info.value)
    assert "test_elements.py" in info.value.where

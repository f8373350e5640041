# SPDX-License-Identifier: Apache-2.0
"""Addresses of tcgen05_mma: random shapes, types, swizzles and orders of operands.

The emitted modules are executed and compared with NumPy: which part of an operand each
instruction reads, which columns it writes, and which of them accumulate.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_gpu as plgpu
from pallas_gpu import arch
from tests.support.lockstep import kernels as in_lockstep
from tests.support.semantics import BOTH
from tests.support.tensor_products import BF16, E4M3, E5M2, F16, F32, Product

I8, U8, I32 = jnp.int8, jnp.uint8, jnp.int32
# Types of a, b and the accumulator.
TYPES = [
    *((F16, F16, F32), (F16, F16, F16), (BF16, BF16, F32), (F32, F32, F32)),
    *((E4M3, E5M2, F32), (E5M2, E5M2, F16), (I8, U8, I32), (U8, U8, I32)),
]
EXAMPLES = 12
# TMEM has 512 columns, of which the accumulator takes N.
_MOST_BYTES = arch.SM_100A.smem_bytes_per_block - 1024
_MOST_COLUMNS = {True: 256, False: 512}


@st.composite
def products(draw):
    """Products that the tensor core supports."""
    a, b, acc = draw(st.sampled_from(TYPES))
    itemsize = jnp.dtype(a).itemsize
    swizzle = draw(st.sampled_from([32, 64, 128]))
    row = swizzle // itemsize
    m = draw(st.sampled_from([64, 128]))
    a_in_tmem = m == 128 and draw(st.booleans())
    along_k = itemsize == 4
    a_stored, b_stored = (
        (False, True) if along_k else (draw(st.booleans()), draw(st.booleans()))
    )
    a_stored &= m % row == 0 and not a_in_tmem
    # Whole rows of the swizzle along K where an operand lies along K.
    k_rows = draw(st.integers(1, 3))
    k = k_rows * row if not a_stored or b_stored else k_rows * 32 // itemsize
    step = 16 if itemsize == 1 else 8
    granule = step if b_stored else max(row, step)
    granule *= 2 if m == 64 else 1
    # Both operands fit into SMEM, beside the barriers.
    fit = (_MOST_BYTES // (k * itemsize) - m) // granule
    most = min(_MOST_COLUMNS[a_in_tmem] // granule, fit)
    n = granule * draw(st.integers(1, max(1, most)))
    return Product(
        m, n, k, a, b, acc,
        swizzle=swizzle,
        a_stored=a_stored,
        b_stored=b_stored,
        a_in_tmem=a_in_tmem,
        rounds=draw(st.integers(1, 2)),
    )  # fmt: skip


@pytest.mark.parametrize("semantics", BOTH)
@settings(max_examples=EXAMPLES, deadline=None)
@given(case=products())
def test_a_random_product_is_numpys(semantics, case):
    operands = case.operands(seed=case.n)
    (result,) = in_lockstep.run(case.make(), operands, semantics)
    np.testing.assert_array_equal(result, case.expected(*operands))


@settings(max_examples=EXAMPLES, deadline=None)
@given(case=products(), seed=st.integers(0, 3))
def test_the_emulator_gives_the_same(case, seed):
    operands = case.operands(seed=case.n)
    result = case.make(plgpu.InterpretParams(seed=seed))(*operands)
    np.testing.assert_array_equal(result, case.expected(*operands))

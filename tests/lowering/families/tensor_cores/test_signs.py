# SPDX-License-Identifier: Apache-2.0
"""Products of 8-bit integers with the highest bit set: unsigned ones are positive."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.tensor_products import Product, storage

I8, U8, I32 = jnp.int8, jnp.uint8, jnp.int32
PAIRS = [(U8, U8), (I8, U8), (U8, I8)]
CASE = Product(acc=I32, b_stored=True, k=32, n=32, swizzle=32)


def operands(a, b, rows):
    """All values of eight bits occur."""
    rng = np.random.default_rng(0)
    left, right = (rng.integers(0, 256, (n, 32)).astype(np.uint8) for n in (rows, 32))
    return left.view(np.dtype(a)), right.view(np.dtype(b))


def product(a, b):
    return a.astype(np.int32) @ b.astype(np.int32).T


@pytest.mark.parametrize("in_tmem", [False, True], ids=["SMEM", "TMEM"])
@pytest.mark.parametrize(("a", "b"), PAIRS, ids=["u8 u8", "s8 u8", "u8 s8"])
def test_tcgen05(a, b, in_tmem):
    case = dataclasses.replace(CASE, a=a, b=b, a_in_tmem=in_tmem)
    arrays = operands(a, b, 128)
    everywhere.check(case.make, arrays, product(*arrays), on_gpu=False)


@pytest.mark.parametrize("in_registers", [False, True], ids=["SMEM", "registers"])
@pytest.mark.parametrize(("a", "b"), PAIRS, ids=["u8 u8", "s8 u8", "u8 s8"])
def test_wgmma(a, b, in_registers):
    def body(x, y, out, x_smem, y_smem, loaded, acc):
        plgpu.copy_gmem_to_smem(x, x_smem, loaded)
        plgpu.copy_gmem_to_smem(y, y_smem, loaded)
        plgpu.barrier_wait(loaded)
        left = x_smem
        if in_registers:
            left = plgpu.load(x_smem, layout=plgpu.Layout.WGMMA_8BIT)
        plgpu.wgmma(acc, left, y_smem.T)
        out[...] = acc[...]

    arrays = operands(a, b, 64)
    everywhere.run(
        body,
        arrays,
        product(*arrays),
        plgpu.SMEM((64, 32), a, transforms=storage(a, 32)),
        plgpu.SMEM((32, 32), b, transforms=storage(b, 32)),
        plgpu.Barrier(num_arrivals=2),
        plgpu.ACC((64, 32), I32),
    )

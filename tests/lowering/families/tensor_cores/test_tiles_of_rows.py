# SPDX-License-Identifier: Apache-2.0
"""Products of several tiles of M: a tcgen05.mma for each, one arrival for all."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors
from pallas_gpu.layouts import TmemLayout
from tests.support import everywhere
from tests.support.refusal import refused
from tests.support.scaled_products import E8M0, ScaledProduct
from tests.support.semantics import BOTH
from tests.support.sparse_products import SparseProduct
from tests.support.tensor_products import (
    E4M3,
    F16,
    F32,
    Product,
    start_copies,
    storage,
)

TILES = 2
CASES = {
    "128 rows": Product(m=128, n=32, k=32, swizzle=64),
    "64 rows": Product(m=64, n=64, k=64, swizzle=64),
    "a along M": Product(m=128, n=32, k=32, swizzle=64, a_stored=True),
    "operands without transforms": Product(m=128, n=32, k=32, inferred=True),
}


def operands(case):
    rng = np.random.default_rng(0)
    shape = (TILES * case.m, case.k)
    a = rng.integers(-3, 4, shape[::-1] if case.a_stored else shape).astype(F16)
    return a, case.operands()[1]


def expected(case, a, b):
    left = a.T if case.a_stored else a
    product = left.astype(np.float32) @ b.astype(np.float32)
    return product.reshape(TILES, case.m, case.n)


def make(case, *, loose=False):
    """The kernel; `loose`: a is stored tile by tile."""

    def body(a, b, out, a_smem, b_smem, acc, loaded, done):
        plgpu.copy_gmem_to_smem(a, a_smem, loaded)
        plgpu.copy_gmem_to_smem(b, b_smem, loaded)
        plgpu.barrier_wait(loaded)
        left = a_smem.T if case.a_stored else a_smem
        plgpu.tcgen05_mma(acc, left, b_smem, done, accumulate=False)
        plgpu.barrier_wait(done)
        for i in range(TILES):
            out[i] = plgpu.async_load_tmem(acc.at[i])

    a_shape = operands(case)[0].shape
    if loose:
        a_shape = (TILES, case.m, case.k)
    scratch = case.scratch()
    transforms = () if case.inferred else storage(F16, case.swizzle)
    scratch["a_smem"] = plgpu.SMEM(a_shape, F16, transforms=transforms)
    scratch["acc"] = plgpu.TMEM((TILES, case.m, case.n), F32)
    out = jax.ShapeDtypeStruct((TILES, case.m, case.n), F32)
    return everywhere.kernel(body, out, scratch_types=scratch, target="sm_100a")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_products_of_two_tiles_of_rows(case):
    args = operands(case)
    chosen = [plgpu.LoweringSemantics.Warpgroup] if case.inferred else BOTH
    wanted = expected(case, *args)
    everywhere.check(
        make(case), args, wanted, semantics=chosen, executed=chosen, on_gpu=False
    )


def test_a_left_operand_may_be_stored_tile_by_tile():
    case = CASES["128 rows"]
    a, b = operands(case)
    args = a.reshape(TILES, case.m, case.k), b
    everywhere.check(make(case, loose=True), args, expected(case, a, b), on_gpu=False)


def test_metadata_of_64_rows_is_that_of_128_lanes_in_each_tile():
    case = SparseProduct(m=64)
    (stored, b, meta), dense = case.operands(), case.dense()[0].astype(np.float32)
    args = np.concatenate([stored, stored]), b, meta

    def body(a, b, meta, out, a_smem, b_smem, m_smem, acc, metadata, loaded, done):
        start_copies(loaded, (a, a_smem), (b, b_smem), (meta, m_smem))
        plgpu.barrier_wait(loaded)
        for i in range(TILES):
            plgpu.async_copy_sparse_metadata_to_tmem(m_smem, metadata.at[i])
        given = {"a_sparse_metadata": metadata, "accumulate": False}
        plgpu.tcgen05_mma(acc, a_smem, b_smem.T, done, **given)
        plgpu.barrier_wait(done)
        for i in range(TILES):
            out[i] = acc[i]

    indices = TmemLayout.sparse_metadata()
    scratch = case.scratch() | {
        "a_smem": plgpu.SMEM(args[0].shape, F16, transforms=storage(F16)),
        "acc": plgpu.TMEM((TILES, 64, case.n), F32),
        "metadata": plgpu.TMEM((TILES, 128, 64), jnp.uint2, layout=indices),
    }
    options = {"scratch_types": scratch, "target": "sm_100a", "on_gpu": False}
    wanted = np.stack([dense @ b.T.astype(np.float32)] * TILES)
    everywhere.run(body, args, wanted, **options)


def test_scales_have_the_tiles_of_the_accumulator():
    case = ScaledProduct(n=32)
    a, b, sa, sb = case.operands()
    args = np.concatenate([a, a[::-1]]), b, np.stack([sa, sa]), sb
    wanted = [case.expected(x, b, sa, sb) for x in (a, a[::-1])]

    def body(
        a, b, sa_gmem, sb_gmem, out, a_smem, b_smem, sa_smem, sb_smem, acc, sa, sb,
        loaded, done,
    ):  # fmt: skip
        pairs = (a, a_smem), (b, b_smem), (sa_gmem, sa_smem), (sb_gmem, sb_smem)
        start_copies(loaded, *pairs)
        plgpu.barrier_wait(loaded)
        for i in range(TILES):
            plgpu.async_copy_scales_to_tmem(sa_smem.at[i], sa.at[i])
        plgpu.async_copy_scales_to_tmem(sb_smem, sb)
        plgpu.tcgen05_mma(
            acc, a_smem, b_smem.T, done, a_scale=sa, b_scale=sb, accumulate=False
        )
        plgpu.barrier_wait(done)
        for i in range(TILES):
            out[i] = acc[i]

    scales = args[2].shape
    scratch = case.scratch() | {
        "a_smem": plgpu.SMEM(args[0].shape, E4M3, transforms=storage(E4M3)),
        "sa_smem": plgpu.SMEM(scales, E8M0),
        "acc": plgpu.TMEM((TILES, 128, case.n), F32),
        "sa": plgpu.TMEM((TILES, 128, 4), E8M0, layout=TmemLayout.scales()),
    }
    options = {"scratch_types": scratch, "target": "sm_100a", "on_gpu": False}
    everywhere.run(body, args, np.stack(wanted), **options)


# --- mistakes -------------------------------------------------------------------------


def mistaken(body, **scratch):
    case = CASES["128 rows"]
    scratch["acc"] = plgpu.TMEM((TILES, 128, case.n), F32)
    return case.make(plgpu.InterpretParams(partial_results=True), body, **scratch)


@pytest.mark.parametrize("rows", [128, 192, 384])
@refused
def test_the_left_operand_has_the_tiles_of_the_accumulator(rows):
    def body(a, b, out, a_smem, b_smem, acc, loaded, done):
        plgpu.tcgen05_mma(acc, a_smem, b_smem, done)  # HERE

    case = CASES["128 rows"]
    a_smem = plgpu.SMEM((rows, case.k), F16, transforms=storage(F16, 64))
    jax.eval_shape(mistaken(body, a_smem=a_smem), *case.operands())


def test_the_second_tile_is_in_flight_until_the_barrier():
    def body(a, b, out, a_smem, b_smem, acc, loaded, done):
        plgpu.copy_gmem_to_smem(a, a_smem.at[:128], loaded)
        plgpu.copy_gmem_to_smem(b, b_smem, loaded)
        plgpu.barrier_wait(loaded)
        a_smem[128:] = jnp.zeros((128, 32), F16)
        plgpu.commit_smem()
        plgpu.tcgen05_mma(acc, a_smem, b_smem, done, accumulate=False)
        out[...] = acc[1]
        plgpu.barrier_wait(done)

    case = CASES["128 rows"]
    a_smem = plgpu.SMEM((TILES * 128, case.k), F16, transforms=storage(F16, 64))
    with pytest.raises(errors.RaceError, match="tcgen05_mma"):
        mistaken(body, a_smem=a_smem)(*case.operands())

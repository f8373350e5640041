# SPDX-License-Identifier: Apache-2.0
"""Sparse products of pairs of CTAs, and with scales of blocks: everywhere, compiled."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
from pallas_gpu.layouts import TmemLayout
from tests.support.refusal import refused
from tests.support.scaled_products import E2M1
from tests.support.sparse_pairs import SparseTile
from tests.support.sparse_products import SparseProduct
from tests.support.tensor_products import BF16, E4M3, E5M2, F16, F32, check

I8, I32 = jnp.int8, jnp.int32
MXF8 = SparseProduct(a=E4M3, b=E4M3, k=256, n=64)
MXF4 = SparseProduct(a=E2M1, b=E2M1, k=256, n=64, a_swizzle=64)
KERNELS = {
    "a pair": SparseTile(SparseProduct(), 2),
    "a pair, K of two tiles": SparseTile(SparseProduct(a=BF16, b=BF16, k=256), 2),
    "a pair, float16 accumulator": SparseTile(SparseProduct(acc=F16, n=64), 2),
    "a pair, float8": SparseTile(SparseProduct(a=E4M3, b=E5M2, a_swizzle=64), 2),
    "a pair, int8, added up": SparseTile(
        SparseProduct(a=I8, b=I8, acc=I32, k=128, a_swizzle=64, rounds=2), 2
    ),
    "scales": SparseTile(MXF8, scaled=True),
    "scales, 256 columns": SparseTile(
        SparseProduct(a=E5M2, b=E4M3, k=256, n=256, rounds=2), scaled=True
    ),
    "a pair with scales": SparseTile(MXF8, 2, scaled=True),
    "a pair, tf32": SparseTile(SparseProduct(a=F32, b=F32, k=64), 2),
    "mxf4": SparseTile(MXF4, scaled=True),
    "mxf4, 16 stored elements": SparseTile(MXF4, scaled=True, block=32),
    "nvf4, 256 columns": SparseTile(
        dataclasses.replace(MXF4, n=256, rounds=2), 1, True, E4M3, 32
    ),
    "a pair, nvf4, K of two tiles": SparseTile(
        dataclasses.replace(MXF4, k=512, a_swizzle=128), 2, True, E4M3, 32
    ),
}


@pytest.mark.parametrize("case", KERNELS.values(), ids=KERNELS)
def test_a_sparse_product(case):
    check(case)


@pytest.mark.parametrize("asynchrony", ["eager", "late"])
def test_no_schedule_has_a_race(asynchrony):
    case = SparseTile(SparseProduct(n=32, rounds=2), 2)
    params = plgpu.InterpretParams(asynchrony=asynchrony, schedules=4)
    assert (case.make(params)(*case.operands()) == case.expected()).all()


@pytest.mark.offline
@pytest.mark.parametrize(
    ("case", "kind", "count"),
    [
        (SparseTile(SparseProduct(a=F32, b=F32, k=64)), "1.kind::tf32", 4),
        (SparseTile(SparseProduct(a=F32, b=F32, k=64), 2), "2.kind::tf32", 4),
        (SparseProduct(m=64), "1.kind::f16", 8),
        (SparseProduct(m=64, a=F32, b=F32, k=64), "1.kind::tf32", 8),
        (SparseProduct(m=64, a=E4M3, b=E5M2, a_swizzle=64), "1.kind::f8f6f4", 4),
        (SparseProduct(m=64, a=I8, b=I8, acc=I32, a_swizzle=64), "1.kind::i8", 4),
    ],
)
def test_ptxas_takes_products_that_upstream_has_not(case, kind, count):
    """Others are upstream's: tests/differential/test_narrow_products."""
    (report,) = plgpu.offline.compile(case.make(), *case.operands(), target="sm_100a")
    assert report.ptx.count(f"tcgen05.mma.sp.cta_group::{kind} ") == count
    assert report.resources.spill_load_bytes == 0


# --- what is refused ------------------------------------------------------------------


ONE = plgpu.TMEM((128, 64), jnp.uint2, layout=TmemLayout.sparse_metadata())
WIDE = plgpu.TMEM((128, 64), F32, collective=True)
LOW = plgpu.TMEM((64, 32), F32, collective=True)
INTEGERS = SparseProduct(a=I8, b=I8, acc=I32, k=128, a_swizzle=64, n=48)


@pytest.mark.parametrize(
    ("case", "scratch"),
    [
        (KERNELS["a pair"], {"metadata": ONE, "acc": plgpu.TMEM((128, 32), F32)}),
        (SparseTile(SparseProduct(n=32), 2), {"acc": WIDE}),
        (SparseTile(INTEGERS, 2), {}),
        (SparseTile(SparseProduct(), 2), {"acc": LOW}),
        (KERNELS["scales"], {"acc": plgpu.TMEM((64, 64), F32)}),
    ],
    ids=[
        *("metadata of one CTA", "columns of b", "N of integers"),
        *("64 rows", "64 rows with scales"),
    ],
)
@refused
def test_what_is_not_multiplied(case, scratch):
    jax.eval_shape(case.make(**scratch), *case.operands())

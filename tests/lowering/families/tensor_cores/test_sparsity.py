# SPDX-License-Identifier: Apache-2.0
"""Sparse products as kernels write them: every form of operands, everywhere."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu.layouts import TmemLayout
from tests.support import everywhere
from tests.support.refusal import refused
from tests.support.scaled_products import E2M1
from tests.support.sparse_products import SparseProduct
from tests.support.tensor_products import (
    BF16,
    E4M3,
    E5M2,
    F16,
    F32,
    check,
    check_inferred,
    storage,
)

I8, U8, I32 = jnp.int8, jnp.uint8, jnp.int32
KERNELS = {
    "f16": SparseProduct(),
    "bf16, K of two tiles": SparseProduct(a=BF16, b=BF16, k=256),
    "b along N": SparseProduct(b_stored=False, n=64),
    "b along N in narrow rows": SparseProduct(b_stored=False, n=16, b_swizzle=32),
    "64-byte swizzles": SparseProduct(a_swizzle=64, b_swizzle=64),
    "32-byte swizzle of a": SparseProduct(a_swizzle=32),
    "f16 accumulator": SparseProduct(acc=F16, n=16),
    "two kinds of float8": SparseProduct(a=E4M3, b=E5M2, a_swizzle=64),
    "float8, K of two tiles": SparseProduct(a=E5M2, b=E5M2, k=256),
    "int8 and uint8": SparseProduct(a=I8, b=U8, acc=I32, k=256),
    "256 columns, added up": SparseProduct(n=256, rounds=3),
    "272 columns": SparseProduct(n=272),
    "a in TMEM": SparseProduct(a_in_tmem=True),
    "tf32": SparseProduct(a=F32, b=F32),
    "tf32, K of two tiles, narrow a": SparseProduct(
        a=F32, b=F32, a_swizzle=64, b_swizzle=64, rounds=2
    ),
    "tf32, a in TMEM": SparseProduct(a=F32, b=F32, k=64, a_in_tmem=True),
    "64 rows": SparseProduct(m=64),
    "64 rows, bf16, K of two tiles": SparseProduct(m=64, a=BF16, b=BF16, k=256),
    "64 rows, b along N": SparseProduct(m=64, b_stored=False, n=128),
    "64 rows, f16 accumulator": SparseProduct(m=64, acc=F16, n=16),
    "64 rows, float8, added up": SparseProduct(
        m=64, a=E4M3, b=E5M2, a_swizzle=64, n=48, rounds=2
    ),
    "64 rows, int8, 80 columns": SparseProduct(m=64, a=I8, b=U8, acc=I32, k=256, n=80),
    "64 rows, 256 columns": SparseProduct(m=64, n=256),
    "64 rows, tf32": SparseProduct(m=64, a=F32, b=F32),
}


@pytest.mark.parametrize("case", KERNELS.values(), ids=KERNELS)
def test_a_sparse_product(case):
    check(case)


def test_each_half_of_n_reads_its_own_metadata_of_64_rows():
    case = SparseProduct(m=64)
    (stored, b, meta), (dense, _) = case.operands(), case.dense()
    # In lanes 16 to 31 of each warp the last two of four elements are stored.
    last = np.zeros((64, case.k // 4, 4), F16)
    last[..., 2:] = stored.reshape(64, -1, 2)
    other = plgpu.compress_2_of_4(np.tile([0, 0, 1, 1], (64, case.k // 4)))[1]
    other = plgpu.format_tcgen05_sparse_metadata(other, F16)
    upper = np.arange(128)[:, None] // 16 % 2 == 1
    meta = np.where(upper, np.asarray(other), np.asarray(meta))
    halves = zip((dense, last.reshape(dense.shape)), np.split(b, 2), strict=True)
    expected = [np.float32(a) @ np.float32(right).T for a, right in halves]
    args = stored, b, meta
    everywhere.check(case.make, args, np.concatenate(expected, 1), on_gpu=False)


@pytest.mark.parametrize(
    "case",
    [
        SparseProduct(),
        SparseProduct(a=E4M3, b=E4M3),
        SparseProduct(a=F32, b=F32, k=64),
        SparseProduct(m=64, n=64),
    ],
)
def test_warpgroup_semantics_infer_how_operands_are_stored(case):
    check_inferred(dataclasses.replace(case, inferred=True))


# --- what is refused ------------------------------------------------------------------


def attempt(case=KERNELS["f16"], copied=None, scratch=None):
    """Traces a product, or of a copy of what `copied` returns."""

    def body(a, b, meta, out, a_smem, b_smem, m_smem, acc, metadata, done, **_):
        right = b_smem.T if case.b_stored else b_smem
        call, args = plgpu.tcgen05_mma, (acc, a_smem, right, done)
        given = {"a_sparse_metadata": metadata}
        if copied is not None:
            call, given = plgpu.async_copy_sparse_metadata_to_tmem, {}
            args = copied(m_smem, metadata)
        call(*args, **given)  # HERE

    types = [jax.ShapeDtypeStruct((8, 128), F32)] * 3
    jax.eval_shape(case.make(body=body, **(scratch or {})), *types)


def both(source, target):
    return source, target


@refused
def test_metadata_is_copied_from_smem():
    attempt(copied=lambda source, target: (target, target))


@refused
def test_metadata_has_indices_of_two_bits():
    attempt(copied=both, scratch={"m_smem": plgpu.SMEM((1, 1, 128, 16), jnp.uint8)})


@refused
def test_the_shapes_of_a_copy_correspond():
    attempt(copied=both, scratch={"m_smem": plgpu.SMEM((1, 2, 128, 64), jnp.uint2)})


@refused
def test_copied_metadata_has_its_layout():
    default = TmemLayout.default(packing=8)
    metadata = plgpu.TMEM((128, 64), jnp.uint2, layout=default)
    attempt(copied=both, scratch={"metadata": metadata})


@pytest.mark.parametrize(
    ("case", "scratch"),
    [
        (SparseProduct(n=24), {}),
        (
            SparseProduct(a=F32, b=F32, k=192),
            {
                "metadata": plgpu.TMEM(
                    (128, 192), jnp.uint2, layout=TmemLayout.sparse_metadata()
                ),
                "m_smem": plgpu.SMEM((1, 3, 128, 64), jnp.uint2),
                "a_smem": plgpu.SMEM((128, 88), F32),
            },
        ),
        (
            SparseProduct(),
            {"a_smem": plgpu.SMEM((128, 128), F16, transforms=storage(F16))},
        ),
        (SparseProduct(b_swizzle=32), {}),
        (SparseProduct(), {"metadata": plgpu.TMEM((128, 64), F32)}),
    ],
    ids=["N", "K of a", "dense a", "rows of 32 bytes", "type"],
)
@refused
def test_what_no_instruction_multiplies(case, scratch):
    attempt(case, scratch=scratch)


@refused
def test_sparse_operands_of_16_bits_have_no_scales():
    case = SparseProduct()
    scales = plgpu.TMEM((128, 4), jnp.float8_e8m0fnu, layout=TmemLayout.scales())

    def body(a, b, meta, out, a_smem, b_smem, acc, metadata, done, sa, sb, **_):
        given = {"a_scale": sa, "b_scale": sb, "a_sparse_metadata": metadata}
        plgpu.tcgen05_mma(acc, a_smem, b_smem.T, done, **given)  # HERE

    types = [jax.ShapeDtypeStruct((8, 128), F32)] * 3
    jax.eval_shape(case.make(body=body, sa=scales, sb=scales), *types)


@refused
def test_operands_of_four_bits_have_scales():
    case = SparseProduct(a=E2M1, b=E2M1, k=256, a_swizzle=64)
    attempt(case)


GOOD = {
    "async_copy_sparse_metadata_to_tmem": lambda e: {"smem_ref": e.g, "tmem_ref": e.d}
}
EFFECTS = {
    "async_copy_sparse_metadata_to_tmem.collective_axis": (
        "tests/lowering/families/tensor_cores/test_sparse_pairs.py::"
        "test_what_is_not_multiplied"
    )
}

# SPDX-License-Identifier: Apache-2.0
"""Kernels whose layouts are left to the compiler."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.semantics import Warpgroup, under

F16, F32 = jnp.float16, jnp.float32
RNG = np.random.default_rng(7)


def normal(*shape: int, dtype=F32):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def kernel(body, shape, dtype=F32, **options):
    return everywhere.kernel(body, jax.ShapeDtypeStruct(shape, dtype), **options)


def check(body, args, expected, dtype=F32, **options):
    """Runs a body in the emulator, lowered, and on a GPU where there is one."""
    tolerances = {k: options.pop(k) for k in ("atol", "rtol") if k in options}
    make = kernel(body, np.shape(expected), dtype, **options)
    everywhere.check(make, args, expected, semantics=[Warpgroup], **tolerances)


# --- SMEM without transforms ----------------------------------------------------------


@pytest.mark.parametrize("dtype", [F16, jnp.bfloat16, F32])
@pytest.mark.parametrize("transposed", [False, True])
def test_operands_of_a_product_get_the_tiles_that_it_needs(dtype, transposed):
    """Copied by TMA, multiplied, and nothing said about how they are stored."""
    if dtype == F32 and not transposed:
        pytest.skip("the tensor core transposes 16-bit types only")
    a, b = normal(128, 64, dtype=dtype), normal(64, 128, dtype=dtype)
    stored = b.T if transposed else b

    def body(a_gmem, b_gmem, o_gmem, a_smem, b_smem, full):
        plgpu.copy_gmem_to_smem(a_gmem, a_smem, full)
        plgpu.copy_gmem_to_smem(b_gmem, b_smem, full)
        plgpu.barrier_wait(full)

        def multiply(acc):
            plgpu.wgmma(acc, a_smem, b_smem.T if transposed else b_smem)
            return acc[...]

        o_gmem[...] = plgpu.run_scoped(multiply, plgpu.ACC((128, 128)))

    check(
        body,
        [a, jnp.array(stored)],
        np.asarray(a, np.float32) @ np.asarray(b, np.float32),
        scratch_types=[
            plgpu.SMEM(a.shape, dtype),
            plgpu.SMEM(stored.shape, dtype),
            plgpu.Barrier(num_arrivals=2),
        ],
        atol=5e-2 if dtype == F32 else 1e-4,
    )


def test_a_result_goes_back_through_smem_in_16_bit_tiles():
    x = normal(64, 128, dtype=F16)

    def body(x_gmem, o_gmem, x_smem, full):
        plgpu.copy_gmem_to_smem(x_gmem, x_smem, full)
        plgpu.barrier_wait(full)
        x = x_smem[...].astype(F32)
        x_smem[...] = (x * 2).astype(F16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(x_smem, o_gmem)
        plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM(x.shape, F16), plgpu.Barrier()]
    check(body, [x], x * 2, F16, scratch_types=scratch)


# --- registers ------------------------------------------------------------------------


def test_a_softmax_between_two_products_needs_no_layouts():
    q, k, v = normal(64, 64, dtype=F16), normal(64, 64, dtype=F16), normal(64, 64)
    v = v.astype(F16)

    def body(q_gmem, k_gmem, v_gmem, o_gmem, q_smem, k_smem, v_smem, full):
        for source, target in ((q_gmem, q_smem), (k_gmem, k_smem), (v_gmem, v_smem)):
            plgpu.copy_gmem_to_smem(source, target, full)
        plgpu.barrier_wait(full)

        def scores(acc):
            plgpu.wgmma(acc, q_smem, k_smem.T)
            return acc[...]

        s = plgpu.run_scoped(scores, plgpu.ACC((64, 64)))
        p = jnp.exp(s - s.max(axis=1, keepdims=True))
        p = p / p.sum(axis=1, keepdims=True)

        def weighted(acc):
            plgpu.wgmma(acc, p.astype(F16), v_smem)
            return acc[...]

        o_gmem[...] = plgpu.run_scoped(weighted, plgpu.ACC((64, 64)))

    scores = np.asarray(q, np.float32) @ np.asarray(k, np.float32).T
    p = np.exp(scores - scores.max(1, keepdims=True))
    p = (p / p.sum(1, keepdims=True)).astype(np.float16).astype(np.float32)
    check(
        body,
        [q, k, v],
        p @ np.asarray(v, np.float32),
        scratch_types=[*[plgpu.SMEM((64, 64), F16)] * 3, plgpu.Barrier(num_arrivals=3)],
        atol=2e-3,
    )


def test_a_transposed_array_meets_one_that_is_not():
    x = normal(64, 64)

    def body(x_ref, o_ref):
        x = x_ref[...]
        o_ref[...] = x + x.T

    check(body, [x], x + x.T)


def test_ranks_above_two_keep_their_leading_axes():
    x = normal(3, 64, 32)

    def body(x_ref, o_ref):
        x = x_ref[...]
        o_ref[...] = x * x.max(axis=2, keepdims=True) + jnp.transpose(x, (0, 2, 1)).sum(
            axis=1
        ).reshape(3, 64, 1)

    expected = x * x.max(2, keepdims=True) + x.sum(2)[..., None]
    check(body, [x], expected, atol=1e-4)


def test_a_carry_that_starts_as_a_splat_and_one_that_changes_its_layout():
    x = normal(64, 64)

    def body(x_ref, o_ref):
        x = x_ref[...]

        def step(i, carry):
            total, other = carry
            return total + other, (other.T + i).astype(F32)

        o_ref[...] = lax.fori_loop(0, 3, step, (jnp.zeros((64, 64), F32), x))[0]

    expected = x + x.T + (x + 1)
    check(body, [x], expected, atol=1e-5)


def test_a_branch_gives_one_layout_for_both_sides():
    x = normal(64, 64)

    def body(x_ref, o_ref):
        x = x_ref[...]
        o_ref[...] = lax.cond(x_ref[0, 0] > 0, lambda: x.T, lambda: x * 2)

    expected = np.asarray(x).T if x[0, 0] > 0 else x * 2
    check(body, [x], expected)


def test_unsigned_integers_keep_their_sign_through_the_module():
    x = jnp.asarray(RNG.integers(0, 2**32, (64, 64), np.uint32))

    def body(x_ref, o_ref):
        x = x_ref[...]
        larger = jnp.maximum(x, x.T) // 3 + (x >> 28)
        o_ref[...] = jnp.where(x > jnp.uint32(2**31), larger, x.max(axis=1)[:, None])

    n = np.asarray(x)
    larger = np.maximum(n, n.T) // 3 + (n >> 28)
    expected = np.where(n > 2**31, larger, n.max(1)[:, None])
    check(body, [x], expected.astype(np.uint32), jnp.uint32)


def test_float8_and_bools_pass_memory_and_relayouts():
    x = normal(64, 64).astype(jnp.float8_e4m3fn)

    def body(x_ref, o_ref):
        x = x_ref[...]
        positive = x.astype(F32) > 0
        o_ref[...] = jnp.where(positive.T, x.astype(F32), 0.0)

    expected = np.where(np.asarray(x, np.float32).T > 0, np.asarray(x, np.float32), 0)
    check(body, [x], expected)


# --- what the compiler shows ----------------------------------------------------------


def test_the_module_before_expansion_is_shown_with_its_layouts(tmp_path, monkeypatch):
    monkeypatch.setenv("PALLAS_GPU_KEEP", "warpgroup,annotated")
    monkeypatch.setenv("PALLAS_GPU_DUMP_DIR", str(tmp_path))
    x = normal(64, 64)

    def body(x_ref, o_ref):
        x = plgpu.load(x_ref, layout=plgpu.Layout.WGMMA, optimized=False)
        o_ref[...] = jnp.exp(x)

    plgpu.offline.lower(under(Warpgroup, kernel(body, x.shape, name="shown")(None)), x)
    before = (tmp_path / "shown.0.warpgroup").read_text()
    assert "pallas_gpu.exp" in before and "mosaic_gpu.vector_load" in before
    assert "Layout.WGMMA" not in before
    assert "Layout.WGMMA" in (tmp_path / "shown.0.annotated").read_text()

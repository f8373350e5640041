# SPDX-License-Identifier: Apache-2.0
"""Kernels whose layouts are left to the compiler."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.semantics import Warpgroup, under

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
RNG = np.random.default_rng(7)


def normal(*shape: int, dtype=F32):
    return RNG.standard_normal(shape).astype(dtype)


check = functools.partial(everywhere.run, semantics=[Warpgroup])


# --- SMEM without transforms ----------------------------------------------------------


# The tensor core transposes 16-bit types only.
@pytest.mark.parametrize(
    ("dtype", "transposed"),
    [(F16, False), (F16, True), (BF16, False), (BF16, True), (F32, True)],
)
def test_operands_of_a_product_get_the_tiles_that_it_needs(dtype, transposed):
    """Copied by TMA, multiplied, and nothing said about how they are stored."""
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
        [a, np.ascontiguousarray(stored)],
        a.astype(F32) @ b.astype(F32),
        plgpu.SMEM(a.shape, dtype),
        plgpu.SMEM(stored.shape, dtype),
        plgpu.Barrier(num_arrivals=2),
        atol=5e-2 if dtype == F32 else 1e-4,
    )


# --- registers ------------------------------------------------------------------------


def test_a_softmax_between_two_products_needs_no_layouts():
    q, k, v = (normal(64, 64, dtype=F16) for _ in range(3))

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

    scores = q.astype(F32) @ k.astype(F32).T
    p = np.exp(scores - scores.max(1, keepdims=True))
    p = (p / p.sum(1, keepdims=True)).astype(np.float16).astype(np.float32)
    scratch = [*[plgpu.SMEM((64, 64), F16)] * 3, plgpu.Barrier(num_arrivals=3)]
    check(body, [q, k, v], p @ v.astype(F32), *scratch, atol=2e-3)


def carries(x):
    """A carry that starts as a splat, and one that changes its layout."""

    def step(i, carry):
        total, other = carry
        return total + other, (other.T + i).astype(F32)

    return lax.fori_loop(0, 3, step, (jnp.zeros((64, 64), F32), x))[0]


def unsigned(x):
    """Integers keep their sign through the module."""
    larger = jnp.maximum(x, x.T) // 3 + (x >> 28)
    return jnp.where(x > jnp.uint32(2**31), larger, x.max(axis=1)[:, None])


X = normal(64, 64)
FUNCTIONS = {
    "a transposed array meets one that is not": (lambda x: x + x.T, X),
    "ranks above two keep their leading axes": (
        lambda x: x * x.max(axis=2, keepdims=True) + x.sum(axis=2)[..., None],
        normal(3, 64, 32),
    ),
    "carries": (carries, X),
    "both sides of a branch have one layout": (
        lambda x: lax.cond(x[0, 0] > 0, lambda: x.T, lambda: x * 2),
        X,
    ),
    "unsigned integers": (unsigned, RNG.integers(0, 2**32, (64, 64), np.uint32)),
    "float8 and bools pass memory and relayouts": (
        lambda x: jnp.where((x.astype(F32) > 0).T, x.astype(F32), 0.0),
        X.astype(jnp.float8_e4m3fn),
    ),
    # Shapes without a linear default.
    "a row is repeated": (lambda x: jnp.broadcast_to(x, (64, 100)), normal(100)),
    "an odd array is transposed": (lambda x: x.T, normal(192, 24)),
    **{
        f"axis {axis} of {shape} is reduced": (
            functools.partial(jnp.sum, axis=axis),
            normal(*shape),
        )
        for shape in [(192, 24), (64, 100), (2, 96, 24)]
        for axis in (0, 1)
    },
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_an_array_needs_no_layouts(name):
    function, x = FUNCTIONS[name]

    def body(x_ref, o_ref):
        o_ref[...] = function(x_ref[...])

    check(body, [x], np.asarray(jax.jit(function)(x)), atol=1e-4)


# --- what the compiler shows ----------------------------------------------------------


def test_the_program_is_shown_with_its_layouts(tmp_path, monkeypatch):
    monkeypatch.setenv("PALLAS_GPU_KEEP", "annotated")
    monkeypatch.setenv("PALLAS_GPU_DUMP_DIR", str(tmp_path))
    x = normal(64, 64)

    def body(x_ref, o_ref):
        x = plgpu.load(x_ref, layout=plgpu.Layout.WGMMA, optimized=False)
        o_ref[...] = jnp.exp(x)

    kernel = everywhere.kernel(body, x, name="shown")
    plgpu.offline.lower(under(Warpgroup, kernel()), x)
    shown = (tmp_path / "shown.0.annotated").read_text()
    assert re.search(r"= exp %\d+: Layout.WGMMA +# .*test_warpgroup.py", shown)

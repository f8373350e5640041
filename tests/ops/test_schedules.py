# SPDX-License-Identifier: Apache-2.0
"""Each ready kernel, forward and backward, under 20 orders of threads and copies.

The emulator fails on a race, a deadlock, and a result that depends on the order. The
sizes divide nothing, and each kernel has several blocks, or several tiles for a block;
what it computes is tested in the kernels' own files.
"""

from __future__ import annotations

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import ops

TWENTY = plgpu.InterpretParams(schedules=20)
CONTRACTED = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
MATMUL = ops.MatmulConfig(
    tile_m=64, tile_n=64, tile_k=64, stages=2, blocks=2, strip=2, epilogue_n=32
)
SPLIT = ops.SplitMatmulConfig(
    tile_m=8, tile_n=64, tile_k=16, stages=2, warpgroups=1, split=2
)
FEW = ops.LinearFewConfig(rows=64, stages=2)
RAGGED = ops.RaggedDotConfig(tile_m=64, tile_n=64, stages=2, blocks=2)
ATTENTION = {
    "config": ops.AttentionConfig(block_kv=32, blocks=2),
    "backward_config": ops.AttentionBackwardConfig(block_q=64, stages=2),
}
FOUR_SCALES = {"scale_dtype": jnp.float8_e4m3fn, "block": 16}


def normal(*shape, dtype=jnp.float16, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def integers(*values):
    return np.array(values, np.int32)


def narrow(k, n, dtype, group=None):
    w, scale = ops.quantize(normal(k, n, seed=1), dtype, group=group)
    return {"w": w, "w_scale": scale}


def blocks(dtype, **options):
    lhs = ops.quantize_blocks(normal(1, 130, 128), dtype, **options)
    rhs = ops.quantize_blocks(normal(1, 130, 128, seed=1), dtype, **options)
    return lhs[0], rhs[0], lhs[1], rhs[1]


X, W = normal(130, 40), normal(40, 136, seed=1)
Q, KV = normal(1, 130, 2, 16), normal(1, 70, 1, 16, seed=1)
LENGTHS = integers(150, 70)
CACHE, QUERY = normal(2, 150, 2, 64), normal(2, 1, 4, 64, seed=1)
MATRICES, ROWS = normal(3, 72, 72, seed=1), integers(70, 0, 60)
E4M3 = jnp.float8_e4m3fn
# The function and its operands, made when they are called; these have derivatives.
CALLS = {
    "matmul": lambda: (functools.partial(ops.matmul, config=MATMUL), X, W),
    "matmul, few rows": lambda: (functools.partial(ops.matmul, config=SPLIT), X[:5], W),
    "matmul, gate": lambda: (
        lambda x, w, g, **o: ops.matmul(x, w, gate=g, config=MATMUL, **o), X, W, W,
    ),
    "linear, few tokens": lambda: (
        lambda x, **o: ops.linear(x, **narrow(40, 136, jnp.int4), config=FEW, **o),
        X[:5],
    ),
    "linear, many tokens": lambda: (
        lambda x, **o: ops.linear(x, **narrow(128, 264, jnp.int8, 64), **o),
        normal(200, 128),
    ),
    "rms_norm": lambda: (ops.rms_norm, normal(5, 136), normal(136)),
    "layer_norm": lambda: (ops.layer_norm, normal(5, 136), normal(136), normal(136)),
    "softmax": lambda: (ops.softmax, normal(5, 136)),
    "log_softmax": lambda: (ops.log_softmax, normal(5, 136)),
    "top_k": lambda: (lambda x, **o: ops.top_k(x, 4, **o)[0], normal(5, 136)),
    "rotary_embedding": lambda: (ops.rotary_embedding, normal(2, 7, 2, 16)),
    "linear_cross_entropy": lambda: (
        lambda x, w, **o: ops.linear_cross_entropy(x, w, jnp.arange(130) % 100, **o),
        X, W,
    ),
    "attention": lambda: (
        functools.partial(ops.attention, causal=True, **ATTENTION), Q, KV, KV,
    ),
    "attention, deterministic": lambda: (
        functools.partial(ops.attention, deterministic=True), Q, KV, KV,
    ),
    "attention, packed": lambda: (
        lambda q, k, v, **o: ops.attention(
            q, k, v, cu_seqlens_q=integers(0, 30, 130),
            cu_seqlens_kv=integers(0, 50, 70), **o,
        ),
        Q[0], KV[0], KV[0],
    ),
    "dot_product_attention": lambda: (
        lambda q, k, v, **o: ops.dot_product_attention(
            q, k, v, normal(1, 2, 130, 70, seed=2), **o
        ),
        Q, KV, KV,
    ),
    "ragged_dot": lambda: (
        lambda x, w, **o: ops.ragged_dot(x, w, ROWS, config=RAGGED, **o),
        normal(130, 72), MATRICES,
    ),
    "ragged_dot_general": lambda: (
        lambda x, y, **o: ops.ragged_dot_general(
            x, y, ROWS, CONTRACTED, config=RAGGED, **o
        ),
        normal(130, 72), normal(130, 80, seed=1),
    ),
}  # fmt: skip
# These have no derivatives.
FORWARD = {
    "decode_attention": lambda: (
        lambda q, k, v, **o: ops.decode_attention(q, k, v, lengths=LENGTHS, **o),
        QUERY, CACHE, CACHE,
    ),
    "decode_attention, divided evenly": lambda: (
        functools.partial(ops.decode_attention, config=ops.DecodeConfig(workers=3)),
        QUERY, CACHE, CACHE,
    ),
    "decode_attention, int8": lambda: (
        functools.partial(ops.decode_attention, k_scale=1.0, v_scale=1.0),
        QUERY, (CACHE * 40).astype(jnp.int8), (CACHE * 40).astype(jnp.int8),
    ),
    "attention, float8": lambda: (
        ops.attention, Q.astype(E4M3), KV.astype(E4M3), KV.astype(E4M3),
    ),
    "scaled_matmul": lambda: (ops.scaled_matmul, X.astype(E4M3), W.astype(E4M3)),
    "scaled_matmul, blocks": lambda: (
        ops.scaled_matmul,
        normal(130, 256).astype(E4M3), normal(256, 136).astype(E4M3),
        jnp.ones((130, 2)), jnp.ones((2, 2)),
    ),
    "block_scaled_matmul": lambda: (ops.block_scaled_matmul, *blocks(E4M3)),
    "block_scaled_matmul, float4": lambda: (
        ops.block_scaled_matmul, *blocks(jnp.float4_e2m1fn, **FOUR_SCALES),
    ),
}  # fmt: skip
# They are XLA's alone.
NO_KERNEL = {"quantize", "quantize_blocks", "clear_cache"}


def test_each_function_has_a_call():
    functions = {n for n in ops.__all__ if inspect.isfunction(getattr(ops, n))}
    called = {name.partition(",")[0] for name in (*CALLS, *FORWARD)}
    assert called == functions - NO_KERNEL


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CALLS, *FORWARD])
def test_twenty_schedules_give_one_result(name):
    function, *operands = {**CALLS, **FORWARD}[name]()
    out = function(*operands, interpret=TWENTY)
    assert bool(jnp.isfinite(out.astype(jnp.float32)).all())


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_twenty_schedules_give_the_same_derivatives(name):
    function, *operands = CALLS[name]()
    _, pullback = jax.vjp(functools.partial(function, interpret=TWENTY), *operands)
    out = jax.eval_shape(function, *operands)
    gradients = pullback(normal(*out.shape, dtype=out.dtype, seed=3))
    assert all(bool(jnp.isfinite(x.astype(jnp.float32)).all()) for x in gradients)

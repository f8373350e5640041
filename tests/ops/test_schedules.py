# SPDX-License-Identifier: Apache-2.0
"""Each configuration of the ready kernels, forward and backward, in many schedules.

The emulator fails on a race, a deadlock, and a result that depends on the order. The
sizes divide nothing, and each block has several tiles or several steps; what a kernel
computes in its first schedule is tested in the kernels' own files.
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
from tests.support import tiers
from tests.support.semantics import Lane, under


def schedules():
    """As many with random as with late and with eager completion of copies."""
    return plgpu.InterpretParams(schedules=18 if tiers.runs_everything() else 3)


E4M3, INT8, INT4 = jnp.float8_e4m3fn, jnp.int8, jnp.int4


def numbers(lhs, rhs, groups):
    dims = ((lhs,), (rhs,)), ((), ())
    return jax.lax.RaggedDotDimensionNumbers(dims, (0,), groups)


TRANSPOSED, CONTRACTED = numbers(1, 2, (0,)), numbers(0, 0, ())


def normal(*shape, dtype=jnp.float16, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def integers(*values):
    return np.array(values, np.int32)


def matmul(**changes):
    """A product of two tiles and a part in each dimension."""
    tiles = {"tile_m": 64, "tile_n": 64, "tile_k": 32, "epilogue_n": 32, "stages": 2}
    others = {"cluster": None, "strip": 2, "blocks": 2}
    return functools.partial(
        ops.matmul, config=ops.MatmulConfig(**(tiles | others | changes))
    )


def few_rows(**changes):
    c = {"tile_m": 8, "tile_n": 64, "tile_k": 16, "stages": 3, "warpgroups": 1}
    config = ops.SplitMatmulConfig(**(c | {"split": 2, "blocks": 8} | changes))
    return functools.partial(ops.matmul, config=config)


def blackwell_matmul(**changes):
    c = {"tile_n": 64, "tile_k": 64, "stages": 3, "blocks": 2, "strip": 2}
    return functools.partial(
        ops.matmul, config=ops.BlackwellMatmulConfig(**(c | changes))
    )


def attention(backward=None, deterministic=False, **config):
    return functools.partial(
        ops.attention,
        causal=True,
        config=ops.AttentionConfig(**({"block_kv": 32, "blocks": 2} | config)),
        backward_config=ops.AttentionBackwardConfig(
            **({"block_q": 64, "stages": 2} | (backward or {}))
        ),
        deterministic=deterministic,
    )


def biased(q, k, v, bias, **o):
    return ops.attention(q, k, v, bias=bias, causal=True, **o)


def packed(deterministic):
    def call(q, k, v, **o):
        starts = {
            "cu_seqlens_q": integers(0, 30, 130),
            "cu_seqlens_kv": integers(0, 50, 70),
        }
        return ops.attention(q, k, v, **starts, deterministic=deterministic, **o)

    return call


def blackwell_attention(stages):
    config = ops.BlackwellAttentionConfig(block_kv=32, stages=stages)
    return functools.partial(ops.attention, config=config, causal=True)


def linear(w, scale, config=None):
    return lambda x, **o: ops.linear(x, w, w_scale=scale, config=config, **o)


def layer(config, dtype):
    """A layer whose weights of 72 rows have scales for each 32 of 160 columns."""
    w, scale = ops.quantize(normal(72, 160, seed=1), dtype, axis=-1, group=32)
    return lambda x, **o: ops.linear(
        x, w, w_scale=scale, transpose_w=True, config=config, **o
    )


def ragged(sizes, dims=None, **changes):
    c = {"tile_m": 64, "tile_n": 64, "tile_k": 32, "stages": 2, "blocks": 3}
    config = ops.RaggedDotConfig(**(c | {"strip": 2, "epilogue_n": 32} | changes))
    options = {"group_sizes": integers(*sizes), "config": config}
    if dims is None:
        return functools.partial(ops.ragged_dot, **options)
    return functools.partial(
        ops.ragged_dot_general, ragged_dot_dimension_numbers=dims, **options
    )


def block_scaled(tile_n, collective):
    c = ops.BlockScaledMatmulConfig(
        tile_n=tile_n, stages=3, blocks=2, strip=2, collective=collective
    )
    return functools.partial(ops.block_scaled_matmul, config=c)


def blocks(dtype, k=288, **options):
    lhs = ops.quantize_blocks(normal(1, 130, k), dtype, **options)
    rhs = ops.quantize_blocks(normal(1, 260, k, seed=1), dtype, **options)
    return lhs[0], rhs[0], lhs[1], rhs[1]


def scaled(**changes):
    c = {"tile_m": 64, "tile_n": 128, "stages": 2, "blocks": 4, "strip": 2}
    config = ops.ScaledMatmulConfig(**(c | {"cluster": "n"} | changes))
    return functools.partial(ops.scaled_matmul, config=config)


def decode(**config):
    return lambda q, k, v, **o: ops.decode_attention(
        q, k, v, lengths=integers(150, 70), config=ops.DecodeConfig(**config), **o
    )


def paged(q, k, v, **o):
    config = ops.DecodeConfig(block_kv=128, consumers=2, stages=1, cluster=2)
    table = np.random.default_rng(1).permutation(18).reshape(2, 9).astype("i4")
    return ops.decode_attention(
        q, k, v, lengths=integers(140, 70), page_table=table, config=config, **o
    )


X, W = normal(130, 72), normal(72, 136, seed=1)
F32_X, F32_W = normal(130, 72, dtype=jnp.float32), normal(72, 136, dtype=jnp.float32)
FEW, WIDE = normal(12, 136), normal(136, 72, seed=1)
Q, KV = normal(1, 130, 2, 16), normal(1, 70, 1, 16, seed=1)
# Two tiles in the derivatives, whose blocks then take several.
KV150 = normal(1, 150, 1, 16, seed=1)
Q64, KV64 = normal(1, 260, 1, 64), normal(1, 80, 1, 64, seed=1)
Q128, KV128 = normal(1, 260, 1, 128), normal(1, 80, 1, 128, seed=1)
CACHE, QUERY = normal(2, 150, 2, 64), normal(2, 1, 4, 64, seed=1)
PAGES = normal(18, 16, 2, 64)
MATRICES, SIZES = normal(3, 72, 72, seed=1), (70, 0, 60)
IDS = np.asarray(np.arange(130)[None] // 50, np.int32)
TOKENS = np.asarray(np.random.default_rng(0).integers(0, 40, 130), np.int32)
# No row, a quarter and half of a step, and more rows than stay in SMEM.
DEPTHS = 5, 8, 9, 0, 16, 17, 65
FOUR_WARPGROUPS = ops.LinearFewConfig(
    tokens=16, stages=2, resident=True, rows=128, warpgroups=4, splits=2, blocks=2
)
SPLIT = ops.LinearFewConfig(tokens=16, stages=2, splits=2, warpgroups=2)
MANY = ops.LinearManyConfig(tokens=64, stages=2, blocks=4)

# The function and its operands, all of which have derivatives. What JAX computes for a
# row is computed when it is run.
CALLS = {
    "matmul": (matmul(), X, W),
    "matmul, few rows": (few_rows(), FEW, WIDE),
    "linear, few tokens": lambda: (
        linear(*ops.quantize(W, INT4), ops.LinearFewConfig(rows=64, stages=2)), X[:5],
    ),
    "linear, many tokens": lambda: (
        linear(*ops.quantize(normal(128, 136, seed=1), INT8, group=64), MANY),
        normal(70, 128),
    ),
    "rms_norm": (ops.rms_norm, normal(5, 136), normal(136)),
    "layer_norm": (ops.layer_norm, normal(5, 136), normal(136), normal(136)),
    "softmax": (ops.softmax, normal(5, 136)),
    "log_softmax": (ops.log_softmax, normal(5, 136)),
    "top_k": (lambda x, **o: ops.top_k(x, 4, **o)[0], normal(5, 136)),
    "rotary_embedding": (ops.rotary_embedding, normal(2, 7, 2, 16)),
    "linear_cross_entropy": (
        lambda x, w, **o: ops.linear_cross_entropy(x, w, jnp.arange(70), **o),
        X[:70], W,
    ),
    "attention": (attention(), Q, KV, KV),
    "attention, deterministic": (
        functools.partial(ops.attention, deterministic=True), Q, KV, KV,
    ),
    "attention, persistent": (attention({"blocks": 2}), Q, KV150, KV150),
    "attention, parts of heads": (
        attention({"blocks": 3, "kv_parts": 2}), normal(1, 130, 4, 16), KV150, KV150,
    ),
    "attention, wide heads": (
        functools.partial(ops.attention, causal=True),
        normal(1, 70, 1, 160), normal(1, 70, 1, 160), normal(1, 70, 1, 160),
    ),
    "attention, packed": (packed(False), Q[0], KV[0], KV[0]),
    "attention, packed, deterministic": (packed(True), Q[0], KV[0], KV[0]),
    "attention, bias": (biased, Q, KV, KV, normal(1, 1, 130, 70)),
    "attention, bias of columns": (biased, Q, KV, KV, normal(1, 1, 1, 70)),
    "dot_product_attention": (
        lambda q, k, v, **o: ops.dot_product_attention(
            q, k, v, normal(1, 2, 130, 70, seed=2), **o
        ),
        Q, KV, KV,
    ),
    "ragged_dot": (ragged(SIZES), normal(130, 72), MATRICES),
    "ragged_dot_general": (
        ragged(SIZES, CONTRACTED), normal(130, 72), normal(130, 80, seed=1),
    ),
}  # fmt: skip
# Derivatives of these are products, or attention, as above; or there are none.
FORWARD = {
    **{
        f"matmul, cluster {cluster}, transposed {transposed}": (
            matmul(cluster=cluster, transposed=transposed, blocks=4), X, W,
        )
        for cluster in (None, "n", "m")
        for transposed in (False, True)
    },
    "matmul, gate": (lambda x, w, g, **o: matmul()(x, w, gate=g, **o), X, W, W),
    "matmul, parts of k": (matmul(parts=2), X, W),
    "matmul, float32 transposed in registers": (
        matmul(transposed=True), F32_X, F32_W,
    ),
    "matmul, transposed operands of a batch": (
        functools.partial(matmul(tile_k=64), transpose_a=True, transpose_b=True),
        normal(2, 136, 72), normal(2, 72, 136, seed=1),
    ),
    "matmul, bias and residual": (
        lambda x, w, r, **o: matmul(tile_n=96)(x, w, bias=r[0], residual=r, **o),
        X, normal(72, 200), normal(130, 200),
    ),
    "matmul, gate and residual": (
        lambda x, w, r, **o: matmul(tile_n=96)(x, w, gate=w, residual=r, **o),
        X, normal(72, 200), normal(130, 200),
    ),
    "matmul, rows in parts": (few_rows(tile_m=16, part_m=8), FEW, WIDE),
    "matmul, clusters divide k": (few_rows(clusters=2), FEW, WIDE),
    **{
        f"matmul on Blackwell, {name}": (
            blackwell_matmul(**changes), normal(200, 130), normal(130, 160, seed=1),
        )
        for name, changes in {
            "one CTA": {},
            "pairs": {"collective": True},
            "dynamic": {"collective": True, "dynamic": True},
        }.items()
    },
    "linear, splits of int4": lambda: (layer(SPLIT, INT4), normal(20, 160)),
    "linear, splits of int8": lambda: (layer(SPLIT, INT8), normal(20, 160)),
    "linear, resident tokens": lambda: (layer(FOUR_WARPGROUPS, INT4), normal(20, 160)),
    "linear, many tokens of int4": lambda: (layer(MANY, INT4), normal(70, 160)),
    "attention, a block for each tile": (
        functools.partial(attention(blocks=None), causal=False), Q, KV, KV,
    ),
    "attention, three consumers": (attention(consumers=3, stages=1), Q, KV, KV),
    "attention, window and bias": (
        functools.partial(
            attention(), causal=False, window=(20, 10), bias=normal(1, 2, 130, 70),
        ),
        Q, KV, KV,
    ),
    "attention, segments and lengths": (
        functools.partial(
            attention(), causal=False, q_segment_ids=IDS,
            kv_segment_ids=IDS[:, :70], kv_lengths=integers(60),
        ),
        Q, KV, KV,
    ),
    "attention, float8": (
        attention(blocks=1), Q.astype(E4M3), KV.astype(E4M3), KV.astype(E4M3),
    ),
    "attention on Blackwell": (blackwell_attention(2), Q64, KV64, KV64),
    "attention on Blackwell, one stage": (blackwell_attention(1), Q64, KV64, KV64),
    "attention on Blackwell, heads of 128": (
        blackwell_attention(3), Q128, KV128, KV128,
    ),
    "decode_attention": (
        lambda q, k, v, **o: ops.decode_attention(
            q, k, v, lengths=integers(150, 70), **o
        ),
        QUERY, CACHE, CACHE,
    ),
    "decode_attention, divided evenly": lambda: (
        functools.partial(ops.decode_attention, config=ops.DecodeConfig(workers=3)),
        QUERY, CACHE, CACHE,
    ),
    "decode_attention, many CTAs": (decode(stages=2, workers=8), QUERY, CACHE, CACHE),
    "decode_attention, one stage": (decode(stages=1, workers=5), QUERY, CACHE, CACHE),
    "decode_attention, cluster": (decode(stages=2, cluster=2), QUERY, CACHE, CACHE),
    "decode_attention, cluster, float8": (
        decode(stages=2, cluster=2), QUERY, CACHE.astype(E4M3), CACHE.astype(E4M3),
    ),
    "decode_attention, float8": (
        decode(stages=2, workers=3), QUERY, CACHE.astype(E4M3), CACHE.astype(E4M3),
    ),
    "decode_attention, two consumers": (
        decode(block_kv=128, consumers=2, stages=1, workers=2), QUERY, CACHE, CACHE,
    ),
    "decode_attention, pages": (paged, QUERY, PAGES, PAGES),
    "decode_attention, int8": (
        functools.partial(ops.decode_attention, k_scale=1.0, v_scale=1.0),
        QUERY, (CACHE * 40).astype(INT8), (CACHE * 40).astype(INT8),
    ),
    "ragged_dot, gathered rows": (
        functools.partial(ragged(SIZES), rows=TOKENS), normal(40, 72), MATRICES,
    ),
    "ragged_dot_general, transposed": (
        ragged(SIZES, TRANSPOSED), normal(130, 72), MATRICES,
    ),
    "ragged_dot_general, strips that stay in SMEM": (
        ragged(DEPTHS, CONTRACTED, strip=3, stages=3),
        normal(129, 136), normal(129, 72),
    ),
    "scaled_matmul": (ops.scaled_matmul, X.astype(E4M3), W.astype(E4M3)),
    "scaled_matmul, rows and columns": (
        scaled(),
        normal(130, 272).astype(E4M3), normal(272, 136).astype(E4M3),
        np.ones(130), np.ones(136),
    ),
    "scaled_matmul, blocks": (
        scaled(),
        normal(130, 272).astype(E4M3), normal(272, 136).astype(E4M3),
        np.ones((130, 3)), np.ones((3, 2)),
    ),
    "block_scaled_matmul": lambda: (block_scaled(128, False), *blocks(E4M3)),
    "block_scaled_matmul, shared columns of pairs": lambda: (
        block_scaled(256, True), *blocks(E4M3),
    ),
    "block_scaled_matmul, float4": lambda: (
        ops.block_scaled_matmul,
        *blocks(jnp.float4_e2m1fn, 128, scale_dtype=E4M3, block=16),
    ),
}  # fmt: skip
# They are XLA's alone; `row_kernel` makes kernels (tests/ops/rows/test_rows.py).
NO_KERNEL = {"quantize", "quantize_blocks", "clear_cache", "row_kernel"}


def row(name):
    found = {**CALLS, **FORWARD}[name]
    return found() if callable(found) else found


def function_of(name):
    return name.split(",")[0]


def first_of_each():
    """A row of each function, and of each for another target."""
    rows = {function_of(name): name for name in reversed([*CALLS, *FORWARD])}
    return rows.values()


def test_each_function_has_a_call():
    functions = {n for n in ops.__all__ if inspect.isfunction(getattr(ops, n))}
    called = {function_of(name).split(" on ")[0] for name in (*CALLS, *FORWARD)}
    assert called == functions - NO_KERNEL


@pytest.mark.parametrize("name", first_of_each())
def test_it_is_lowered_under_the_other_semantics(name):
    """As it is under its own in tests/ops/test_compiled.py."""
    function, *operands = row(name)
    on_blackwell = "Blackwell" in name or name.startswith("block_scaled")
    target = "sm_100a" if on_blackwell else "sm_90a"
    assert plgpu.offline.lower(under(Lane, function), *operands, target=target)


def assert_finite(*arrays):
    assert all(bool(jnp.isfinite(x.astype(jnp.float32)).all()) for x in arrays)


@pytest.mark.parametrize("name", FORWARD)
def test_every_schedule_gives_one_result(name):
    function, *operands = row(name)
    assert_finite(function(*operands, interpret=schedules()))


@pytest.mark.parametrize("name", CALLS)
def test_every_schedule_gives_one_result_and_the_same_derivatives(name):
    function, *operands = row(name)
    out, pullback = jax.vjp(
        functools.partial(function, interpret=schedules()), *operands
    )
    assert_finite(out, *pullback(normal(*out.shape, dtype=out.dtype, seed=3)))

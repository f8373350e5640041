# SPDX-License-Identifier: Apache-2.0
"""Calls of ready kernels that are refused, and what is said of each."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import ops
from tests.support.refusal import refused
from tests.support.refused_calls import call, calls, derivative, named, zeros

BF16, F32, I32, I8 = jnp.bfloat16, jnp.float32, jnp.int32, jnp.int8
E4M3, E5M2, E2M1 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float4_e2m1fn
E8M0 = jnp.float8_e8m0fnu
HOPPER, BLACKWELL = (
    plgpu.CompilerParams(target=t, approx_math=True) for t in ("sm_90a", "sm_100a")
)


# --- products -------------------------------------------------------------------------

SMALL = {"tile_m": 64, "tile_n": 64, "tile_k": 64, "stages": 2, "blocks": 2}
MATMUL = ops.MatmulConfig(**SMALL, cluster=None)
FEW = ops.SplitMatmulConfig(tile_m=8, tile_n=64, tile_k=64, stages=2, warpgroups=1)
ON_BLACKWELL = ops.BlackwellMatmulConfig(tile_n=64, tile_k=64, stages=2, blocks=2)
A, B, B2, SQUARE = zeros(128, 64), zeros(64, 64), zeros(128, 64), zeros(16, 16)
X, W = zeros(136, 40), zeros(40, 72)
PRODUCTS = [
    call(ops.matmul, A, A),
    *(
        call(ops.matmul, zeros(*a), zeros(*b))
        for a, b in (
            ((3, 4), (5, 6)), ((4,), (4, 5)), ((0, 4), (4, 5)), ((2, 3, 4), (3, 4, 5))
        )
    ),
    *(call(ops.matmul, A.astype(t), B.astype(t)) for t in ("int16", "float8_e4m3fn")),
    call(ops.matmul, A, B.astype(BF16)),
    *(call(ops.matmul, SQUARE, SQUARE, out_dtype=x) for x in ("int32", "bool", 3)),
    *(
        call(ops.matmul, B2.T, B2, gate=B2, config=dataclasses.replace(MATMUL, **c))
        for c in ({"transposed": True}, {"parts": 2})
    ),
    call(ops.matmul, zeros(64, 320), zeros(320, 64),
         config=dataclasses.replace(MATMUL, parts=4)),
    call(ops.matmul, zeros(1, 192), zeros(192, 64),
         config=dataclasses.replace(FEW, split=4)),
    call(ops.matmul, A.astype(F32), B.astype(F32), config=ON_BLACKWELL),
    call(ops.matmul, A, B, config=ON_BLACKWELL, compiler_params=HOPPER),
    call(ops.matmul, A, B, config=ops.MatmulConfig(), compiler_params=BLACKWELL),
    *(call(ops.matmul, X, W, activation=x) for x in ("tanh", 3, jnp.sum)),
    *(call(ops.matmul, X, W, bias=x) for x in (zeros(73), zeros(72, dtype=I32))),
    call(ops.matmul, X, W, residual=zeros(72, 136)),
    *(call(ops.matmul, X, W, gate=x) for x in (zeros(72, 40), W.astype(F32))),
    call(ops.matmul, X, W, bias=zeros(72), gate=W),
]  # fmt: skip

# --- narrow products ------------------------------------------------------------------

N8 = zeros(16, 32, dtype=E4M3)
WIDE, N256, TWO = zeros(16, 32, dtype=BF16), zeros(16, 256, dtype=E4M3), zeros(16, 2)
WEIGHTS = zeros(8, 32, dtype=I8)
PLAIN = {"transpose_b": True}
LAYER = {"transpose_w": True}


def scaled(shapes, a, b=None, held=E8M0):
    """Operands of a product with scales of blocks."""
    types = a, b or a, held, held
    return [zeros(*s, dtype=t) for s, t in zip(shapes, types, strict=True)]


MX = scaled(((8, 64), (8, 64), (8, 2), (8, 2)), E4M3)
EIGHT = ((8, 32), (8, 32), (8, 1), (8, 1))
BLOCK_SCALED = ops.block_scaled_matmul
NARROW = [
    call(ops.scaled_matmul, N256, N256, TWO.astype(F32), **PLAIN,
         compiler_params=BLACKWELL),
    call(ops.scaled_matmul, N8, N8),
    *(
        call(ops.scaled_matmul, N8, N8.astype(t), **PLAIN)
        for t in ("bfloat16", "int8", "float8_e5m2fnuz")
    ),
    *calls(ops.scaled_matmul, N8, N8, **PLAIN, changes=[
        *({"out_dtype": x} for x in ("int32", "float64", "nonsense", N8)),
        *({"a_scale": x} for x in (zeros(3, dtype=F32), zeros(dtype=BF16))),
        *({"b_scale": x} for x in (zeros(3, dtype=F32), zeros(dtype=BF16))),
        *({"bias": x} for x in (zeros(3, dtype=F32), zeros(16, dtype=I32))),
    ]),
    call(ops.scaled_matmul, N256, N256, TWO.astype(F32), **PLAIN, promote=False),
    call(ops.scaled_matmul, N256, N256, TWO.astype(F32), **PLAIN,
         config=ops.ScaledMatmulConfig(
             tile_m=64, tile_n=64, stages=2, blocks=4, cluster=None)),
    call(derivative, ops.scaled_matmul, N8, N8, zeros(dtype=F32), by=2, **PLAIN),
    call(ops.linear, WIDE, WEIGHTS, **LAYER, compiler_params=BLACKWELL),
    call(ops.linear, WIDE, WEIGHTS),
    call(ops.linear, WIDE.astype(F32), WEIGHTS, **LAYER),
    *calls(ops.linear, WIDE, WEIGHTS, **LAYER, changes=[
        *(
            {"w_scale": zeros(*shape, dtype=F32)}
            for shape in ((), (7,), (8, 1), (3, 8))
        ),
        {"w_scale": zeros(8, dtype=I32)},
        *({"bias": x} for x in (zeros(7), zeros(8, dtype=I8))),
        *({"out_dtype": x} for x in ("int8", "float64", "nonsense", WIDE)),
        *({"activation": x} for x in ("swoosh", lambda x, y: x + y)),
    ]),
    *calls(ops.linear, WIDE, WEIGHTS.astype(BF16), **LAYER, changes=[
        {"w_scale": zeros(8, dtype=F32)}, {"config": ops.LinearFewConfig()},
    ]),
    *(call(ops.quantize, x) for x in (zeros(3), zeros(3, 3, dtype=I8))),
    *(
        call(ops.quantize, zeros(2, 2), t)
        for t in ("bfloat16", "int32", "nonsense")
    ),
    *(
        call(BLOCK_SCALED, *scaled(shapes, E4M3))
        for shapes in (
            ((8, 32), (8, 64), (8, 1), (8, 1)),
            ((2, 8, 32), (8, 32), (2, 8, 1), (8, 1)),
            ((8, 64), (8, 64), (8, 4), (8, 4)),
            ((8, 40), (8, 40), (8, 1), (8, 1)),
        )
    ),
    call(BLOCK_SCALED, *scaled(EIGHT, E4M3, E2M1)),
    call(BLOCK_SCALED, *scaled(EIGHT, E4M3, held=F32)),
    call(BLOCK_SCALED, *scaled(((8, 32), (8, 32), (8, 2), (8, 2)), E4M3, held=E4M3)),
    call(BLOCK_SCALED, *MX, compiler_params=HOPPER),
    call(plgpu.offline.lower, BLOCK_SCALED, *MX, target="sm_90a"),
    call(BLOCK_SCALED, *MX, I8),
    *(call(BLOCK_SCALED, *MX, scale=x) for x in (zeros(2, dtype=F32), np.int32(2))),
    call(BLOCK_SCALED, *MX, config=ops.BlockScaledMatmulConfig(tile_n=128, tile_k=64)),
    call(derivative, BLOCK_SCALED, *MX, by=0),
    *(
        call(ops.quantize_blocks, zeros(*shape, dtype=F32), t, **options)
        for shape, t, options in (
            ((2, 40), E4M3, {}),
            ((2, 64), I8, {}),
            ((2, 64), E4M3, {"scale_dtype": F32}),
            ((2, 64), E4M3, {"block": 16}),
            ((2, 64), E5M2, {"scale_dtype": E4M3}),
        )
    ),
    call(ops.quantize_blocks, zeros(2, 64, dtype=I32)),
]  # fmt: skip

# --- ragged products ------------------------------------------------------------------


def numbers(lhs, rhs, groups):
    dims = ((lhs,), (rhs,)), ((), ())
    return jax.lax.RaggedDotDimensionNumbers(dims, (0,), groups)


TRANSPOSED, CONTRACTED = numbers(1, 2, (0,)), numbers(0, 0, ())
RX, RW, SIZES = zeros(8, 16), zeros(2, 16, 24), np.array([3, 5], np.int32)
R8, RW8 = RX.astype(E4M3), zeros(2, 24, 16, dtype=E4M3)
GENERAL = ops.ragged_dot_general
RAGGED = [
    call(ops.ragged_dot, RX, RW[0], SIZES),
    call(ops.ragged_dot, RW, RW, SIZES),
    call(ops.ragged_dot, RX, RW.astype(BF16), SIZES),
    call(ops.ragged_dot, RX.astype(F32), RW.astype(F32), SIZES),
    call(ops.ragged_dot, RX, RW, SIZES.astype(F32)),
    call(ops.ragged_dot, RX, RW, zeros(3, dtype=I32)),
    call(ops.ragged_dot, RX, RW, SIZES, "exact"),
    call(ops.ragged_dot, RX, RW, SIZES, None, I32),
    *calls(ops.ragged_dot, RX, RW, SIZES, changes=[
        *({"group_offset": x} for x in (zeros(dtype=I32), zeros(1, dtype=F32))),
        *({"rows": x} for x in (zeros(4, 4, dtype=I32), zeros(4))),
        *({"gate": x} for x in (zeros(2, 16, 32), RW.astype(BF16))),
        {"activation": "swish"},
        {"compiler_params": BLACKWELL},
    ]),
    call(ops.ragged_dot, R8, np.swapaxes(RW8, 1, 2), SIZES),
    call(GENERAL, RX, RW, SIZES, numbers(0, 1, (0,))),
    call(GENERAL, RX, RW, SIZES, numbers(1, 1, (2,))),
    call(GENERAL, RX, RW, SIZES, CONTRACTED, group_offset=zeros(1, dtype=I32)),
    call(GENERAL, RX, RX[:5], SIZES, CONTRACTED),
    call(GENERAL, R8, RW8, SIZES, TRANSPOSED, lhs_scale=zeros(3, dtype=F32)),
    call(GENERAL, R8, RW8, SIZES, TRANSPOSED, rhs_scale=zeros(2, 16, dtype=F32)),
    call(GENERAL, R8.astype(BF16), RW8.astype(BF16), SIZES, TRANSPOSED,
         lhs_scale=zeros(8, dtype=F32)),
    call(derivative, GENERAL, R8, RW8, SIZES, TRANSPOSED, by=0),
]  # fmt: skip

# --- rows -----------------------------------------------------------------------------

CX, CW, HEAD = zeros(4, 8), zeros(8, 5), zeros(1, 2, 1, 4, dtype=F32)
LABELS = zeros(4, dtype=I32)
LOSS, TURN = ops.linear_cross_entropy, ops.rotary_embedding
ROWS = [
    call(LOSS, CX, CW, LABELS[:3]),
    call(LOSS, CX, CW.T, LABELS),
    call(LOSS, CX, CW, LABELS.astype(F32)),
    call(LOSS, CX.astype(F32), CW, LABELS),
    call(LOSS, CX[:0], CW, LABELS[:0]),
    call(ops.softmax, zeros(2, 0)),
    call(ops.softmax, zeros(2, 3, dtype=I32)),
    call(ops.log_softmax, zeros(dtype=F32)),
    call(ops.rms_norm, zeros(2, 8), zeros(4)),
    call(ops.layer_norm, zeros(2, 8), zeros(2, 8)),
    call(ops.rms_norm, zeros(2, 8), None, zeros(4)),
    call(ops.softmax, zeros(2, 8), axis=2),
    call(TURN, zeros(2, 8, 3)),
    call(TURN, HEAD[..., :3]),
    call(TURN, HEAD, zeros(2)),
    call(TURN, HEAD, zeros(3, dtype=I32)),
    call(TURN, HEAD, base=-1.0),
    call(ops.top_k, zeros(2, 8), 9),
    call(ops.top_k, zeros(1, 9000), 5000),
]

# --- shared memory --------------------------------------------------------------------

QKV, STAGES = [zeros(1, 200, 1, 128)] * 3, {"block_kv": 64, "stages": 8}
BUFFERS = [
    call(ops.matmul, zeros(256, 512), zeros(512, 256),
         config=ops.MatmulConfig(tile_m=128, tile_n=256, stages=8)),
    call(ops.matmul, zeros(128, 64), zeros(64, 256),
         config=ops.BlackwellMatmulConfig(stages=6)),
    call(ops.ragged_dot, RX, RW, SIZES, config=ops.RaggedDotConfig(stages=9)),
    call(ops.attention, *QKV, config=ops.AttentionConfig(**STAGES)),
    call(ops.attention, *QKV, config=ops.BlackwellAttentionConfig(**STAGES)),
    call(ops.decode_attention, zeros(1, 1, 4, 128), *[zeros(1, 64, 1, 128)] * 2,
         config=ops.DecodeConfig(stages=8)),
]  # fmt: skip


@refused
@pytest.mark.parametrize(
    "call", [*PRODUCTS, *NARROW, *RAGGED, *ROWS, *BUFFERS], ids=named
)
def test_a_call_that_does_not_fit(call):
    call()

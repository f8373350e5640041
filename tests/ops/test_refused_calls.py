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
from pallas_gpu.errors import (
    ArgumentError,
    ArgumentTypeError,
    DifferentiationError,
    DTypeError,
    OutOfResources,
    ShapeError,
    TargetError,
    UnsupportedError,
)
from tests.support.refused_calls import each, named, no, total, zeros

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
SHAPES, TYPES = "the shapes do not form a product", "these element types are not"
RESULT, SMEM = "the result cannot have this type", "needs more SMEM"
NO_WGMMA = "an accumulator (ACC) needs wgmma, which sm_100a does not have"
OTHER_TARGET = "the configuration is for another target"
PRODUCTS = [
    no(ShapeError, SHAPES, ops.matmul, A, A, got="(128, 64) and (128, 64)",
       hint="transpose_b"),
    *(
        no(ShapeError, SHAPES, ops.matmul, zeros(*a), zeros(*b), got=f"{a} and {b}")
        for a, b in (
            ((3, 4), (5, 6)), ((4,), (4, 5)), ((0, 4), (4, 5)), ((2, 3, 4), (3, 4, 5))
        )
    ),
    *(
        no(DTypeError, TYPES, ops.matmul, A.astype(t), B.astype(t), got=t)
        for t in ("int16", "float8_e4m3fn")
    ),
    no(DTypeError, TYPES, ops.matmul, A, B.astype(BF16), got="float16 and bfloat16"),
    *each(DTypeError, RESULT, ops.matmul, SQUARE, SQUARE,
          changes=[{"out_dtype": x} for x in ("int32", "bool", 3)]),
    *each(ArgumentError, "the configuration has no gate", ops.matmul, B2.T, B2, gate=B2,
          changes=[{"config": dataclasses.replace(MATMUL, **c)}
                   for c in ({"transposed": True}, {"parts": 2})]),
    no(ArgumentError, "a block has no part of K", ops.matmul,
       zeros(64, 320), zeros(320, 64),
       config=dataclasses.replace(MATMUL, parts=4),
       got="at most 3 parts of K=320 in steps of 64"),
    no(ArgumentError, "a block has no part of K", ops.matmul,
       zeros(1, 192), zeros(192, 64), got="split=4",
       config=dataclasses.replace(FEW, split=4)),
    no(DTypeError, "this element type is not supported on Blackwell", ops.matmul,
       A.astype(F32), B.astype(F32), config=ON_BLACKWELL, got="float32"),
    no(ArgumentError, OTHER_TARGET, ops.matmul, A, B, config=ON_BLACKWELL,
       compiler_params=HOPPER, got="sm_90a", hint="omit config"),
    no(ArgumentError, OTHER_TARGET, ops.matmul, A, B, config=ops.MatmulConfig(),
       compiler_params=BLACKWELL, got="sm_100a", hint="omit config"),
    *each(ArgumentError, "unknown activation", ops.matmul, X, W,
          changes=[{"activation": "tanh"}]),
    no(ArgumentTypeError, "activation is neither a name nor", ops.matmul, X, W,
       activation=3),
    no(ArgumentTypeError, "activation is not an elementwise", ops.matmul, X, W,
       activation=jnp.sum),
    no(ShapeError, "the shape of bias does not match", ops.matmul, X, W,
       bias=zeros(73)),
    no(ShapeError, "the shape of residual does not", ops.matmul, X, W,
       residual=zeros(72, 136)),
    no(ShapeError, "the shape of gate does not", ops.matmul, X, W, gate=zeros(72, 40)),
    no(DTypeError, "the bias cannot have", ops.matmul, X, W, bias=zeros(72, dtype=I32)),
    no(DTypeError, TYPES, ops.matmul, X, W, gate=zeros(40, 72, dtype=F32)),
    no(ArgumentError, "a bias beside a gate", ops.matmul, X, W,
       bias=zeros(72), gate=W),
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
SCALES = "the shapes of the scales do not match the operands"
TYPES_OF_SCALES = "the tensor core does not support these types of scales"
BLOCK_SCALED = ops.block_scaled_matmul
NARROW = [
    no(TargetError, NO_WGMMA, ops.scaled_matmul, N8, N8, **PLAIN, name="",
       compiler_params=BLACKWELL),
    no(ShapeError, SHAPES, ops.scaled_matmul, N8, N8),
    *(
        no(DTypeError, TYPES, ops.scaled_matmul, N8, N8.astype(t), **PLAIN)
        for t in ("bfloat16", "int8", "float8_e5m2fnuz")
    ),
    *each(DTypeError, RESULT, ops.scaled_matmul, N8, N8, **PLAIN,
          changes=[{"out_dtype": x} for x in ("int32", "float64", "nonsense", N8)]),
    *(
        row
        for name in ("a_scale", "b_scale")
        for row in (
            no(ShapeError, f"{name} does not match its operand", ops.scaled_matmul,
               N8, N8, **PLAIN, **{name: zeros(3, dtype=F32)}),
            no(DTypeError, f"{name} is not float32", ops.scaled_matmul,
               N8, N8, **PLAIN, **{name: zeros(dtype=BF16)}),
        )
    ),
    no(ShapeError, "the bias does not match the columns", ops.scaled_matmul, N8, N8,
       **PLAIN, bias=zeros(3, dtype=F32)),
    no(DTypeError, "the bias cannot have this type", ops.scaled_matmul, N8, N8,
       **PLAIN, bias=zeros(16, dtype=I32)),
    no(ArgumentError, "scales of blocks without promotion", ops.scaled_matmul,
       N256, N256, TWO.astype(F32), **PLAIN, promote=False),
    no(ArgumentError, "the tiles do not match the blocks of scales",
       ops.scaled_matmul, N256, N256, TWO.astype(F32), **PLAIN,
       config=ops.ScaledMatmulConfig(
           tile_m=64, tile_n=64, stages=2, blocks=4, cluster=None)),
    no(UnsupportedError, "there is no derivative",
       lambda s: total(lambda s: ops.scaled_matmul(N8, N8, s, **PLAIN), s),
       zeros(dtype=F32), name="scaled_matmul"),
    no(TargetError, NO_WGMMA, ops.linear, WIDE, WEIGHTS, **LAYER, name="",
       compiler_params=BLACKWELL),
    no(ShapeError, SHAPES, ops.linear, WIDE, WEIGHTS),
    no(DTypeError, "narrow weights are not supported beside this type", ops.linear,
       WIDE.astype(F32), WEIGHTS, **LAYER, got="float32"),
    *(
        no(ShapeError, "w_scale does not match the weights", ops.linear, WIDE, WEIGHTS,
           **LAYER, w_scale=zeros(*shape, dtype=F32), got="(8,)")
        for shape in ((), (7,), (8, 1), (3, 8))
    ),
    no(DTypeError, "w_scale cannot have this type", ops.linear, WIDE, WEIGHTS, **LAYER,
       w_scale=zeros(8, dtype=I32)),
    no(ShapeError, "the bias does not match the columns", ops.linear, WIDE, WEIGHTS,
       **LAYER, bias=zeros(7)),
    no(DTypeError, "bias cannot have this type", ops.linear, WIDE, WEIGHTS, **LAYER,
       bias=zeros(8, dtype=I8)),
    *each(DTypeError, RESULT, ops.linear, WIDE, WEIGHTS, **LAYER,
          changes=[{"out_dtype": x} for x in ("int8", "float64", "nonsense", WIDE)]),
    *each(ArgumentError, "scales or a config of weights that are not narrow",
          ops.linear, WIDE, WEIGHTS.astype(BF16), **LAYER, got="bfloat16",
          changes=[{"w_scale": zeros(8, dtype=F32)},
                   {"config": ops.LinearFewConfig()}]),
    no(ArgumentError, "unknown activation", ops.linear, WIDE, WEIGHTS, **LAYER,
       activation="swoosh"),
    no(ArgumentTypeError, "activation is not an elementwise function", ops.linear,
       WIDE, WEIGHTS, **LAYER, activation=lambda x, y: x + y, got="TypeError"),
    no(ShapeError, "not a matrix of floats", ops.quantize, zeros(3)),
    no(DTypeError, "not a matrix of floats", ops.quantize, zeros(3, 3, dtype=I8)),
    *(
        no(DTypeError, "values cannot have this type", ops.quantize, zeros(2, 2), t)
        for t in ("bfloat16", "int32", "nonsense")
    ),
    *(
        no(ShapeError, SHAPES, BLOCK_SCALED, *scaled(shapes, E4M3), got=str(shapes[i]))
        for i, shapes in (
            (1, ((8, 32), (8, 64), (8, 1), (8, 1))),
            (0, ((2, 8, 32), (8, 32), (2, 8, 1), (8, 1))),
        )
    ),
    no(ShapeError, SCALES, BLOCK_SCALED,
       *scaled(((8, 64), (8, 64), (8, 4), (8, 4)), E4M3), got="(8, 4)"),
    no(ShapeError, SCALES, BLOCK_SCALED,
       *scaled(((8, 40), (8, 40), (8, 1), (8, 1)), E4M3), got="(8, 40)"),
    no(DTypeError, TYPES, BLOCK_SCALED, *scaled(EIGHT, E4M3, E2M1),
       got="float4_e2m1fn"),
    no(DTypeError, TYPES_OF_SCALES, BLOCK_SCALED, *scaled(EIGHT, E4M3, held=F32),
       got="float32"),
    no(DTypeError, TYPES_OF_SCALES, BLOCK_SCALED,
       *scaled(((8, 32), (8, 32), (8, 2), (8, 2)), E4M3, held=E4M3),
       got="float8_e4m3fn"),
    no(TargetError, "the tensor core of this target does not scale blocks",
       BLOCK_SCALED, *MX, compiler_params=HOPPER, got="sm_90a",
       hint="ops.scaled_matmul"),
    no(TargetError, "", plgpu.offline.lower, BLOCK_SCALED, *MX, target="sm_90a",
       name="", got="does not scale blocks"),
    no(DTypeError, RESULT, BLOCK_SCALED, *MX, I8, got="int8"),
    no(ShapeError, "scale is not one factor", BLOCK_SCALED, *MX,
       scale=zeros(2, dtype=F32), got="[2]"),
    no(DTypeError, "scale is not one factor", BLOCK_SCALED, *MX, scale=np.int32(2),
       got="int32"),
    no(ArgumentError, "tile_k is not a multiple of four blocks", BLOCK_SCALED, *MX,
       config=ops.BlockScaledMatmulConfig(tile_n=128, tile_k=64), got="64"),
    no(UnsupportedError, "there is no derivative",
       lambda x: total(lambda x: BLOCK_SCALED(x.astype(E4M3), *MX[1:]), x),
       zeros(8, 64, dtype=F32), name="block_scaled_matmul"),
    *(
        no(error, what, ops.quantize_blocks, zeros(*shape, dtype=F32), t, **options)
        for error, what, shape, t, options in (
            (ShapeError, "the last dimension does not consist of whole blocks",
             (2, 40), E4M3, {}),
            (DTypeError, "values cannot have this type", (2, 64), I8, {}),
            (DTypeError, "scales cannot have this type", (2, 64), E4M3,
             {"scale_dtype": F32}),
            (DTypeError, "the tensor core does not multiply such blocks", (2, 64), E4M3,
             {"block": 16}),
            (DTypeError, "the tensor core does not multiply such blocks", (2, 64), E5M2,
             {"scale_dtype": E4M3}),
        )
    ),
    no(DTypeError, "not an array of floats", ops.quantize_blocks,
       zeros(2, 64, dtype=I32)),
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
    no(ShapeError, SHAPES, ops.ragged_dot, RX, RW[0], SIZES, got="24"),
    no(ShapeError, SHAPES, ops.ragged_dot, RW, RW, SIZES, got="16"),
    no(DTypeError, TYPES, ops.ragged_dot, RX, RW.astype(BF16), SIZES,
       got="float16 and bfloat16"),
    no(DTypeError, TYPES, ops.ragged_dot, RX.astype(F32), RW.astype(F32), SIZES,
       got="float32"),
    no(DTypeError, "group_sizes are not integers", ops.ragged_dot, RX, RW,
       SIZES.astype(F32), got="float32"),
    no(ShapeError, "group_sizes has not one size for each group", ops.ragged_dot,
       RX, RW, zeros(3, dtype=I32), got="(3,)"),
    no(ArgumentError, "there is no such precision", ops.ragged_dot, RX, RW, SIZES,
       "exact", got="exact"),
    no(DTypeError, RESULT, ops.ragged_dot, RX, RW, SIZES, None, I32, got="int32"),
    no(ShapeError, "group_offset is not one number", ops.ragged_dot, RX, RW, SIZES,
       group_offset=zeros(dtype=I32), got="()"),
    no(DTypeError, "group_offset are not integers", ops.ragged_dot, RX, RW, SIZES,
       group_offset=zeros(1, dtype=F32), got="float32"),
    no(ShapeError, "rows are not one index", ops.ragged_dot, RX, RW, SIZES,
       rows=zeros(4, 4, dtype=I32)),
    no(DTypeError, "rows are not integers", ops.ragged_dot, RX, RW, SIZES,
       rows=zeros(4)),
    no(ShapeError, "the gate is not like rhs", ops.ragged_dot, RX, RW, SIZES,
       gate=zeros(2, 16, 32)),
    no(DTypeError, "the gate is not like rhs", ops.ragged_dot, RX, RW, SIZES,
       gate=RW.astype(BF16)),
    no(ArgumentError, "unknown activation", ops.ragged_dot, RX, RW, SIZES,
       activation="swish"),
    *(
        no(UnsupportedError, "these dimension numbers are not", GENERAL, RX, RW, SIZES,
           dims, group_offset=offset)
        for dims, offset in (
            (numbers(0, 1, (0,)), None),
            (numbers(1, 1, (2,)), None),
            (CONTRACTED, zeros(1, dtype=I32)),
        )
    ),
    no(ShapeError, "the shapes do not form a product over rows", GENERAL,
       RX, RX[:5], SIZES, CONTRACTED),
    no(TargetError, NO_WGMMA, ops.ragged_dot, RX, RW, SIZES, name="",
       compiler_params=BLACKWELL),
    no(DTypeError, TYPES, ops.ragged_dot, R8, np.swapaxes(RW8, 1, 2), SIZES,
       hint="ragged_dot_general"),
    no(ShapeError, "lhs_scale has another shape", GENERAL, R8, RW8, SIZES, TRANSPOSED,
       lhs_scale=zeros(3, dtype=F32)),
    no(ShapeError, "rhs_scale has another shape", GENERAL, R8, RW8, SIZES, TRANSPOSED,
       rhs_scale=zeros(2, 16, dtype=F32)),
    no(UnsupportedError, "this product has no scales", GENERAL, R8.astype(BF16),
       RW8.astype(BF16), SIZES, TRANSPOSED, lhs_scale=zeros(8, dtype=F32)),
    no(DifferentiationError, "products of 8-bit floats have no derivatives",
       lambda x: total(lambda x: GENERAL(x, RW8, SIZES, TRANSPOSED), x), R8,
       name="ragged_dot_general"),
]  # fmt: skip

# --- rows -----------------------------------------------------------------------------

CX, CW, HEAD = zeros(4, 8), zeros(8, 5), zeros(1, 2, 1, 4, dtype=F32)
LABELS = zeros(4, dtype=I32)
LOSS, TURN = ops.linear_cross_entropy, ops.rotary_embedding
ROWS = [
    no(ShapeError, "", LOSS, CX, CW, LABELS[:3], got="labels"),
    no(ShapeError, "", LOSS, CX, CW.T, LABELS, hint="transpose_w"),
    no(DTypeError, "", LOSS, CX, CW, LABELS.astype(F32), got="not integers"),
    no(DTypeError, "", LOSS, CX.astype(F32), CW, LABELS, got="float32"),
    no(ShapeError, "", LOSS, CX[:0], CW, LABELS[:0], got="empty"),
    no(ShapeError, "", ops.softmax, zeros(2, 0), got="x has no rows"),
    no(DTypeError, "", ops.softmax, zeros(2, 3, dtype=I32), got="int32"),
    no(ShapeError, "", ops.log_softmax, zeros(dtype=F32), got="no rows"),
    no(ShapeError, "", ops.rms_norm, zeros(2, 8), zeros(4), got="(8,)"),
    no(ShapeError, "", ops.layer_norm, zeros(2, 8), zeros(2, 8), got="scale"),
    no(ShapeError, "", TURN, zeros(2, 8, 3), got="head_dim"),
    no(ShapeError, "", TURN, HEAD[..., :3], got="even"),
    no(DTypeError, "", TURN, HEAD, zeros(2), got="integers"),
    no(ShapeError, "", TURN, HEAD, zeros(3, dtype=I32), got="positions"),
    no(ArgumentError, "", TURN, HEAD, base=-1.0, got="positive"),
    no(ArgumentError, "", ops.top_k, zeros(2, 8), 9, got="from 1 to 8"),
    no(ArgumentError, "", ops.top_k, zeros(1, 9000), 5000, got="up to 4096"),
]
TABLE = named(PRODUCTS, NARROW, RAGGED, ROWS)


@pytest.mark.parametrize("name", TABLE)
def test_a_call_that_does_not_fit_is_refused(name):
    TABLE[name].check()


@pytest.mark.parametrize(
    ("function", "args", "config"),
    [
        (ops.matmul, (zeros(256, 512), zeros(512, 256)),
         ops.MatmulConfig(tile_m=128, tile_n=256, stages=8)),
        (ops.matmul, (zeros(128, 64), zeros(64, 256)),
         ops.BlackwellMatmulConfig(stages=6)),
        (ops.ragged_dot, (RX, RW, SIZES), ops.RaggedDotConfig(stages=9)),
        (ops.attention, [zeros(1, 200, 1, 128)] * 3,
         ops.AttentionConfig(block_kv=64, stages=8)),
        (ops.attention, [zeros(1, 200, 1, 128)] * 3,
         ops.BlackwellAttentionConfig(block_kv=64, stages=8)),
        (ops.decode_attention, (zeros(1, 1, 4, 128), *[zeros(1, 64, 1, 128)] * 2),
         ops.DecodeConfig(stages=8)),
    ],
)  # fmt: skip
def test_the_buffers_fit_shared_memory(function, args, config):
    with pytest.raises(OutOfResources, match=SMEM) as caught:
        function(*args, config=config)
    assert caught.value.limit_bytes < caught.value.used_bytes

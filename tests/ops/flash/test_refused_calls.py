# SPDX-License-Identifier: Apache-2.0
"""Calls of attention and of decode that are refused, and what is said of each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
from pallas_gpu import ops
from pallas_gpu.errors import (
    ArgumentError,
    DifferentiationError,
    DTypeError,
    OutOfResources,
    ShapeError,
    TargetError,
    UnsupportedError,
)
from tests.support.refused_calls import each, named, no, total, zeros

F16, BF16, F32, I32, I8 = jnp.float16, jnp.bfloat16, jnp.float32, jnp.int32, jnp.int8
E4M3 = jnp.float8_e4m3fn
HOPPER, BLACKWELL = (
    plgpu.CompilerParams(target=t, approx_math=True) for t in ("sm_90a", "sm_100a")
)
attention, decode = ops.attention, ops.decode_attention
SHAPES, TYPES = "the shapes do not match", "these element types are not supported"
ON_BLACKWELL = ops.BlackwellAttentionConfig(block_kv=32)


def qkv(q_len=200, kv_len=160, heads=3, kv_heads=1, d=64, batch=1, dtype=F16):
    kv = zeros(batch, kv_len, kv_heads, d, dtype=dtype)
    return zeros(batch, q_len, heads, d, dtype=dtype), kv, kv


def mixed(number, **changes):
    """Operands of which one is of other sizes."""
    return [*qkv()[:number], qkv(**changes)[number], *qkv()[number + 1 :]]


def integers(*shape):
    return zeros(*shape, dtype=I32)


def derivative_of(option, **options):
    """A call's derivative by one of its options."""

    def call(x):
        q, k, v = qkv(64, 64, 1)
        return total(lambda x: attention(q, k, v, **{option: x}, **options), x)

    return call


Q, K, V = qkv()
LENGTH = "the sequence before heads"
ATTENTION = [
    *(
        no(ShapeError, SHAPES, attention, *mixed(number, **changes), hint=LENGTH,
           got=str(tuple(qkv(**changes)[number].shape)))
        for changes, number in (
            ({"d": 128}, 1), ({"batch": 2}, 2), ({"kv_len": 128}, 2)
        )
    ),
    *(
        no(ShapeError, SHAPES, attention, *qkv(kv_heads=n), hint=LENGTH)
        for n in (2, 0)
    ),
    no(ShapeError, SHAPES, attention, Q[0], K[0], V[0], got="(200,"),
    no(ShapeError, "this head_dim is not supported", attention, *qkv(d=272), got="272",
       hint="several heads"),
    no(DTypeError, TYPES, attention, *qkv(dtype=F32), got="float32"),
    no(DTypeError, TYPES, attention, Q, K, V.astype(BF16), hint="astype",
       got="float16, float16, bfloat16"),
    *(
        no(ArgumentError, "sm_scale is not a positive number", attention, Q, K, V,
           sm_scale=x, got=str(x), hint="negate q")
        for x in (0.0, -1.0, float("nan"), float("inf"))
    ),
    no(ArgumentError, "the tiles do not fit in a consumer's registers", attention,
       Q, K, V, config=ops.AttentionConfig(consumers=3, block_kv=144),
       got="block_kv=144", hint="block_kv"),
    no(DifferentiationError, "alibi_slopes has no derivative",
       derivative_of("alibi_slopes"), zeros(1, dtype=F32), name="attention",
       hint="stop_gradient"),
    *(
        no(ArgumentError, "the configuration is for another target", attention,
           Q, K, V, config=config, compiler_params=params, got=type(config).__name__)
        for config, params in (
            (ON_BLACKWELL, HOPPER), (ops.AttentionConfig(), BLACKWELL)
        )
    ),
    *(
        no(ShapeError, "this head_dim is not supported on Blackwell", attention,
           *qkv(d=d), compiler_params=BLACKWELL, got=str(d))
        for d in (80, 256)
    ),
    *each(UnsupportedError, "this option is not supported on Blackwell", attention,
          Q, K, V, compiler_params=BLACKWELL,
          changes=[{"window": (5, 5)}, {"soft_cap": 1.0}, {"return_logsumexp": True}]),
]  # fmt: skip

INVALID = "invalid value of "
OPTIONS = [
    *each(ArgumentError, INVALID + "window", attention, Q, K, V,
          changes=[{"window": x} for x in ((-1, 0), 2**40, (1, 2, 3), "all")]),
    no(ArgumentError, "soft_cap is not a positive number", attention, Q, K, V,
       soft_cap=0),
    no(ArgumentError, INVALID + "align", attention, Q, K, V, align="left"),
    no(ShapeError, "the shape of bias does", attention, Q, K, V, bias=zeros(200, 160)),
    no(DTypeError, "this element type of bias", attention, Q, K, V,
       bias=integers(1, 1, 1, 1)),
    no(ShapeError, "the shape of alibi_slopes", attention, Q, K, V,
       alibi_slopes=zeros(2, dtype=F32)),
    no(ArgumentError, "q_segment_ids without kv_segment_ids", attention, Q, K, V,
       q_segment_ids=integers(1, 200)),
    no(ShapeError, "the shape of q_segment_ids does not match", attention, Q, K, V,
       q_segment_ids=integers(1, 9), kv_segment_ids=integers(1, 160)),
    no(ShapeError, "the shape of q_lengths does not", attention, Q, K, V,
       q_lengths=integers(3)),
    no(DTypeError, "kv_lengths is not of type", attention, Q, K, V,
       kv_lengths=zeros(1, dtype=F32)),
    no(ShapeError, SHAPES, attention, Q, K, V, cu_seqlens_q=integers(3)),
    *(
        no(error, what, attention, Q[0], K[0], V[0],
           **{"cu_seqlens_q": integers(3), "cu_seqlens_kv": integers(3)} | changes)
        for error, what, changes in (
            (ArgumentError, "cu_seqlens_q without cu_seqlens_kv",
             {"cu_seqlens_kv": None}),
            (ShapeError, "the shape of cu_seqlens_kv", {"cu_seqlens_kv": integers(4)}),
            (ArgumentError, "bias beside cu_seq", {"bias": zeros(1, 1, 1, 1)}),
            (ArgumentError, "kv_lengths beside cu_seqlens",
             {"kv_lengths": integers(2)}),
        )
    ),
]  # fmt: skip

N = qkv(dtype=E4M3)
NARROW = [
    no(UnsupportedError, "no derivatives with this option",
       lambda q: total(lambda q: attention(q, *N[1:]), q), N[0], name="attention",
       got="operands of float8"),
    no(DifferentiationError, "",
       lambda x: total(lambda x: attention(*N, q_scale=x), x), zeros(dtype=F32),
       name="attention", got="scales"),
    no(ArgumentError, "q_scale is not a positive number", attention, *N, q_scale=-1.0),
    no(ShapeError, "the shape of k_scale does not", attention, *N,
       k_scale=zeros(2, dtype=F32)),
    no(DTypeError, "v_scale is not of type float32", attention, *N,
       v_scale=zeros(dtype=BF16)),
    *each(DTypeError, "out_dtype is not supported", attention, *N,
          changes=[{"out_dtype": F32}, {"out_dtype": "wide"}]),
    no(ArgumentError, "this block_kv is not supported for float8", attention, *N,
       config=ops.AttentionConfig(block_kv=48)),
    no(ArgumentError, "keep_maxima is not supported for float8", attention, *N,
       config=ops.AttentionConfig(keep_maxima=True)),
    no(UnsupportedError, "float8 is not supported here", attention, *N,
       compiler_params=BLACKWELL),
    no(UnsupportedError, "float8 is not supported here", attention,
       *(x[0] for x in N), cu_seqlens_q=integers(2), cu_seqlens_kv=integers(2),
       q_scale=1.0),
    *(
        no(ArgumentError, f"{name} without operands", attention, Q, K, V, **{name: 2.0})
        for name in ("q_scale", "k_scale", "v_scale")
    ),
    no(DTypeError, TYPES, attention, *N[:2], V.astype(BF16)),
    no(DTypeError, "", ops.dot_product_attention, *N, got="float8 is not supported"),
]  # fmt: skip


# --- decode ---------------------------------------------------------------------------

CACHE, TABLE = zeros(2, 32, 2, 64), integers(2, 3)


def row(error, what, **changes):
    given = {"q": zeros(2, 1, 4, 64), "k": CACHE} | changes
    given.setdefault("v", given["k"])
    return no(error, what, decode, **given)


DIMENSIONS = "the operands do not have these dimensions"
HEAD, PAGE = "this head_dim is not supported", "this page size is not supported"
DECODE = [
    *(
        row(ShapeError, SHAPES, **changes)
        for changes in (
            {"k": zeros(3, 32, 2, 64)},
            {"k": zeros(2, 32, 3, 64)},
            {"k": zeros(2, 32, 2, 32)},
            {"v": zeros(2, 48, 2, 64)},
            {"k": zeros(2, 0, 2, 64)},
            {"kv_layout": "HND"},
        )
    ),
    *(
        row(ShapeError, DIMENSIONS, **changes)
        for changes in (
            {"q": zeros(4, 64)},
            {"k": zeros(2, 32, 64)},
            {"v": None},
            {"k": zeros(2, 2, 32, 2, 64), "v": None},
            {"kv_axis": 0},
        )
    ),
    row(ShapeError, "the cache does not consist of keys and values",
        k=zeros(2, 3, 32, 2, 64), v=None, kv_axis=1),
    row(ShapeError, HEAD, q=zeros(2, 1, 4, 24), k=zeros(2, 32, 2, 24)),
    row(ShapeError, HEAD, q=zeros(2, 1, 4, 272), k=zeros(2, 32, 2, 272)),
    row(ShapeError, HEAD + " for elements of 8 bits",
        q=zeros(2, 1, 4, 80), k=zeros(2, 32, 2, 80, dtype=I8)),
    row(ShapeError, "too many queries for one launch", q=zeros(2, 9, 4, 64)),
    row(ShapeError, PAGE, k=zeros(9, 24, 2, 64), page_table=TABLE),
    row(ShapeError, PAGE, k=zeros(9, 4, 2, 64), page_table=TABLE),
    row(ShapeError, "the page table does not have a row for each sequence",
        k=zeros(9, 16, 2, 64), page_table=TABLE[0]),
    row(ShapeError, "lengths do not have one element for each sequence",
        lengths=integers(3)),
    row(ShapeError, "invalid k_scale", k_scale=zeros(3, dtype=F32)),
    row(ShapeError, "invalid v_scale", v_scale=zeros(2)),
    row(DTypeError, TYPES, q=zeros(2, 1, 4, 64, dtype=F32)),
    row(DTypeError, TYPES, k=zeros(2, 32, 2, 64, dtype=BF16)),
    row(DTypeError, TYPES, v=zeros(2, 32, 2, 64, dtype=I8)),
    row(DTypeError, "lengths are not int32", lengths=zeros(2, dtype=jnp.uint32)),
    row(DTypeError, "the page table is not int32",
        k=zeros(9, 16, 2, 64), page_table=TABLE.astype(jnp.int16)),
    *(
        row(ArgumentError, f"{name} is not a positive number", **{name: x})
        for name in ("sm_scale", "soft_cap", "k_scale")
        for x in (0.0, -1.0, float("inf"), float("nan"))
    ),
    row(TargetError, "the target has no wgmma", compiler_params=BLACKWELL),
    *(
        no(DifferentiationError, "it has no derivative",
           lambda q, f=f: f(lambda q: decode(q, CACHE, CACHE).astype(F32).sum())(q),
           zeros(2, 1, 4, 64), name="decode_attention", hint="ops.attention")
        for f in (jax.grad, jax.value_and_grad)
    ),
]  # fmt: skip
ROWS = named(ATTENTION, OPTIONS, NARROW, DECODE)


@pytest.mark.parametrize("name", ROWS)
def test_a_call_that_does_not_fit_is_refused(name):
    ROWS[name].check()


def test_a_scale_is_a_number_or_an_array():
    with pytest.raises(TypeError):
        attention(*N, v_scale="all")


def test_the_tiles_of_derivatives_fit_in_registers():
    config = ops.AttentionBackwardConfig(block_q=128)
    q, k, v = qkv(64, 64, 1, d=128)
    with pytest.raises(ArgumentError, match="registers") as caught:
        total(lambda q: attention(q, k, v, backward_config=config), q)
    assert "block_q=64" in caught.value.expected


def test_the_arrays_fit_tensor_memory():
    config = ops.BlackwellAttentionConfig(block_kv=128)
    with pytest.raises(OutOfResources, match="TMEM"):
        attention(*qkv(d=128), config=config)

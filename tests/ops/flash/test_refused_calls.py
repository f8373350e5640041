# SPDX-License-Identifier: Apache-2.0
"""Calls of attention and of decode that are refused, and what is said of each."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
from pallas_gpu import ops
from tests.support.refusal import refused
from tests.support.refused_calls import call, calls, derivative, named, zeros

F16, BF16, F32, I32, I8 = jnp.float16, jnp.bfloat16, jnp.float32, jnp.int32, jnp.int8
E4M3 = jnp.float8_e4m3fn
HOPPER, BLACKWELL = (
    plgpu.CompilerParams(target=t, approx_math=True) for t in ("sm_90a", "sm_100a")
)
attention, decode = ops.attention, ops.decode_attention
ON_BLACKWELL = ops.BlackwellAttentionConfig(block_kv=32)


def qkv(q_len=200, kv_len=160, heads=3, kv_heads=1, d=64, batch=1, dtype=F16):
    kv = zeros(batch, kv_len, kv_heads, d, dtype=dtype)
    return zeros(batch, q_len, heads, d, dtype=dtype), kv, kv


def mixed(number, **changes):
    """Operands of which one is of other sizes."""
    return [*qkv()[:number], qkv(**changes)[number], *qkv()[number + 1 :]]


def integers(*shape):
    return zeros(*shape, dtype=I32)


Q, K, V = qkv()
SMALL, LARGE = qkv(64, 64, 1), qkv(64, 64, 1, d=128)
ATTENTION = [
    *(
        call(attention, *mixed(number, **changes))
        for changes, number in (
            ({"d": 128}, 1), ({"batch": 2}, 2), ({"kv_len": 128}, 2)
        )
    ),
    *(call(attention, *qkv(kv_heads=n)) for n in (2, 0)),
    call(attention, Q[0], K[0], V[0]),
    call(attention, *qkv(d=272)),
    call(attention, *qkv(dtype=F32)),
    call(attention, Q, K, V.astype(BF16)),
    *calls(attention, Q, K, V, changes=[
        *({"sm_scale": x} for x in (0.0, -1.0, float("nan"), float("inf"))),
        {"config": ops.AttentionConfig(consumers=3, block_kv=144)},
        {"config": ON_BLACKWELL, "compiler_params": HOPPER},
        {"config": ops.AttentionConfig(), "compiler_params": BLACKWELL},
    ]),
    call(derivative, attention, *SMALL, alibi_slopes=zeros(1, dtype=F32),
         by="alibi_slopes"),
    *(call(attention, *qkv(d=d), compiler_params=BLACKWELL) for d in (80, 256)),
    *calls(attention, Q, K, V, compiler_params=BLACKWELL, changes=[
        {"window": (5, 5)}, {"soft_cap": 1.0}, {"return_logsumexp": True},
    ]),
    call(derivative, attention, *LARGE, by=0,
         backward_config=ops.AttentionBackwardConfig(block_q=128)),
    call(attention, *qkv(d=128), config=ops.BlackwellAttentionConfig(block_kv=128)),
]  # fmt: skip

PACKED = {"cu_seqlens_q": integers(3), "cu_seqlens_kv": integers(3)}
OPTIONS = [
    *calls(attention, Q, K, V, changes=[
        *({"window": x} for x in ((-1, 0), 2**40, (1, 2, 3), "all")),
        {"soft_cap": 0},
        {"align": "left"},
        *({"bias": x} for x in (zeros(200, 160), integers(1, 1, 1, 1))),
        {"alibi_slopes": zeros(2, dtype=F32)},
        {"q_segment_ids": integers(1, 200)},
        {"q_segment_ids": integers(1, 9), "kv_segment_ids": integers(1, 160)},
        {"q_lengths": integers(3)},
        {"kv_lengths": zeros(1, dtype=F32)},
        {"cu_seqlens_q": integers(3)},
    ]),
    *calls(attention, Q[0], K[0], V[0], **PACKED, changes=[
        {"cu_seqlens_kv": None},
        {"cu_seqlens_kv": integers(4)},
        {"bias": zeros(1, 1, 1, 1)},
        {"kv_lengths": integers(2)},
    ]),
]  # fmt: skip

N = qkv(dtype=E4M3)
NARROW = [
    call(derivative, attention, *N, by=0),
    call(derivative, attention, *N, q_scale=zeros(dtype=F32), by="q_scale"),
    *calls(attention, *N, changes=[
        {"q_scale": -1.0},
        {"k_scale": zeros(2, dtype=F32)},
        {"v_scale": zeros(dtype=BF16)},
        {"out_dtype": F32},
        {"out_dtype": "wide"},
        {"config": ops.AttentionConfig(block_kv=48)},
        {"config": ops.AttentionConfig(keep_maxima=True)},
        {"compiler_params": BLACKWELL},
    ]),
    call(attention, *(x[0] for x in N), q_scale=1.0,
         cu_seqlens_q=integers(2), cu_seqlens_kv=integers(2)),
    *(call(attention, Q, K, V, **{f"{x}_scale": 2.0}) for x in "qkv"),
    call(attention, *N[:2], V.astype(BF16)),
    call(ops.dot_product_attention, *N),
]  # fmt: skip


# --- decode ---------------------------------------------------------------------------

QUERY, CACHE, TABLE = zeros(2, 1, 4, 64), zeros(2, 32, 2, 64), integers(2, 3)


def row(**changes):
    given = {"q": QUERY, "k": CACHE} | changes
    given.setdefault("v", given["k"])
    return call(decode, **given)


DECODE = [
    *(row(k=zeros(*s)) for s in ((3, 32, 2, 64), (2, 32, 3, 64), (2, 32, 2, 32))),
    row(v=zeros(2, 48, 2, 64)),
    row(k=zeros(2, 0, 2, 64)),
    row(kv_layout="HND"),
    row(q=zeros(4, 64)),
    row(k=zeros(2, 32, 64)),
    row(v=None),
    row(k=zeros(2, 2, 32, 2, 64), v=None),
    row(kv_axis=0),
    row(k=zeros(2, 3, 32, 2, 64), v=None, kv_axis=1),
    *(row(q=zeros(2, 1, 4, d), k=zeros(2, 32, 2, d)) for d in (24, 272)),
    row(q=zeros(2, 1, 4, 80), k=zeros(2, 32, 2, 80, dtype=I8)),
    row(q=zeros(2, 9, 4, 64)),
    *(row(k=zeros(9, page, 2, 64), page_table=TABLE) for page in (24, 4)),
    row(k=zeros(9, 16, 2, 64), page_table=TABLE[0]),
    row(lengths=integers(3)),
    row(k_scale=zeros(3, dtype=F32)),
    row(v_scale=zeros(2)),
    row(q=QUERY.astype(F32)),
    row(k=CACHE.astype(BF16)),
    row(v=CACHE.astype(I8)),
    row(lengths=zeros(2, dtype=jnp.uint32)),
    row(k=zeros(9, 16, 2, 64), page_table=TABLE.astype(jnp.int16)),
    *(
        row(**{name: x})
        for name in ("sm_scale", "soft_cap", "k_scale")
        for x in (0.0, -1.0, float("inf"), float("nan"))
    ),
    row(compiler_params=BLACKWELL),
    call(derivative, decode, QUERY, CACHE, CACHE, by=0),
]


@refused
@pytest.mark.parametrize("call", [*ATTENTION, *OPTIONS, *NARROW, *DECODE], ids=named)
def test_a_call_that_does_not_fit(call):
    call()


def test_a_scale_is_a_number_or_an_array():
    with pytest.raises(TypeError):
        attention(*N, v_scale="all")

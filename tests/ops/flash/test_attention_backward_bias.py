# SPDX-License-Identifier: Apache-2.0
"""Attention's derivatives with a bias, and that of the bias: shapes, masks, types."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu.ops.flash.attention import attention
from pallas_gpu.ops.flash.backward.config import AttentionBackwardConfig
from tests.ops.flash import test_attention_backward as padded
from tests.support import emulated, host, norms
from tests.support.semantics import Warpgroup

# Of the derivatives, relative to their norm; operands have 11 bits.
BOUND = 1e-3
# A result in bfloat16 has 8.
BOUNDS = {jnp.float32: BOUND, jnp.float16: BOUND, jnp.bfloat16: 4e-3}
QUICK = plgpu.InterpretParams(detect_races=False)
assert_close = functools.partial(norms.assert_close, bound=BOUND)


def operands(bias, q_len=130, kv_len=70, heads=2, kv_heads=1, d=16, batch=2, **types):
    """Returns q, k, v, the bias and the cotangents of the result and of logsumexp."""
    rng = np.random.default_rng(0)
    of_q, of_kv = (batch, q_len, heads, d), (batch, kv_len, kv_heads, d)
    arrays = [
        host.array(rng.standard_normal(s), jnp.float16) for s in (of_q, of_kv, of_kv)
    ]
    bias = host.array(rng.standard_normal(bias), types.get("dtype", jnp.float32))
    do = host.array(rng.standard_normal(of_q), jnp.float16)
    dlse = host.array(rng.standard_normal((batch, heads, q_len)), jnp.float32)
    return [*arrays, bias, do, dlse]


# Those of q, k, v and the bias.
derivatives = functools.partial(padded.derivatives, with_sums=True)
expected = functools.partial(padded.expected, with_sums=True)


def check(args, given=None, **options):
    got = derivatives(QUICK, *args, **options, **(given or {}))
    assert got[3].dtype == args[3].dtype
    wanted = expected(args, **options)
    assert_close(got[:3], wanted[:3])
    assert_close(got[3:], wanted[3:], bound=BOUNDS[args[3].dtype.type])


CAUSAL = {"causal": True}
WIDE = {"q_len": 40, "heads": 1, "batch": 1, "d": 160}
IDS = np.sort(np.random.default_rng(1).integers(0, 3, (2, 70)), axis=1).astype("i4")
SEGMENTS_AND_LENGTHS = {
    **{"q_segment_ids": IDS, "kv_segment_ids": IDS},
    "q_lengths": np.array([70, 20], np.int32),
    "kv_lengths": np.array([33, 70], np.int32),
}
# The shape of the bias, sizes of operands, and options.
CASES = {
    # The derivative is summed over dimensions of one.
    "whole": ((2, 2, 130, 70), {}, {}),
    "of all heads and sequences": ((1, 1, 130, 70), {}, CAUSAL),
    "of columns of sequences": ((2, 1, 1, 70), {}, {}),
    "of heads": ((1, 2, 130, 70), {}, CAUSAL),
    "of columns": ((1, 1, 1, 70), {}, CAUSAL),
    "of rows": ((2, 1, 130, 1), {}, {}),
    "float16": ((1, 2, 130, 70), {"dtype": jnp.float16}, CAUSAL),
    "bfloat16": ((1, 1, 1, 70), {"dtype": jnp.bfloat16}, CAUSAL),
    "window": ((1, 2, 130, 70), {}, {"window": (20, 5)}),
    "soft cap": ((2, 1, 1, 70), {}, {"soft_cap": 1.5}),
    # ALiBi is a bias of its own.
    "slopes": ((1, 1, 70, 70), {"q_len": 70}, {"alibi_slopes": padded.SLOPES}),
    "segments and lengths": ((1, 1, 70, 70), {"q_len": 70}, SEGMENTS_AND_LENGTHS),
    "wide heads": ((1, 1, 40, 70), WIDE, CAUSAL),
    "of columns, wide heads": ((1, 1, 1, 70), WIDE, CAUSAL),
}


@pytest.mark.parametrize(("shape", "sizes", "options"), CASES.values(), ids=CASES)
def test_shapes_types_and_options(shape, sizes, options):
    check(operands(shape, **sizes), **options)


@pytest.mark.parametrize("shape", [(1, 1, 70, 70), (1, 1, 1, 70)])
def test_minus_infinity_hides_and_has_no_derivative(shape):
    args = operands(shape, 70, 70)
    hidden = np.random.default_rng(5).random(shape) < 0.3
    args[3] = jnp.where(hidden, -jnp.inf, args[3])
    check(args)
    assert (np.asarray(derivatives(QUICK, *args)[3])[hidden] == 0).all()


def test_no_derivative_of_the_bias_unless_it_is_asked_for():
    args = operands((1, 1, 64, 64), 64, 64)

    def f(*qkv):
        return attention(*qkv, bias=args[3], interpret=QUICK)

    text = str(jax.make_jaxpr(lambda *a: jax.vjp(f, *a)[1](args[4]))(*args[:3]))
    assert "attention_backward_queries" in text
    assert "attention_backward_bias" not in text
    got = jax.vjp(f, *args[:3])[1](args[4])
    whole = expected([*args[:5], args[5] * 0])
    assert_close(got, whole[:3])


def test_vmap_of_a_bias_and_of_one_that_is_shared():
    args = operands((2, 1, 70, 70), 70, 70, batch=4)
    bias = args.pop(3)
    split = [x.reshape(2, 2, *x.shape[1:]) for x in args]
    split.insert(3, bias[:, None])
    got = jax.jit(jax.vmap(functools.partial(derivatives, QUICK)))(*split)
    axes, one = (0, 0, 0, None, 0, 0), [*split[:3], bias[:1], *split[4:]]
    shared = jax.vmap(functools.partial(derivatives, QUICK), in_axes=axes)(*one)
    for i in range(2):
        assert_close([x[i] for x in got], expected([x[i] for x in split]))
        mine = [x if axis is None else x[i] for x, axis in zip(one, axes, strict=True)]
        assert_close([x[i] for x in shared], expected(mine))


def test_a_configuration_that_adds_in_any_order_is_not_used():
    args = operands((1, 1, 70, 70), 70, 70)
    config = AttentionBackwardConfig(block_q=128, stages=3)
    check(args, {"backward_config": config})


@pytest.mark.parametrize("shape", [(1, 1, 64, 64), (1, 1, 1, 64)])
def test_the_kernels_everywhere(shape):
    args = operands(shape, 64, 64, heads=1, batch=1)

    def make(interpret):
        return functools.partial(derivatives, interpret, causal=True)

    wanted = expected(args, causal=True)
    emulated.check(make, args, wanted, atol=8e-3, executed=[Warpgroup])

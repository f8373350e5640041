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
from tests.support import emulated, host, norms
from tests.support.attention import reference
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


def derivatives(interpret, *args, **options):
    """Returns those of q, k, v and the bias."""
    *arrays, do, dlse = args

    def f(q, k, v, bias):
        given = {"return_logsumexp": True, "interpret": interpret, **options}
        return attention(q, k, v, bias=bias, **given)

    return jax.vjp(f, *arrays)[1]((do, dlse))


def expected(args, **options):
    q, k, v, bias, do, dlse = args
    return reference(q, k, v, bias=bias, **options).derivatives(do, dlse)


def check(args, given=None, **options):
    got = derivatives(QUICK, *args, **options, **(given or {}))
    assert got[3].dtype == args[3].dtype
    wanted = expected(args, **options)
    assert_close(got[:3], wanted[:3])
    assert_close(got[3:], wanted[3:], bound=BOUNDS[args[3].dtype.type])


@pytest.mark.parametrize(
    "shape",
    [
        (2, 2, 130, 70),
        (1, 1, 130, 70),
        (2, 1, 1, 70),
        (1, 2, 130, 70),
        (1, 1, 1, 70),
        (2, 1, 130, 1),
    ],
)
def test_the_derivative_is_summed_over_dimensions_of_one(shape):
    check(operands(shape), causal=shape[0] == 1)


@pytest.mark.parametrize(
    ("dtype", "shape"), [(jnp.float16, (1, 2, 130, 70)), (jnp.bfloat16, (1, 1, 1, 70))]
)
def test_types_of_the_bias(shape, dtype):
    check(operands(shape, dtype=dtype), causal=True)


@pytest.mark.parametrize(
    ("options", "shape"),
    [({"window": (20, 5)}, (1, 2, 130, 70)), ({"soft_cap": 1.5}, (2, 1, 1, 70))],
)
def test_other_options_beside_it(options, shape):
    check(operands(shape), **options)


def test_slopes_beside_it():
    """ALiBi is a bias of its own."""
    args = operands((1, 1, 70, 70), 70, 70)
    check(args, alibi_slopes=jnp.asarray([0.5, 0.03], jnp.float32))


def test_segments_and_lengths_beside_it():
    args = operands((1, 1, 70, 70), 70, 70)
    rng = np.random.default_rng(1)
    ids = np.sort(rng.integers(0, 3, (2, 70)), axis=1).astype(np.int32)
    lengths = np.array([[70, 20], [33, 70]], np.int32)
    given = {"q_segment_ids": ids, "kv_segment_ids": ids}
    given |= {"q_lengths": lengths[0], "kv_lengths": lengths[1]}
    check(args, **given)


@pytest.mark.parametrize("shape", [(1, 1, 70, 70), (1, 1, 1, 70)])
def test_minus_infinity_hides_and_has_no_derivative(shape):
    args = operands(shape, 70, 70)
    hidden = np.random.default_rng(5).random(shape) < 0.3
    args[3] = jnp.where(hidden, -jnp.inf, args[3])
    check(args)
    assert (np.asarray(derivatives(QUICK, *args)[3])[hidden] == 0).all()


@pytest.mark.parametrize("shape", [(1, 1, 40, 70), (1, 1, 1, 70)])
def test_wide_heads(shape):
    check(operands(shape, 40, 70, heads=1, batch=1, d=160), causal=True)


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
    shared = jax.vmap(
        functools.partial(derivatives, QUICK), in_axes=(0, 0, 0, None, 0, 0)
    )(*split[:3], bias[:1], *split[4:])
    for i in range(2):
        assert_close([x[i] for x in got], expected([x[i] for x in split]))
        mine = expected(
            [*(x[i] for x in split[:3]), bias[:1], *(x[i] for x in split[4:])]
        )
        assert_close([x[i] for x in shared], mine)


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

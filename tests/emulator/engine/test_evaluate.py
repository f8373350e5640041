# SPDX-License-Identifier: Apache-2.0
"""The equation loop: control flow, scalars, rules that are missing."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from pallas_gpu.emulator.engine import plan
from pallas_gpu.emulator.engine.steps import ArithmeticStep, bound
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import tma
from tests.support import everywhere
from tests.support.entry_kernels import f32
from tests.support.refusal import refused, refused_by

F32 = jnp.float32
I32 = jnp.int32


def run_on(body, *args, out=4, **options):
    """Runs a body once and returns its only result."""
    return everywhere.emulate(body, args, f32(out), **options)


@refused
def test_an_operation_without_a_rule_is_an_error_of_its_own(monkeypatch):
    rules = registry.rules(registry.RuleKind.EMULATE)
    monkeypatch.delitem(rules, tma.commit_smem_p)

    def body(o):
        plgpu.commit_smem()

    run_on(body)


INT_OPS = {
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "div": lax.div,
    "rem": lax.rem,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "<": lambda a, b: (a < b).astype(I32),
    "where": lambda a, b: jnp.where(a > b, a, b - a),
    "and": lambda a, b: (a & b) | (a ^ 7),
    "clip": lambda a, b: jnp.clip(a, -2, 3) + jnp.sign(b),
    "square": lambda a, b: a**2 - abs(b),
}


@functools.cache
def prepared(op):
    """An integer operation as a plan, and compiled by JAX."""
    compiled = jax.jit(INT_OPS[op])
    jaxpr = jax.make_jaxpr(INT_OPS[op])(np.int32(1), np.int32(1))
    return plan.plan_of(jaxpr.jaxpr), compiled


@pytest.mark.parametrize("op", INT_OPS)
@given(a=st.integers(-(2**31), 2**31 - 1), b=st.integers(-9, 9))
def test_scalar_integers_agree_with_jax(op, a, b):
    steps, compiled = prepared(op)
    env = [np.int32(a), np.int32(b)] + [None] * steps.size
    with np.errstate(all="ignore"):
        for step in steps.steps:
            assert isinstance(step, ArithmeticStep)
            env[step.out] = step.fn(*bound(step.ins, env))
    assert bound(steps.outs, env)[0] == compiled(np.int32(a), np.int32(b))


# --- the budget of steps --------------------------------------------------------------


def pure_loop(turns, rows=1):
    """The result of a loop without effects."""

    def body(n, o):
        def more(carry):
            return carry[0] < n[0]

        def step(carry):
            return carry[0] + 1, carry[1] + 1

        start = (jnp.int32(0), jnp.zeros((rows, 128), F32))
        o[...] = lax.while_loop(more, step, start)[1][0]

    return run_on(body, np.array([turns], np.int32), out=128, max_steps=100)


@refused_by(run_on, np.zeros(4, np.int32), max_steps=100)
def test_a_loop_without_effects_ends_with_the_budget(x, o):
    def keep(carry):
        return carry[0], jnp.sin(carry[1])

    start = (x[0], jnp.float32(1))
    _, y = lax.while_loop(lambda c: c[0] < 10, keep, start)  # HERE
    o[...] = jnp.full(4, y)


def test_large_arrays_use_the_budget_faster():
    assert pure_loop(20)[0] == 20
    with pytest.raises(errors.LivelockError):
        pure_loop(20, rows=512)


def test_the_budget_begins_anew_when_a_cta_has_ended():
    def body(o):
        def step(i, _):
            o[lax.axis_index("i")] = F32(i)

        lax.fori_loop(0, 20, step, None)

    got = run_on(body, grid={"i": 4}, max_steps=100)
    np.testing.assert_array_equal(got, [19] * 4)

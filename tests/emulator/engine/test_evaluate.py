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
from pallas_gpu.emulator.engine.steps import ArithmeticStep
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import tma
from tests.support.refusal import refused

F32 = jnp.float32
I32 = jnp.int32


def run_on(body, *args, out=(4,), dtype=F32, scratch=(), **options):
    """Runs a body once and returns its only result."""
    outs = jax.ShapeDtypeStruct(out, dtype)
    kernel = plgpu.kernel(body, out_type=outs, scratch_types=list(scratch), **options)
    return np.asarray(kernel(*args))


def test_a_loop_carries_values_and_writes_refs():
    def body(x, o):
        def step(i, total):
            o[i] = total
            return total + x[i]

        lax.fori_loop(0, 4, step, jnp.float32(0))

    got = run_on(body, jnp.asarray([1.0, 2, 3, 4]))
    np.testing.assert_array_equal(got, [0, 1, 3, 6])


def test_a_loop_with_a_dynamic_bound_runs_that_often():
    def body(n, o):
        o[...] = jnp.zeros(4)

        def step(i, _):
            o[i] = 1.0

        lax.fori_loop(0, n[0], step, None)

    np.testing.assert_array_equal(run_on(body, jnp.asarray([3])), [1, 1, 1, 0])


def test_a_while_loop_may_read_refs_in_its_condition():
    def body(o, counter):
        counter[...] = jnp.zeros(1, I32)

        def more(_):
            return counter[0] < 3

        def step(i):
            counter[0] += 1
            return i + 2

        o[...] = jnp.full(4, lax.while_loop(more, step, jnp.int32(0)))

    got = run_on(body, dtype=I32, scratch=[plgpu.SMEM((1,), I32)])
    np.testing.assert_array_equal(got, [6] * 4)


def test_a_switch_takes_one_branch_for_each_instance():
    def body(o):
        i = lax.axis_index("i")

        def branch(value):
            def store():
                o[i] = value

            return store

        lax.switch(i, [branch(v) for v in (10.0, 20.0, 30.0)])
        o[3] = 0.0

    got = run_on(body, grid=(3,), grid_names=("i",))
    np.testing.assert_array_equal(got, [10, 20, 30, 0])


def test_calls_are_inlined_also_twice():
    @jax.jit
    def double(x):
        return x * 2

    def body(x, o):
        o[...] = double(double(x[...])) + jax.nn.relu(-x[...])

    x = np.asarray([1.0, -2, 3, -4], np.float32)
    np.testing.assert_array_equal(run_on(body, x), 4 * x + np.maximum(-x, 0))


def test_a_jitted_function_may_have_effects():
    def body(x, o):
        @jax.jit
        def store(value):
            o[...] = value

        store(x[...] + 1)

    np.testing.assert_array_equal(run_on(body, jnp.ones(4)), [2] * 4)


def test_a_loop_without_effects_may_cast_layouts():
    def body(x, o):
        def step(_, value):
            return plgpu.layout_cast(value, plgpu.Layout.WG_STRIDED((128,), 1)) * 2

        o[...] = lax.fori_loop(0, 3, step, x[...])

    np.testing.assert_array_equal(run_on(body, jnp.ones(128), out=(128,)), [8] * 128)


def test_elements_keep_their_type():
    def body(x, o):
        o[...] = (x[...].astype(F32) * 3).astype(jnp.bfloat16)

    x = jnp.arange(4, dtype=jnp.bfloat16)
    got = run_on(body, x, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(got, np.asarray(x) * 3)


def test_addition_to_a_ref_reads_and_writes():
    def body(x, o, tile):
        tile[...] = x[...]
        jax.ref.addupdate(tile, (), jnp.ones(4))
        o[...] = tile[...]

    got = run_on(body, jnp.zeros(4), scratch=[plgpu.SMEM((4,), F32)])
    np.testing.assert_array_equal(got, np.ones(4))


def test_a_transposed_reference_is_read_transposed():
    def body(x, o):
        o[...] = x.T[...]

    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_array_equal(run_on(body, x, out=(4, 3)), x.T)


@refused
def test_an_operation_without_a_rule_is_an_error_of_its_own(monkeypatch):
    rules = registry.rules(registry.RuleKind.EMULATE)
    monkeypatch.delitem(rules, tma.commit_smem_p)

    def body(o):
        plgpu.commit_smem()

    run_on(body)


def test_every_primitive_has_a_rule():
    rules = registry.rules(registry.RuleKind.EMULATE)
    missing = {
        name
        for name, entry in registry.PRIMITIVES.items()
        if entry.primitive not in rules
        and (name, registry.RuleKind.EMULATE) not in registry.KNOWN_GAPS
    }
    assert not missing


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
            env[step.out] = step.fn(*[x.bind(env) for x in step.ins])
    assert steps.outs[0].bind(env) == compiled(np.int32(a), np.int32(b))


# --- the budget of steps --------------------------------------------------------------


def pure_loop(turns, rows=1):
    """A kernel with a loop without effects."""

    def body(n, o):
        def more(carry):
            return carry[0] < n[0]

        def step(carry):
            return carry[0] + 1, carry[1] + 1

        start = (jnp.int32(0), jnp.zeros((rows, 128), F32))
        o[...] = lax.while_loop(more, step, start)[1][0]

    def run(**interpret):
        params = plgpu.InterpretParams(**interpret)
        n = np.array([turns], np.int32)
        return run_on(body, n, out=(128,), interpret=params)

    return run


@refused
def test_a_loop_without_effects_ends_with_the_budget():
    def body(x, o):
        def keep(carry):
            return carry[0], jnp.sin(carry[1])

        start = (x[0], jnp.float32(1))
        _, y = lax.while_loop(lambda c: c[0] < 10, keep, start)  # HERE
        o[...] = jnp.full(4, y)

    run_on(body, jnp.zeros(4, I32), interpret=plgpu.InterpretParams(max_steps=100))


def test_large_arrays_use_the_budget_faster():
    assert pure_loop(20)(max_steps=100)[0] == 20
    with pytest.raises(errors.LivelockError):
        pure_loop(20, rows=512)(max_steps=100)


def test_the_budget_begins_anew_when_a_cta_has_ended():
    def body(o):
        def step(i, _):
            o[lax.axis_index("i")] = F32(i)

        lax.fori_loop(0, 20, step, None)

    params = plgpu.InterpretParams(max_steps=100)
    got = run_on(body, grid=(4,), grid_names=("i",), interpret=params)
    np.testing.assert_array_equal(got, [19] * 4)

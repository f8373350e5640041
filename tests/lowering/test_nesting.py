# SPDX-License-Identifier: Apache-2.0
"""The work of lowering nested loops and branches is linear in their depth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.lowering import borders
from pallas_gpu.primitives import _registry as registry
from tests.support import everywhere, host
from tests.support.semantics import BOTH, under

SHAPE = (32, 64)
X = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
DEEP = 8


def kernel(nest: Callable[..., Any], depth: int):
    def body(x_ref, o_ref):
        o_ref[...] = nest(x_ref, depth, x_ref[...])

    out_type = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    return everywhere.kernel(body, out_type)


def branches(x_ref, depth: int, value):
    if not depth:
        return value * 2
    return lax.cond(
        x_ref[depth, 0] > 0,
        lambda v: branches(x_ref, depth - 1, v + 1),
        lambda v: v - 1,
        value,
    )


def loops(x_ref, depth: int, value):
    """Loops that all pass on one carry, which starts without a layout."""

    def level(depth, carry):
        if not depth:
            return carry + value
        return lax.fori_loop(0, 2, lambda _, c: level(depth - 1, c), carry)

    return level(depth, jnp.zeros(SHAPE, jnp.float32))


def loops_in_branches(x_ref, depth: int, value):
    if not depth:
        return value * 2

    def step(_, carry):
        return branches(x_ref, 1, loops_in_branches(x_ref, depth - 1, carry))

    return lax.cond(
        x_ref[depth, 0] > 0,
        lambda v: lax.fori_loop(0, 2, step, v),
        lambda v: v - 1,
        value,
    )


@pytest.fixture
def rule_calls(monkeypatch) -> Counter:
    """Counts calls of lowering rules, per kind."""
    calls: Counter = Counter()

    def counted(kind: registry.RuleKind, rule: Callable) -> Callable:
        def call(*args):
            calls[kind] += 1
            return rule(*args)

        return call

    for kind in registry.RuleKind:
        if kind is not registry.RuleKind.EMULATE:
            for key, rule in list(registry.rules(kind).items()):
                monkeypatch.setitem(registry.rules(kind), key, counted(kind, rule))
    return calls


@pytest.mark.parametrize("nest", [branches, loops, loops_in_branches])
@pytest.mark.parametrize("semantics", BOTH)
def test_rules_run_in_proportion_to_the_depth(rule_calls, semantics, nest):
    counts = []
    for depth in (DEEP // 4, DEEP // 2, DEEP):
        rule_calls.clear()
        plgpu.offline.lower(under(semantics, kernel(nest, depth)(None)), X)
        counts.append(Counter(rule_calls))
    shallow, middle, deep = counts
    assert deep
    for kind in deep:
        assert deep[kind] - middle[kind] == 2 * (middle[kind] - shallow[kind]), kind


@pytest.mark.parametrize("nest", [branches, loops, loops_in_branches])
def test_nested_control_flow_computes_what_jax_does(nest):
    x = host.array(X)
    everywhere.check(kernel(nest, 3), [x], nest(x, 3, x), rtol=1e-6)


def test_nothing_is_known_of_values_that_a_trial_made_and_erased(monkeypatch):
    """A later value may have the address of an erased one, which made it equal."""
    left = []
    place = borders.place_carry

    def placed(kernel, carry, emit):
        known = dict(kernel.builder.extended)
        carry = place(kernel, carry, lambda carry: (tried.append(1), emit(carry))[1])
        left.append(kernel.builder.extended.keys() - known.keys())
        return carry

    def body(x_ref, o_ref):
        def step(_, total):
            return total + x_ref[...].astype(jnp.float32)

        o_ref[...] = lax.fori_loop(0, 3, step, jnp.zeros(SHAPE, jnp.float32))

    tried = []
    monkeypatch.setattr(borders, "place_carry", placed)
    x = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)
    out_type = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    kernel = everywhere.kernel(body, out_type)()
    lane = under(plgpu.LoweringSemantics.Lane, kernel)
    plgpu.offline.lower(lane, x)
    assert tried
    assert left == [set()]

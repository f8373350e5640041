# SPDX-License-Identifier: Apache-2.0
"""Bodies are changed where a pass says so, and stay the same objects elsewhere."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_gpu import errors
from pallas_gpu.program.bodies import equations
from pallas_gpu.program.rewrite import Deferred, Retrace, Rewrite, with_equations

ONE = jax.ShapeDtypeStruct((), jnp.float32)


def traced(function, *avals):
    return jax.make_jaxpr(function)(*avals or (ONE,)).jaxpr


def named(jaxpr, name):
    return [eqn for eqn in equations(jaxpr) if eqn.primitive.name == name]


class _NoSines(Rewrite):
    """Cosines in place of sines; what nothing reads is left out."""

    def replacement(self, eqn, caller):
        if eqn.primitive.name != "sin":
            return None
        return [eqn.replace(primitive=lax.cos_p)]

    def is_dropped_unread(self, eqn):
        return not eqn.effects


def loops(x):
    @jax.jit
    def twice(x):
        return lax.fori_loop(0, 3, lambda _, x: jnp.sin(x) + 1, x)

    return twice(x) + twice(x * 2)


def test_what_does_not_change_stays_the_same_object():
    jaxpr = traced(lambda x: lax.cond(x > 0, jnp.cos, jnp.exp, x))
    assert _NoSines().body(jaxpr) is jaxpr
    assert with_equations(jaxpr, {}) is jaxpr


def test_equations_are_replaced_in_all_that_a_body_runs():
    jaxpr = _NoSines().body(traced(loops))
    assert named(jaxpr, "cos")
    assert not named(jaxpr, "sin")
    first, second = named(jaxpr, "jit") or named(jaxpr, "pjit")
    assert first.params["jaxpr"] is second.params["jaxpr"]


def test_what_nothing_reads_is_left_out_with_what_only_it_reads():
    def body(x):
        jnp.exp(jnp.tan(x))
        return jnp.sin(x)

    assert [e.primitive.name for e in _NoSines().body(traced(body)).eqns] == ["cos"]


def test_equations_are_inserted_and_appended():
    jaxpr = traced(lambda x: jnp.sin(jnp.exp(x)))
    exp, sin = jaxpr.eqns
    result = with_equations(jaxpr, {id(exp): None}, {id(sin): exp}, {jaxpr: sin})
    assert result.eqns == [exp, sin, sin]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Pair:
    """Twice and half of a number."""

    double: Any
    half: Any


@dataclasses.dataclass(frozen=True)
class _Later(Deferred):
    """The sum of a pair."""

    pair: _Pair

    def array(self):
        return self.pair.double + self.pair.half


class _Pairs(Retrace):
    """A pair in place of each sine, until a sum reads it."""

    def is_replaced(self, eqn):
        return eqn.primitive.name == "sin"

    def results(self, eqn, operands):
        pairs = [x for x in operands if isinstance(x, _Pair)]
        if eqn.primitive.name == "sin":
            (x,) = operands
            return [x if pairs else _Pair(x * 2, x / 2)]
        if eqn.primitive.name == "tan":
            raise errors.UnsupportedError("no tangents")
        if eqn.primitive.name == "neg" and pairs:
            return [_Later(pairs[0])]
        return None


def in_loop(x):
    return -lax.fori_loop(0, 3, lambda _, x: jnp.sin(x), jnp.sin(x))


def in_while(x):
    state = 0, jnp.sin(x)
    return -lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, s[1]), state)[1]


def in_branches(x):
    y = jnp.sin(x)
    return -lax.cond(x > 0, lambda: y, lambda: jnp.sin(x))


def in_call(x):
    return -jax.jit(jnp.sin)(x)


@pytest.mark.parametrize("body", [in_loop, in_while, in_branches, in_call])
def test_control_flow_carries_what_stands_for_values(body):
    jaxpr = traced(lambda x: body(x) + 1)
    made = jax.make_jaxpr(lambda x: _Pairs().run(jaxpr, [x]))(ONE)
    assert not named(made.jaxpr, "sin")
    (result,) = jax.core.eval_jaxpr(made.jaxpr, made.consts, np.float32(4))
    assert result == 4 * 2 + 4 / 2 + 1


def test_an_error_of_a_rule_has_the_line_of_the_equation():
    jaxpr = traced(lambda x: lax.fori_loop(0, 3, lambda _, x: jnp.tan(jnp.sin(x)), x))
    with pytest.raises(errors.UnsupportedError, match="test_rewrite"):
        jax.make_jaxpr(lambda x: _Pairs().run(jaxpr, [x]))(ONE)

# SPDX-License-Identifier: Apache-2.0
"""What indices are known to be multiples of while a kernel is traced.

`program.facts` answers the same for a finished program, `emitters.elements.scalars` for
emitted code.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pallas_gpu import _jax
from pallas_gpu.layouts.window import Sum
from pallas_gpu.primitives.indices import rules
from pallas_gpu.primitives.indices.facts import (
    Fact,
    fitted,
    is_integer,
    literal,
    unknown,
)

# Functions of jax.numpy are jitted.
_CALLS = ("jit", "pjit", "closed_call")
# Nobody writes longer index arithmetic; it bounds the search.
_MOST_STEPS = 64


def start_divisor(start: Any) -> int:
    """Returns a known divisor of a window's start; 0 for a start of 0."""
    if isinstance(start, Sum):
        return math.gcd(start.constant, *(divisor(term) for term in start.terms))
    return divisor(start)


def divisor(x: Any) -> int:
    """Returns a known divisor of an integer scalar; 0 for the number 0."""
    return _Search().of_value(x).divisor


class _Search:
    """The search through what has been traced so far."""

    def __init__(self) -> None:
        self._steps = 0

    def of_value(self, x: Any) -> Fact:
        """The fact of a value in a trace."""
        x = _jax.known_value(x)
        if not _jax.is_tracer(x):
            return literal(x)
        made, self._steps = _jax.producer(x), self._steps + 1
        if made is None or not _is_index(x.aval) or self._steps > _MOST_STEPS:
            return unknown(x.aval)
        facts = list(map(self.of_value, made.operands))
        ins = [x.aval if _jax.is_tracer(x) else np.asarray(x) for x in made.operands]
        op = rules.Operation(made.primitive.name, made.params, ins, x.aval)
        return self._result(op, facts, made.position)

    def _result(self, op: rules.Operation, facts: list[Fact], position: int) -> Fact:
        if op.name not in _CALLS:
            return fitted(rules.result(op, facts), op.out)
        jaxpr, consts = op.params["jaxpr"].jaxpr, op.params["jaxpr"].consts
        known = dict(zip(jaxpr.constvars, map(literal, consts), strict=True))
        known |= dict(zip(jaxpr.invars, facts, strict=True))

        def of(atom: Any) -> Fact:
            is_known = isinstance(atom, _jax.Literal)
            return literal(atom.val) if is_known else known[atom]

        for eqn in jaxpr.eqns:
            name, ins = eqn.primitive.name, [x.aval for x in eqn.invars]
            for i, var in enumerate(eqn.outvars):
                inner = rules.Operation(name, eqn.params, ins, var.aval)
                known[var] = self._result(inner, list(map(of, eqn.invars)), i)
        return of(jaxpr.outvars[position])


def _is_index(aval: Any) -> bool:
    return is_integer(aval) and not aval.shape

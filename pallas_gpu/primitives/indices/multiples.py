# SPDX-License-Identifier: Apache-2.0
"""What indices are known to be multiples of while a kernel is traced.

`program.facts` answers the same for a finished program, `mosaic.elements.scalars` for
emitted code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
        made = _jax.producer(x)
        if made is None or not self._is_followed(x.aval):
            return unknown(x.aval)
        return self._of_equation(made, made.position, x.aval, self.of_value)

    def _is_followed(self, aval: Any) -> bool:
        """Whether a type is that of an index, and the search may go on."""
        self._steps += 1
        return is_integer(aval) and not aval.shape and self._steps <= _MOST_STEPS

    def _of_equation(
        self, eqn: Any, position: int, aval: Any, of: Callable[[Any], Fact]
    ) -> Fact:
        """The fact of an equation's result; `of` is for its operands."""
        name, operands = eqn.primitive.name, _operands(eqn)
        if name in _CALLS:
            return self._of_call(eqn.params["jaxpr"], operands, position, of)
        ins = [x.aval if hasattr(x, "aval") else np.asarray(x) for x in operands]
        op = rules.Operation(name, eqn.params, ins, aval)
        return fitted(rules.result(op, list(map(of, operands))), aval)

    def _of_call(
        self,
        closed: Any,
        operands: Sequence[Any],
        position: int,
        of: Callable[[Any], Fact],
    ) -> Fact:
        jaxpr = closed.jaxpr
        outer = dict(zip(jaxpr.invars, operands, strict=True))
        outer |= dict(zip(jaxpr.constvars, closed.consts, strict=True))
        made = {
            var: (eqn, i) for eqn in jaxpr.eqns for i, var in enumerate(eqn.outvars)
        }

        def inner(atom: Any) -> Fact:
            if isinstance(atom, _jax.Literal):
                return literal(atom.val)
            if atom in outer:
                return of(outer[atom])
            if not self._is_followed(atom.aval):
                return unknown(atom.aval)
            eqn, i = made[atom]
            return self._of_equation(eqn, i, atom.aval, inner)

        return inner(jaxpr.outvars[position])


def _operands(made: Any) -> Sequence[Any]:
    """The operands of an equation, or of what a tracer comes from."""
    return made.operands if isinstance(made, _jax.Producer) else made.invars

# SPDX-License-Identifier: Apache-2.0
"""What indices are known to be multiples of while a kernel is traced.

`mosaic.elements.scalars` answers the same for emitted code.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pallas_gpu import _jax
from pallas_gpu.layouts.window import Sum
from pallas_gpu.primitives.registers import multiple_of_p

# Operations that yield one of their operands, or sums of multiples of them.
_COMBINING = ("add", "sub", "neg", "min", "max", "rem", "copy", "convert_element_type")
# Those that do so behind a first operand that chooses.
_CHOOSING = ("select_n",)
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
    return _Search().of_value(x)


class _Search:
    """The search through what has been traced so far."""

    def __init__(self) -> None:
        self._steps = 0

    def of_value(self, x: Any) -> int:
        """A known divisor of a value in a trace."""
        x = _jax.known_value(x)
        if not _jax.is_tracer(x):
            return _of_number(x)
        made = _jax.producer(x)
        if made is None or not _is_integer(x.aval) or self._is_long():
            return 1
        return self._of_equation(
            made.primitive, made.operands, made.params, made.position, self.of_value
        )

    def _is_long(self) -> bool:
        self._steps += 1
        return self._steps > _MOST_STEPS

    def _of_equation(
        self,
        primitive: Any,
        operands: Sequence[Any],
        params: dict[str, Any],
        position: int,
        of: Callable[[Any], int],
    ) -> int:
        """A known divisor of an equation's result.

        Args:
          position: of the result.
          of: a divisor of an operand.
        """
        name = primitive.name
        if primitive is multiple_of_p:
            return math.lcm(params["divisor"], of(operands[0]) or params["divisor"])
        if name == "mul":
            return math.prod(of(x) for x in operands)
        if name in _COMBINING:
            return math.gcd(*(of(x) for x in operands))
        if name in _CHOOSING:
            return math.gcd(*(of(x) for x in operands[1:]))
        if name in _CALLS:
            return self._of_call(params["jaxpr"], operands, position, of)
        return 1

    def _of_call(
        self,
        closed: Any,
        operands: Sequence[Any],
        position: int,
        of: Callable[[Any], int],
    ) -> int:
        jaxpr = closed.jaxpr
        outer = dict(zip(jaxpr.invars, operands, strict=True))
        outer |= dict(zip(jaxpr.constvars, closed.consts, strict=True))
        made = {
            var: (eqn, i) for eqn in jaxpr.eqns for i, var in enumerate(eqn.outvars)
        }
        return self._of_atom(outer, made, of, jaxpr.outvars[position])

    def _of_atom(
        self,
        outer: dict[Any, Any],
        made: dict[Any, Any],
        of: Callable[[Any], int],
        atom: Any,
    ) -> int:
        """A known divisor of a value inside a call; `of` is for the outer values."""
        if isinstance(atom, _jax.Literal):
            return _of_number(atom.val)
        if atom in outer:
            return of(outer[atom])
        if not _is_integer(atom.aval) or self._is_long():
            return 1
        eqn, i = made[atom]
        inner = functools.partial(self._of_atom, outer, made, of)
        return self._of_equation(eqn.primitive, eqn.invars, eqn.params, i, inner)


def _is_integer(x: Any) -> bool:
    return x.shape == () and x.dtype.kind in "iu"


def _of_number(x: Any) -> int:
    x = np.asarray(x)
    return abs(int(x)) if _is_integer(x) else 1

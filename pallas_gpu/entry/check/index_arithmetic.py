# SPDX-License-Identifier: Apache-2.0
"""Index arithmetic that can be shown to wrap: sums and multiples of positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_gpu import _jax, types
from pallas_gpu.primitives import _indices
from pallas_gpu.walk import Body, Site, bodies, walk


@dataclasses.dataclass(frozen=True)
class _Linear:
    """A constant plus multiples of positions.

    Attributes:
      constant: the constant.
      terms: (axis, largest position, factor), the axes different from each other.
    """

    constant: int
    terms: tuple[tuple[Any, int, int], ...] = ()

    def plus(self, other: _Linear, sign: int = 1) -> _Linear:
        """Returns the sum, or the difference."""
        factors = {(axis, most): factor for axis, most, factor in self.terms}
        for axis, most, factor in other.terms:
            key = axis, most
            factors[key] = factors.get(key, 0) + sign * factor
        terms = tuple((*key, factor) for key, factor in factors.items() if factor)
        return _Linear(self.constant + sign * other.constant, terms)

    def times(self, factor: int) -> _Linear:
        """Returns a multiple."""
        terms = tuple((axis, most, factor * f) for axis, most, f in self.terms)
        return _Linear(self.constant * factor, terms if factor else ())

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the largest value; both occur."""
        ends = [most * factor for _, most, factor in self.terms]
        return (
            self.constant + sum(min(x, 0) for x in ends),
            self.constant + sum(max(x, 0) for x in ends),
        )


# What runs whenever the equation does.
_CALLS = ("jit", "pjit", "closed_call", "run_scoped", "scan")


def check_indices(jaxpr: _jax.Jaxpr, mesh: types.Mesh) -> None:
    """Raises OutOfBoundsError for index arithmetic that wraps at some position.

    Considered are sums and multiples of positions on the axes of the launch, and of
    counters of loops, where no branch decides whether they are used.
    """
    if any(site.eqn.primitive.name == "axis_index" for site in walk(jaxpr)):
        marks = _indices.find(jaxpr, lambda site: all(map(_runs, site.enclosing)))
        _Search(marks, dict(mesh.axes)).visit(jaxpr)


def _runs(site: Site) -> bool:
    """True if the bodies of an equation run whenever it does."""
    return site.eqn.primitive.name in _CALLS and site.eqn.params.get("length", 1) > 0


class _Search:
    """The search for values that are linear in positions, and wrap.

    Args:
      marks: the variables that indices depend on, by jaxpr.
      sizes: of the axes.
    """

    def __init__(self, marks: _indices.Marks, sizes: Mapping[Any, int]):
        self._marks = marks
        self._sizes = sizes
        self._known: dict[Any, _Linear] = {}

    def visit(self, jaxpr: _jax.Jaxpr) -> None:
        """Visits the equations of a jaxpr and of what runs in it."""
        for eqn in jaxpr.eqns:
            found = _value(eqn, list(map(self._value_of, eqn.invars)), self._sizes)
            if found is not None:
                self._enter(jaxpr, eqn, found)
            if eqn.primitive.name in _CALLS and eqn.params.get("length", 1) > 0:
                for body in bodies(eqn):
                    self._visit_body(eqn, body)

    def _value_of(self, atom: Any) -> _Linear | None:
        if isinstance(atom, _jax.Literal):
            number = np.asarray(atom.val)
            integer = number.shape == () and number.dtype.kind in "iu"
            return _Linear(int(number)) if integer else None
        return self._known.get(atom)

    def _enter(self, jaxpr: _jax.Jaxpr, eqn: _jax.JaxprEqn, found: _Linear) -> None:
        (var,) = eqn.outvars
        low, high = found.bounds
        limits = jnp.iinfo(var.aval.dtype)
        if limits.min <= low and high <= limits.max:
            self._known[var] = found
        elif var in self._marks.get(jaxpr, ()):
            number = low if low < limits.min else high
            raise _indices.overflow(
                var.aval.dtype.name,
                f"{number} at {', '.join(_position(found, low < limits.min))}",
                _jax.where(eqn),
            )

    def _visit_body(self, eqn: _jax.JaxprEqn, body: Body) -> None:
        carried = dict(_indices.carried(eqn, body.jaxpr))
        for i, (var, operand) in enumerate(
            zip(body.jaxpr.invars, body.inputs, strict=True)
        ):
            value = None if operand is None else self._value_of(operand)
            if i in carried:
                counts = value == _Linear(0) and _is_counted(body.jaxpr, i, carried[i])
                axis = f"step of a loop at {_jax.where(eqn)}", eqn.params["length"] - 1
                value = _Linear(0, ((*axis, 1),)) if counts else None
            if value is not None:
                self._known[var] = value
        self.visit(body.jaxpr)
        if not carried and len(body.jaxpr.outvars) == len(eqn.outvars):
            for var, inner in zip(eqn.outvars, body.jaxpr.outvars, strict=True):
                value = self._value_of(inner)
                if value is not None:
                    self._known[var] = value


def _is_counted(body: _jax.Jaxpr, carry: int, result: int) -> bool:
    """True for a carry that grows by one in every iteration."""
    var, end = body.invars[carry], body.outvars[result]
    made = next((eqn for eqn in body.eqns if end in eqn.outvars), None)
    if made is None or made.primitive.name != "add" or made.invars[0] is not var:
        return False
    step = made.invars[1]
    return isinstance(step, _jax.Literal) and np.asarray(step.val) == 1


def _position(value: _Linear, least: bool) -> list[str]:
    return [
        f"{axis}={most if (factor < 0) == least else 0}"
        for axis, most, factor in value.terms
    ]


def _value(
    eqn: _jax.JaxprEqn, operands: list[_Linear | None], sizes: Mapping[Any, int]
) -> _Linear | None:
    """Returns the result of an equation, if it is linear in positions."""
    name = eqn.params.get("axis_name")
    if eqn.primitive.name == "axis_index" and name in sizes:
        return _Linear(0, ((name, sizes[name] - 1, 1),))
    if len(eqn.outvars) != 1 or not _indices.is_integer(eqn.outvars[0].aval):
        return None
    match eqn.primitive.name, operands:
        case "add", [_Linear() as a, _Linear() as b]:
            return a.plus(b)
        case "sub", [_Linear() as a, _Linear() as b]:
            return a.plus(b, -1)
        case "neg", [_Linear() as a]:
            return a.times(-1)
        case "mul", [_Linear() as a, _Linear(terms=()) as b]:
            return a.times(b.constant)
        case "mul", [_Linear(terms=()) as a, _Linear() as b]:
            return b.times(a.constant)
        case "convert_element_type", [_Linear() as a]:
            return a
    return None

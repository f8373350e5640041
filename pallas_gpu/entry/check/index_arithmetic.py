# SPDX-License-Identifier: Apache-2.0
"""Index arithmetic that can be shown to wrap: sums and multiples of positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from pallas_gpu import _jax, types
from pallas_gpu.primitives import _indices
from pallas_gpu.program.build import region_of
from pallas_gpu.program.flow import Flow
from pallas_gpu.program.nodes import Constant, Kind, Op, Region, Value
from pallas_gpu.walk import Site, walk


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
        region, flow = region_of(jaxpr), _Linears(marks, dict(mesh.axes))
        flow.run(region, [None] * len(region.inputs))


def _runs(site: Site) -> bool:
    """True if the bodies of an equation run whenever it does."""
    return site.eqn.primitive.name in _CALLS and site.eqn.params.get("length", 1) > 0


class _Linears(Flow[_Linear | None]):
    """Values that are linear in positions, and wrap.

    Args:
      marks: the variables that indices depend on, by jaxpr.
      sizes: of the axes.
    """

    def __init__(self, marks: _indices.Marks, sizes: Mapping[Any, int]):
        super().__init__()
        self._marks = marks
        self._sizes = sizes

    def unknown(self, value: Value) -> None:
        return None

    def constant(self, constant: Constant) -> _Linear | None:
        integer = constant.shape == () and constant.dtype.kind in "iu"
        return _Linear(int(constant.value)) if integer else None

    def join(self, a: _Linear | None, b: _Linear | None) -> _Linear | None:
        return a if a == b else None

    def in_every_iteration(self, op: Op, i: int, j: int) -> _Linear | None:
        entry = op.entries[-1][i]
        if op.kind is not Kind.FOR or entry is None or self.of(entry) != _Linear(0):
            return None
        if not _is_counted(op.regions[-1], i, j):
            return None
        return _Linear(
            0, ((f"step of a loop at {op.where}", op.params["length"] - 1, 1),)
        )

    def results(self, op: Op, operands: Sequence[_Linear | None]) -> list[Any]:
        found = _value(op, list(operands), self._sizes)
        if found is None:
            return [None] * len(op.results)
        low, high = found.bounds
        limits = jnp.iinfo(op.results[0].dtype)
        if limits.min <= low and high <= limits.max:
            return [found]
        if op.equation.outvars[0] in self._marks.get(op.jaxpr(), ()):
            number = low if low < limits.min else high
            raise _indices.overflow(
                op.results[0].dtype.name,
                f"{number} at {', '.join(_position(found, low < limits.min))}",
                op.where,
            )
        return [None]


def _is_counted(body: Region, carry: int, result: int) -> bool:
    """True for a carry that grows by one in every iteration."""
    end = body.results[result]
    made = next((op for op in body.ops if end in op.results), None)
    if made is None or made.name != "add" or made.inputs[0] is not body.inputs[carry]:
        return False
    step = made.inputs[1]
    return isinstance(step, Constant) and step.shape == () and step.value == 1


def _position(value: _Linear, least: bool) -> list[str]:
    return [
        f"{axis}={most if (factor < 0) == least else 0}"
        for axis, most, factor in value.terms
    ]


def _value(
    op: Op, operands: list[_Linear | None], sizes: Mapping[Any, int]
) -> _Linear | None:
    """Returns the result of an operation, if it is linear in positions."""
    name = op.params.get("axis_name")
    if op.name == "axis_index" and name in sizes:
        return _Linear(0, ((name, sizes[name] - 1, 1),))
    if len(op.results) != 1 or not _indices.is_integer(op.results[0].aval):
        return None
    match op.name, operands:
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

# SPDX-License-Identifier: Apache-2.0
"""Index arithmetic that can be shown to wrap: sums and multiples of positions."""

from __future__ import annotations

from typing import Any

from jax import lax

from pallas_gpu import _jax, types
from pallas_gpu.primitives.indices.facts import Fact, fits, limits
from pallas_gpu.program import indices
from pallas_gpu.program.build import region_of
from pallas_gpu.program.facts import Facts
from pallas_gpu.program.nodes import Op, Value
from pallas_gpu.program.walk import uses


def check_indices(jaxpr: _jax.Jaxpr, mesh: types.Mesh) -> None:
    """Raises OutOfBoundsError for index arithmetic that wraps at some position.

    Considered are sums and multiples of positions on the axes of the launch, and of
    counters of loops, where no branch decides whether they are used.
    """
    if uses(jaxpr, lax.axis_index_p):
        region = region_of(jaxpr)
        marked = indices.find(region, certain=True)
        needed = indices.with_sources(region, marked)
        facts = _Wrapping(dict(mesh.axes), marked, needed)
        facts.run(region, facts.inputs_of(region))


class _Wrapping(Facts):
    """Reports indices whose range is known, and beyond that of their type."""

    def __init__(self, axes: dict[Any, int], marked: set[Value], needed: set[Value]):
        super().__init__(axes, needed=needed)
        self._marked = marked

    def fitted(self, op: Op, value: Value, fact: Fact) -> Fact:
        low, high = fact.bounds
        if value in self._marked and fact.is_linear and None not in (low, high):
            assert low is not None and high is not None
            if op.name in indices.WRAPPING and not fits(fact, value.aval):
                least = low < limits(value.aval)[0]
                raise indices.overflow(
                    value.dtype.name,
                    f"{low if least else high} at {', '.join(_position(fact, least))}",
                    op.where,
                )
        return super().fitted(op, value, fact)


def _position(fact: Fact, least: bool) -> list[str]:
    """Where a linear value is least, or largest."""
    shown = []
    for axis, factor in fact.terms:
        name = axis.of
        if isinstance(name, Op):
            name = f"step of a loop at {name.where}"
        assert axis.size is not None
        shown.append(f"{name}={axis.size - 1 if (factor < 0) == least else 0}")
    return shown

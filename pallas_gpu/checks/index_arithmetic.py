# SPDX-License-Identifier: Apache-2.0
"""Index arithmetic that can be shown to wrap: sums and multiples of positions."""

from __future__ import annotations

from jax import lax

from pallas_gpu import _jax, types
from pallas_gpu.primitives.indices.facts import Fact, limits
from pallas_gpu.program import indices
from pallas_gpu.program.build import region_of
from pallas_gpu.program.facts import facts_of
from pallas_gpu.program.nodes import Op
from pallas_gpu.program.walk import uses


def check_indices(jaxpr: _jax.Jaxpr, mesh: types.Mesh) -> None:
    """Raises OutOfBoundsError for index arithmetic that wraps at some position.

    Considered are sums and multiples of positions on the axes of the launch, and of
    counters of loops, where no branch decides whether they are used.
    """
    if not uses(jaxpr, lax.axis_index_p):
        return
    region = region_of(jaxpr)
    wrapping = facts_of(region, mesh.axes).wrapping
    marked = indices.find(region, certain=True) if wrapping else ()
    for value, (op, fact) in wrapping.items():
        if value in marked:
            low, high = fact.bounds
            least = low is not None and low < limits(value.aval)[0]
            raise indices.overflow(
                value.dtype.name,
                f"{low if least else high} at {', '.join(_position(fact, least))}",
                op.where,
            )


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

# SPDX-License-Identifier: Apache-2.0
"""Index arrays that are ranges, and where masks change along them.

`plgpu.load(ref, start + jnp.arange(n), mask=start + jnp.arange(n) < size)` names
adjacent elements, as a slice does. The body says so only in its arithmetic, which is
followed here from the positions of the grid to the accesses.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from pallas_gpu import _jax
from pallas_gpu.layouts.edges import Edges
from pallas_gpu.layouts.window import row_major_strides
from pallas_gpu.primitives.indexed import load_indexed_p, store_indexed_p
from pallas_gpu.primitives.indices.facts import Fact
from pallas_gpu.program.build import region_of
from pallas_gpu.program.facts import Facts
from pallas_gpu.program.nodes import Op
from pallas_gpu.program.rewrite import with_equations
from pallas_gpu.program.walk import walk

_ACCESSES = (load_indexed_p, store_indexed_p)


@dataclasses.dataclass(frozen=True)
class Found:
    """What is known of an access.

    Attributes:
      adjacent: as of `types.Selection`.
      mask_edges: where the mask changes along that axis; None if it may change with
        each element.
    """

    adjacent: tuple[int, int] | None
    mask_edges: Edges | None

    def met_with(self, other: Found) -> Found:
        """What holds in both executions of an access."""
        a, b = self.adjacent, other.adjacent
        if a is None or b is None or a[0] != b[0]:
            return Found(None, None)
        both = a[0], math.gcd(a[1], b[1])
        edges, others = self.mask_edges, other.mask_edges
        if edges is None or others is None:
            return Found(both, None)
        return Found(both, edges.union(others))


def with_ranges(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Returns a body whose accesses by elements state which are adjacent."""
    accesses = [s.eqn for s in walk(jaxpr) if s.eqn.primitive in _ACCESSES]
    if not accesses:
        return jaxpr
    region, search = region_of(jaxpr), _Search()
    search.run(region, search.inputs_of(region))
    # A branch that is known not to be taken has not been visited.
    found = [e for e in accesses if id(e) in search.stated_of]
    return with_equations(jaxpr, {id(e): search.stated(e) for e in found})


class _Search(Facts):
    """The facts of a kernel's values, and of its accesses by their identity."""

    def __init__(self) -> None:
        super().__init__()
        self.stated_of: dict[int, Found] = {}

    def stated(self, access: _jax.JaxprEqn) -> _jax.JaxprEqn:
        """Returns an access that has been visited, with what was found."""
        found = self.stated_of[id(access)]
        return access.replace(params={**access.params, **vars(found)})

    def visit(self, op: Op, operands: Sequence[Fact]) -> None:
        if op.primitive in _ACCESSES:
            found, key = self._found(op), id(op.equation)
            before = self.stated_of.get(key)
            self.stated_of[key] = found if before is None else before.met_with(found)

    def _found(self, op: Op) -> Found:
        named, params = op.operands, op.params
        access = named.get("src") or named["dst"]
        rank, view = len(params["shape"]), params["view_shape"]
        strides = access.window.strides if view is None else row_major_strides(view)
        facts = [self.of(x) for x in named["indices"]]
        adjacent, given = _adjacent(strides, facts, params["shape"]), params["adjacent"]
        if given is not None and (adjacent is None or adjacent[0] != given[0]):
            adjacent = given
        elif given is not None and adjacent is not None:
            adjacent = given[0], math.lcm(given[1], adjacent[1])
        if adjacent is None or named["mask"] is None:
            return Found(adjacent, Edges())
        return Found(adjacent, self.of(named["mask"]).changes(rank)[adjacent[0]])


def _adjacent(
    strides: Sequence[int], indices: Sequence[Fact], shape: Sequence[int]
) -> tuple[int, int] | None:
    """The axis along which the last index counts and the others are the same."""
    places = [i for i, stride in enumerate(strides) if stride == 1]
    if not places:
        return None
    counting = indices[places[-1]]
    others = [*indices[: places[-1]], *indices[places[-1] + 1 :]]
    for axis, n in enumerate(shape):
        same = all(index.factor(axis) == 0 for index in others)
        if n > 1 and same and counting.factor(axis) == 1:
            starts = [index.at(axis, 0).divisor for index in indices]
            pairs = zip(strides, starts, strict=True)
            return axis, math.gcd(*(stride * divisor for stride, divisor in pairs))
    return None

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
from pallas_gpu.lowering.progressions import (
    Fact,
    Progression,
    join,
    literal,
    union,
    unknown,
)
from pallas_gpu.lowering.progressions import result as result_of
from pallas_gpu.primitives.indexed import load_indexed_p, store_indexed_p
from pallas_gpu.program.build import region_of
from pallas_gpu.program.flow import Flow
from pallas_gpu.program.nodes import Constant, Op, Value
from pallas_gpu.program.rewrite import with_equations
from pallas_gpu.walk import walk

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
        return Found(both, union(self.mask_edges, other.mask_edges))


def with_ranges(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Returns a body whose accesses by elements state which are adjacent."""
    accesses = [s.eqn for s in walk(jaxpr) if s.eqn.primitive in _ACCESSES]
    if not accesses:
        return jaxpr
    region, search = region_of(jaxpr), _Search()
    search.run(region, [unknown(value.aval) for value in region.inputs])
    return with_equations(jaxpr, {id(e): search.stated(e) for e in accesses})


class _Search(Flow[Fact | None]):
    """The facts of a kernel's values, and of its accesses by their identity."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, Found] = {}

    def stated(self, access: _jax.JaxprEqn) -> _jax.JaxprEqn:
        """Returns an access that has been visited, with what was found."""
        found = self.found[id(access)]
        return access.replace(params={**access.params, **vars(found)})

    def unknown(self, value: Value) -> Fact | None:
        return unknown(value.aval)

    def constant(self, constant: Constant) -> Fact | None:
        return literal(constant.value)

    def join(self, a: Fact | None, b: Fact | None) -> Fact | None:
        return join(a, b)

    def results(self, op: Op, operands: Sequence[Fact | None]) -> list[Fact | None]:
        if len(op.results) == 1:
            return [result_of(op.equation, operands)]
        return [unknown(value.aval) for value in op.results]

    def visit(self, op: Op, operands: Sequence[Fact | None]) -> None:
        if op.primitive in _ACCESSES:
            found, key = self._found(op), id(op.equation)
            before = self.found.get(key)
            self.found[key] = found if before is None else before.met_with(found)

    def _found(self, op: Op) -> Found:
        named, params = op.operands, op.params
        access = named.get("src") or named["dst"]
        rank, view = len(params["shape"]), params["view_shape"]
        strides = access.window.strides if view is None else row_major_strides(view)
        facts = [_of_rank(self.of(x), rank) for x in named["indices"]]
        adjacent, given = _adjacent(strides, facts, params["shape"]), params["adjacent"]
        if given is not None and (adjacent is None or adjacent[0] != given[0]):
            adjacent = given
        elif given is not None and adjacent is not None:
            adjacent = given[0], math.lcm(given[1], adjacent[1])
        if adjacent is None or named["mask"] is None:
            return Found(adjacent, Edges())
        mask = self.of(named["mask"])
        return Found(adjacent, mask[adjacent[0]] if isinstance(mask, tuple) else None)


def _of_rank(fact: Fact | None, rank: int) -> Progression:
    """The fact of an index, which is a scalar or has the access's shape."""
    if not isinstance(fact, Progression):
        return Progression((None,) * rank)
    return fact if fact.strides else dataclasses.replace(fact, strides=(0,) * rank)


def _adjacent(
    strides: Sequence[int], indices: Sequence[Progression], shape: Sequence[int]
) -> tuple[int, int] | None:
    """The axis along which the last index counts and the others are the same."""
    places = [i for i, stride in enumerate(strides) if stride == 1]
    if not places:
        return None
    counting = indices[places[-1]]
    others = [*indices[: places[-1]], *indices[places[-1] + 1 :]]
    for axis, n in enumerate(shape):
        same = all(index.strides[axis] == 0 for index in others)
        if n > 1 and same and counting.strides[axis] == 1:
            return axis, math.gcd(
                *(
                    stride * math.gcd(index.divisor, *_strides_of_others(index, axis))
                    for stride, index in zip(strides, indices, strict=True)
                )
            )
    return None


def _strides_of_others(index: Progression, axis: int) -> list[int]:
    return [s for i, s in enumerate(index.strides) if i != axis and s is not None]

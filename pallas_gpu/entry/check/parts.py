# SPDX-License-Identifier: Apache-2.0
"""Results, and parts of them, that no operation stores to.

What may store counts, and where it is not known where, it stores to all of an axis:
what is left is certainly undefined.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from pallas_gpu import _jax
from pallas_gpu.primitives.indices.facts import Fact
from pallas_gpu.program.build import region_of
from pallas_gpu.program.facts import facts_of
from pallas_gpu.program.nodes import Access, Kind, Operand
from pallas_gpu.program.walk import Site, walk

Ranges = list[tuple[int, int]]
# Of how many starts each is considered, and of how many parts of a result.
_MOST_STARTS, _MOST_PARTS = 1 << 12, 1 << 16


class Stores:
    """The stores to results, and what is known of where they start.

    Args:
      jaxpr: the traced body of a kernel.
      refs: the references to results, among its inputs.
      axes: names and sizes of the axes of the launch.

    Attributes:
      found: the stores to each reference; None where others may store to it, too.
    """

    def __init__(
        self,
        jaxpr: _jax.Jaxpr,
        refs: Collection[Any],
        axes: tuple[tuple[Any, int], ...],
    ):
        self._region, self._axes = region_of(jaxpr), axes
        pairs = zip(self._region.inputs, jaxpr.invars, strict=True)
        variables: dict[Operand, Any] = {v: x for v, x in pairs if x in refs}
        self.found: dict[Any, list[tuple[Site, Access]] | None]
        self.found = {ref: [] for ref in variables.values()}
        for site in walk(jaxpr):
            if site.op.kind is Kind.PLAIN and site.op.operation is None:
                given = variables.keys() & map(site.origin, site.op.inputs)
                self.found |= {variables[value]: None for value in given}
            for access in site.op.accesses:
                ref = variables.get(site.origin(access.buffer))
                stores = self.found.get(ref)
                if access.writes and stores is not None:
                    stores.append((site, access))

    def starts(self, store: Access) -> list[Fact]:
        """Returns what is known of the starts of a store, by the axes of the result."""
        facts = facts_of(self._region, self._axes)
        return list(map(facts.start, store.window.starts))

    def unwritten(self) -> list[Any]:
        """Returns the results to which nothing is stored, not even in a branch."""
        return [ref for ref, stores in self.found.items() if stores == []]

    def missing(self) -> Iterator[tuple[Any, str, str | None]]:
        """Yields the results with elements that no store reaches.

        Yields:
          The reference, some such elements as an index, the line of a store.
        """
        for ref, stores in self.found.items():
            parts = [self._part(store, ref.aval.shape) for _, store in stores or ()]
            index = _left(ref.aval.shape, parts) if parts else None
            if stores and index is not None:
                text = ", ".join(f"{low}:{high}" for low, high in index)
                yield ref, f"[{text}]", stores[-1][0].where

    def _part(self, store: Access, shape: tuple[int, ...]) -> list[Ranges]:
        """Returns the ranges on each axis that a store may reach."""
        window = store.window
        if store.viewed is not None or window.array_shape != shape:
            return [[(0, n)] for n in shape]
        sizes = zip(self.starts(store), window.sizes, shape, strict=True)
        return [_reached(*x) for x in sizes]


def _reached(start: Fact, size: int, extent: int) -> Ranges:
    """Returns the ranges of an axis that windows of a size may reach."""
    low, high = start.bounds
    sizes = [axis.size for axis, _ in start.terms if axis.size is not None]
    if not start.is_linear or None in (low, high) or math.prod(sizes) > _MOST_STARTS:
        end = extent if high is None else high + size
        return [(max(low or 0, 0), min(end, extent))]
    starts = np.array([start.rest])
    for (_, factor), n in zip(start.terms, sizes, strict=True):
        starts = np.add.outer(starts, factor * np.arange(n)).reshape(-1)
    found: Ranges = []
    for at in np.unique(starts).tolist():
        first = found.pop()[0] if found and found[-1][1] >= at else max(at, 0)
        found.append((first, min(at + size, extent)))
    return found


def _left(shape: Sequence[int], parts: list[list[Ranges]]) -> Ranges | None:
    """Returns a part of an array that no other part covers; None if they may do so."""
    cuts = []
    for axis, n in enumerate(shape):
        ends = {end for part in parts for ends in part[axis] for end in ends}
        cuts.append(sorted({0, n} | {end for end in ends if 0 < end < n}))
    counts = [len(ends) - 1 for ends in cuts]
    if math.prod(counts) > _MOST_PARTS:
        return None
    left = np.ones(counts, np.bool_)
    for part in parts:
        covered = [
            [any(a <= low < b for a, b in ranges) for low in ends[:-1]]
            for ranges, ends in zip(part, cuts, strict=True)
        ]
        left[np.ix_(*covered)] = False
    if not left.any():
        return None
    first = np.argwhere(left)[0].tolist()
    return [(ends[i], ends[i + 1]) for ends, i in zip(cuts, first, strict=True)]

# SPDX-License-Identifier: Apache-2.0
"""Results, and parts of them, that no operation stores to.

Every operation that may store counts, and where it stores is taken for more where that
is not known: what is left is certainly undefined.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from pallas_gpu import _jax
from pallas_gpu.layouts.window import Sum
from pallas_gpu.primitives.indices.facts import Fact
from pallas_gpu.program import indices
from pallas_gpu.program.build import region_of
from pallas_gpu.program.facts import Facts, facts_of
from pallas_gpu.program.nodes import Access, Kind, Operand, Value
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
        self, jaxpr: _jax.Jaxpr, refs: Collection[Any], axes: Iterable[tuple[Any, int]]
    ):
        self._region, self._axes = region_of(jaxpr), axes
        pairs = zip(self._region.inputs, jaxpr.invars, strict=True)
        variables: dict[Operand, Any] = {v: x for v, x in pairs if x in refs}
        self.found: dict[Any, list[tuple[Site, Access]] | None]
        self.found = {ref: [] for ref in variables.values()}
        for site in walk(jaxpr):
            op = site.op
            if op.kind is Kind.PLAIN and op.operation is None:
                for value in map(site.origin, op.inputs):
                    if value in variables:
                        self.found[variables[value]] = None
            for access in op.accesses:
                ref = variables.get(site.origin(access.buffer))
                stores = self.found.get(ref)
                if access.writes and stores is not None:
                    stores.append((site, access))

    @functools.cached_property
    def _facts(self) -> Facts:
        found = (s for stores in self.found.values() for _, s in stores or ())
        starts = {x for store in found for x in store.starts() if isinstance(x, Value)}
        needed = indices.with_sources(self._region, starts)
        return facts_of(self._region, self._axes, needed)

    def starts(self, store: Access) -> list[Fact]:
        """Returns what is known of the starts of a store, by the axes of the result."""
        return [self._start(start) for start in store.window.starts]

    def _start(self, start: Any) -> Fact:
        if isinstance(start, int):
            return Fact.number(start)
        if not isinstance(start, Sum):
            return self._facts.of(start)
        terms = map(self._facts.of, start.terms)
        return functools.reduce(Fact.plus, terms, Fact.number(start.constant))

    def unwritten(self) -> list[Any]:
        """Returns the results to which nothing is stored, not even in a branch."""
        return [ref for ref, stores in self.found.items() if stores == []]

    def missing(self) -> Iterator[tuple[Any, str, str | None]]:
        """Yields the results with elements that no store reaches.

        Yields:
          The reference, some such elements as an index, the line of a store.
        """
        for ref, stores in self.found.items():
            if not stores:
                continue
            parts = [self._part(store, ref.aval.shape) for _, store in stores]
            missing = _left(ref.aval.shape, parts)
            if missing is not None:
                index = ", ".join(f"{low}:{high}" for low, high in missing)
                yield ref, f"[{index}]", stores[-1][0].where

    def _part(self, store: Access, shape: Sequence[int]) -> list[Ranges]:
        """Returns the ranges on each axis that a store may reach."""
        window = store.window
        if store.viewed is not None or window.array_shape != tuple(shape):
            return [[(0, n)] for n in shape]
        starts = zip(self.starts(store), window.sizes, shape, strict=True)
        return [_reached(start, size, n) for start, size, n in starts]


def _reached(start: Fact, size: int, extent: int) -> Ranges:
    """Returns the ranges of an axis that windows of a size may reach."""
    low, high = start.bounds
    if low is None or high is None:
        return [(0, extent)]
    sizes = [axis.size or 0 for axis, _ in start.terms]
    if not start.is_linear or math.prod(sizes) > _MOST_STARTS:
        return [(max(low, 0), min(high + size, extent))]
    starts = np.array([start.rest])
    for (_, factor), n in zip(start.terms, sizes, strict=True):
        starts = np.add.outer(starts, factor * np.arange(n)).reshape(-1)
    starts = np.unique(starts)
    gaps = np.flatnonzero(np.diff(starts) > size)
    firsts, lasts = starts[[0, *(gaps + 1)]], starts[[*gaps, -1]]
    pairs = zip(firsts.tolist(), lasts.tolist(), strict=True)
    return [(max(a, 0), min(b + size, extent)) for a, b in pairs]


def _left(shape: Sequence[int], parts: list[list[Ranges]]) -> Ranges | None:
    """Returns a part of an array that no other part covers; None if they may do so."""
    if any(part == [[(0, n)] for n in shape] for part in parts):
        return None
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

# SPDX-License-Identifier: Apache-2.0
"""Stores to results: what none reaches, and what several CTAs store; unwritten SMEM.

What may store counts, and where it is not known where, it stores to all of an axis:
what is left is certainly undefined.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from pallas_gpu import _jax, types
from pallas_gpu.checks import references
from pallas_gpu.primitives.indices.facts import Axis, Fact
from pallas_gpu.program.bodies import kept
from pallas_gpu.program.build import region_of
from pallas_gpu.program.facts import Facts, Starts
from pallas_gpu.program.nodes import (
    Access,
    Fault,
    Kind,
    Op,
    Operand,
    Region,
    Value,
)
from pallas_gpu.program.walk import Site, walk

Ranges = list[tuple[int, int]]
# Of how many starts each is considered, and of how many parts of a result.
_MOST_STARTS, _MOST_PARTS = 1 << 12, 1 << 16
# By these CTAs take turns: what each stores then follows what the others have stored.
_ORDERING = ("atomics", "semaphore")
# What runs its regions in any case.
_ALWAYS = (Kind.SCOPE, Kind.FOR)


class Stores:
    """The stores to results, and what is known of where they start.

    Args:
      jaxpr: the traced body of a kernel.
      refs: the references to results, among its inputs.
      axes: names and sizes of the axes of the launch.
    """

    def __init__(
        self, jaxpr: _jax.Jaxpr, refs: Collection[Any], axes: Iterable[tuple[Any, int]]
    ):
        self._region, self._sites = region_of(jaxpr), walk(jaxpr)
        pairs = zip(self._region.inputs, jaxpr.invars, strict=True)
        variables: dict[Operand, Any] = {v: x for v, x in pairs if x in refs}
        # Those to each reference; None where others may store to it, too.
        self._found: dict[Any, list[tuple[Site, Access]] | None]
        self._found = {ref: [] for ref in variables.values()}
        for site in self._sites:
            if site.op.kind is Kind.PLAIN and site.op.operation is None:
                given = variables.keys() & map(site.origin, site.op.inputs)
                self._found |= {variables[value]: None for value in given}
            for access in site.op.accesses:
                ref = variables.get(site.origin(access.buffer))
                stores = self._found.get(ref)
                if access.writes and stores is not None:
                    stores.append((site, access))
        stored = [store for found in self._found.values() for _, store in found or ()]
        self._starts = Starts(self._region, axes, stored)

    def unwritten(self) -> list[Any]:
        """Returns the results to which nothing is stored, not even in a branch."""
        return [ref for ref, stores in self._found.items() if stores == []]

    def missing(self) -> Iterator[tuple[Any, str, str | None]]:
        """Yields the results with elements that no store reaches.

        Yields:
          The reference, some such elements as an index, the line of a store.
        """
        for ref, stores in self._found.items():
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
        sizes = zip(self._starts.of(store), window.sizes, shape, strict=True)
        return [_reached(*x) for x in sizes]

    def certain(self) -> Iterator[tuple[Any, Site, Access]]:
        """Yields stores of elements that each CTA executes, unless CTAs are ordered.

        Yields:
          The reference to the result, the operation, and where it stores.
        """
        operations = (site.op.operation for site in self._sites)
        if any(x is not None and x.family in _ORDERING for x in operations):
            return
        for ref, found in self._found.items():
            for site, access in found or ():
                always = all(around.op.kind in _ALWAYS for around in site.enclosing)
                if always and _stored(site.op)[0] is access and access.owner is None:
                    yield ref, site, access

    def common(
        self, grid: Collection[Any], cluster: Collection[Any]
    ) -> Iterator[tuple[Any, frozenset[Any], str | None]]:
        """Yields stores of which it is certain that CTAs store to the same elements.

        The index does not depend on the axes, no branch is around them, and nothing
        orders the CTAs.

        Args:
          grid, cluster: the names of axes with several positions.

        Yields:
          The reference to the result; the axes on which the CTAs differ, and from which
          they compute what they store; the line.
        """
        meets = any(_meets(site.op) for site in self._sites)
        free = {*grid} if meets else {*grid, *cluster}
        for ref, site, access in self.certain() if free else ():
            starts = self._starts.of(access)
            shared = {a for a in free if not any(x.depends_on(a) for x in starts)}
            if shared:
                stored = _stored_values(self._region).get(site.op, ())
                values = frozenset(axis.of for axis in stored)
                yield ref, values & shared, site.where


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


def read_unwritten(jaxpr: _jax.Jaxpr) -> Iterator[tuple[str, Any, str | None]]:
    """Yields SMEM arrays that are read and that no operation writes.

    Those of a union are left out: the others in it may be written. With each come its
    name, its type, and the line that reads it first.
    """
    names: dict[Any, str] = {}
    first: dict[Any, Site] = {}
    for site in walk(jaxpr):
        if site.op.kind is Kind.SCOPE:
            names.update(_declared(site.op))
        for access in site.op.accesses:
            if access.reads:
                first.setdefault(site.origin(access.buffer), site)
    written = references.writes(jaxpr)
    for array, site in first.items():
        if array in names and array not in written:
            yield names[array], array.aval, site.where


def _declared(op: Op) -> Iterator[tuple[Value, str]]:
    """Yields the arrays in SMEM that a scope allocates, and their names."""
    for value, name in zip(op.made, op.params["names"], strict=False):
        in_smem = getattr(value.aval, "memory_space", None) is types.SMEM
        if in_smem and value.aval.storage.overlay is None:
            yield value, name


@kept
def _stored_values(region: Region) -> dict[Op, frozenset[Axis]]:
    """Returns what the elements are computed from that each store overwrites."""
    uses, before = _Uses(), None
    while uses.contents != before:  # memory may be written after it is read
        before = dict(uses.contents)
        uses.run(region, uses.inputs_of(region))
    return uses.stores


class _Uses(Facts):
    """What a program does with references.

    Attributes:
      stores: what the elements are computed from that each of them overwrites.
      contents: what the elements of references are computed from.
    """

    memory_is_constant = True

    def __init__(self) -> None:
        super().__init__()
        self.stores: dict[Op, frozenset[Axis]] = {}
        self.contents: dict[Value, frozenset[Axis]] = {}

    def results(self, op: Op, operands: Sequence[Fact]) -> Sequence[Fact]:
        refs = filter(None, map(self.origin, op.inputs))
        read = frozenset[Axis]().union(*(self.contents.get(x, ()) for x in refs))
        return [fact.depending_on(read) for fact in super().results(op, operands)]

    def visit(self, op: Op, operands: Sequence[Fact]) -> None:
        if op.operation is not None:
            self._access(op)
            self._store(op)

    def _access(self, op: Op) -> None:
        sources = frozenset[Axis]().union(*map(self._sources, op.inputs))
        for access in op.accesses:
            ref = self.origin(access.buffer)
            if ref is not None and access.writes:
                self.contents[ref] = self.contents.get(ref, frozenset()) | sources

    def _sources(self, operand: Operand) -> frozenset[Axis]:
        """What a value, or the contents of a reference, are computed from."""
        ref = self.origin(operand)
        if ref is not None:
            return self.contents.get(ref, frozenset())
        return frozenset(a for a in self.of(operand).axes if not a.is_of_array)

    def _store(self, op: Op) -> None:
        target, stored = _stored(op)
        if target is not None and target.space is types.GMEM:
            before = self.stores.get(op, frozenset())
            self.stores[op] = before | self._sources(stored)


def _meets(op: Op) -> bool:
    """Whether CTAs of a cluster may exchange values, by an operation or around it."""
    if op.operation is not None and op.operation.family == "cluster":
        return True
    if any(map(op.params.get, ("collective_axes", "collective_axis", "cta_axes"))):
        return True
    avals = (x.aval for x in op.inputs if isinstance(x, Value))
    declared = (getattr(aval, "barrier", None) for aval in avals)
    return any(isinstance(x, types.ClusterBarrier) for x in declared)


def _stored(op: Op) -> tuple[Access | None, Any]:
    """Returns the part of a reference that an operation overwrites, and with what."""
    named = op.operands
    match op.name:
        case _ if isinstance(named, Fault):
            pass
        case "swap":
            return named["ref"], named["value"]
        case "store":
            return named["dst"], named["value"]
        case "copy_smem_to_gmem" if op.params["reduction_op"] is None:
            if named["predicate"] is None:
                return named["dst"], named["src"].buffer
    return None, None

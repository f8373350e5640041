# SPDX-License-Identifier: Apache-2.0
"""SMEM to which nothing is stored, and elements of results that CTAs share."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from pallas_gpu import _jax, types
from pallas_gpu.entry.check import references
from pallas_gpu.entry.check.parts import Stores
from pallas_gpu.primitives.indices.facts import Axis, Fact
from pallas_gpu.program.bodies import kept
from pallas_gpu.program.build import region_of
from pallas_gpu.program.facts import Facts
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

# By these CTAs take turns: what each stores then follows what the others have stored.
_ORDERING = ("atomics", "semaphore")
# What runs its regions in any case.
_ALWAYS = (Kind.SCOPE, Kind.FOR)


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


def common_stores(
    jaxpr: _jax.Jaxpr, stores: Stores, grid: Collection[Any], cluster: Collection[Any]
) -> Iterator[tuple[Any, frozenset[Any], str | None]]:
    """Yields stores of which it is certain that CTAs store to the same elements.

    The index does not depend on the axes, no branch is around them, and nothing orders
    the CTAs.

    Args:
      jaxpr: the traced body of a kernel.
      stores: those to results.
      grid, cluster: the names of axes with several positions.

    Yields:
      The reference to the result; the axes on which the CTAs differ, and from which
      they compute what they store; the line.
    """
    meets = any(_meets(site.op) for site in walk(jaxpr))
    free = {*grid} if meets else {*grid, *cluster}
    for ref, site, access in certain_stores(jaxpr, stores) if free else ():
        starts = stores.starts(access)
        shared = {a for a in free if not any(x.depends_on(a) for x in starts)}
        if shared:
            stored = _stored_values(region_of(jaxpr)).get(site.op, ())
            values = frozenset(axis.of for axis in stored)
            yield ref, values & shared, site.where


def certain_stores(
    jaxpr: _jax.Jaxpr, stores: Stores
) -> Iterator[tuple[Any, Site, Access]]:
    """Yields stores of elements that each CTA executes, unless something orders CTAs.

    Yields:
      The reference to the result, the operation, and where it stores.
    """
    operations = (site.op.operation for site in walk(jaxpr))
    if any(x is not None and x.family in _ORDERING for x in operations):
        return
    for ref, found in stores.found.items():
        for site, access in found or ():
            always = all(around.op.kind in _ALWAYS for around in site.enclosing)
            if always and _stored(site.op)[0] is access and access.owner is None:
                yield ref, site, access


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

# SPDX-License-Identifier: Apache-2.0
"""Results and SMEM to which nothing is stored, and elements that all CTAs store."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from pallas_gpu import _jax, types
from pallas_gpu.entry.check import references
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


def unwritten(jaxpr: _jax.Jaxpr, refs: Collection[Any]) -> list[Any]:
    """Returns those of a body's references that nothing writes, not in a branch."""
    found = references.written(jaxpr)
    return [ref for ref in refs if ref not in found]


def read_unwritten(jaxpr: _jax.Jaxpr) -> Iterator[tuple[str, Any, str | None]]:
    """Yields SMEM arrays that are read and that no operation writes.

    Those of a union are left out: the others in it may be written. With each come its
    name, its type, and the line that reads it first.
    """
    names: dict[Any, str] = {}
    lines: dict[Any, str | None] = {}
    for site in walk(jaxpr):
        if site.op.kind is Kind.SCOPE:
            names.update(_declared(site.op))
        for access in site.op.accesses:
            if access.reads:
                lines.setdefault(site.origin(access.buffer), site.where)
    written = references.writes(jaxpr)
    for array, where in lines.items():
        if array in names and array not in written:
            yield names[array], array.aval, where


def _declared(op: Op) -> Iterator[tuple[Value, str]]:
    """Yields the arrays in SMEM that a scope allocates, and their names."""
    for value, name in zip(op.made, op.params["names"], strict=False):
        in_smem = getattr(value.aval, "memory_space", None) is types.SMEM
        if in_smem and value.aval.storage.overlay is None:
            yield value, name


@dataclasses.dataclass(frozen=True)
class CommonStore:
    """A store of each CTA to the same elements of a result.

    Attributes:
      ref: the reference to the result.
      axes: what is stored is computed from the positions on these.
      where: the line.
    """

    ref: Any
    axes: frozenset[Any]
    where: str | None


def common_stores(jaxpr: _jax.Jaxpr, refs: Collection[Any]) -> Iterator[CommonStore]:
    """Yields stores to references of which it is certain that all CTAs do the same.

    Their index is static, no branch is around them, and nothing orders the CTAs.
    """
    if not any(map(_may_be_common, walk(jaxpr))):
        return
    region = region_of(jaxpr)
    variables = dict(zip(region.inputs, jaxpr.invars, strict=True))
    for op, (ref, axes) in _common(region).items():
        if variables.get(ref) in refs:
            names = frozenset(axis.of for axis in axes)
            yield CommonStore(variables[ref], names, op.where)


def _may_be_common(site: Site) -> bool:
    """Whether it may be one of them: seen without following values."""
    target, _ = _stored(site.op)
    in_gmem = target is not None and target.space is types.GMEM
    return in_gmem and _is_certain(target, [around.op for around in site.enclosing])


def _is_certain(target: Access | None, around: Sequence[Op]) -> bool:
    """Whether a store is certainly executed, and to static indices."""
    always = all(op.kind in _ALWAYS for op in around)
    return target is not None and not target.window.dynamic and always


@kept
def _common(region: Region) -> dict[Op, tuple[Value, frozenset[Axis]]]:
    """Returns the stores that `_Uses` finds, none if CTAs may take turns."""
    uses, before = _Uses(), None
    while uses.contents != before:  # memory may be written after it is read
        before = dict(uses.contents)
        uses.run(region, uses.inputs_of(region))
    return {} if uses.is_ordered else uses.stores


class _Uses(Facts):
    """What a program does with references.

    Attributes:
      stores: those that are certainly executed and overwrite elements with static
        indices, with the reference and what the elements are computed from.
      contents: what the elements of references are computed from.
      is_ordered: whether CTAs may take turns.
    """

    memory_is_constant = True

    def __init__(self) -> None:
        super().__init__()
        self.stores: dict[Op, tuple[Value, frozenset[Axis]]] = {}
        self.contents: dict[Value, frozenset[Axis]] = {}
        self.is_ordered = False

    def results(self, op: Op, operands: Sequence[Fact]) -> Sequence[Fact]:
        refs = filter(None, map(self.origin, op.inputs))
        read = frozenset[Axis]().union(*(self.contents.get(x, ()) for x in refs))
        return [fact.depending_on(read) for fact in super().results(op, operands)]

    def visit(self, op: Op, operands: Sequence[Fact]) -> None:
        if op.operation is not None:
            self.is_ordered |= op.operation.family in _ORDERING
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
        if target is None or not _is_certain(target, self.around):
            return
        ref = self.origin(target.buffer)
        before = self.stores[op][1] if op in self.stores else frozenset()
        if ref is not None:
            self.stores[op] = ref, before | self._sources(stored)


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

# SPDX-License-Identifier: Apache-2.0
"""Atomic operations: one element after the other, in an order that the seed chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pallas_gpu.emulator.engine import ordering
from pallas_gpu.emulator.engine.execution import report
from pallas_gpu.emulator.engine.operations.elements import Elements, known
from pallas_gpu.emulator.engine.ordering import Reach
from pallas_gpu.emulator.engine.orders.choices import Kind, Touch
from pallas_gpu.emulator.engine.reinterpreted import ReinterpretedArray
from pallas_gpu.emulator.engine.waits import TURN, Run
from pallas_gpu.emulator.gpu import cluster
from pallas_gpu.emulator.gpu.accesses.indexed import elements
from pallas_gpu.emulator.gpu.copies.reductions import flushed
from pallas_gpu.emulator.gpu.gmem import GlobalArray
from pallas_gpu.emulator.gpu.machine.cta import Warpgroup
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import atomics

# Old elements, and what the operation combines them with, to new elements.
Combine = Callable[..., np.ndarray]


def _add(old: np.ndarray, value: np.ndarray, in_gmem: bool) -> np.ndarray:
    with np.errstate(all="ignore"):
        if old.dtype != np.float32 or not in_gmem:
            return (old + value).astype(old.dtype)
        # PTX ISA, atom: add.f32 flushes subnormals on global memory.
        return flushed(flushed(old) + flushed(value))


def _extreme(largest: bool) -> Combine:
    def combine(old: np.ndarray, value: np.ndarray, in_gmem: bool) -> np.ndarray:
        if old.dtype.kind in "iu":
            return np.maximum(old, value) if largest else np.minimum(old, value)
        integer = f"i{old.dtype.itemsize}"
        nan = atomics.largest_nan(old.dtype, sign=not largest)
        bits = np.where(np.isnan(value), nan, np.ascontiguousarray(value).view(integer))
        before = np.ascontiguousarray(old).view(integer)
        better = _order(bits) > _order(before)
        if not largest:
            better = _order(bits) < _order(before)
        return np.where(better, bits, before).astype(integer).view(old.dtype)

    return combine


def _order(bits: np.ndarray) -> np.ndarray:
    """Integers in the order of the floats with these bits."""
    return np.where(bits < 0, bits ^ np.iinfo(bits.dtype).max, bits)


COMBINE: dict[str, Combine] = {
    "atomic_add": _add,
    "atomic_max": _extreme(largest=True),
    "atomic_min": _extreme(largest=False),
    "atomic_and": lambda old, value, _: old & value,
    "atomic_or": lambda old, value, _: old | value,
    "atomic_xor": lambda old, value, _: old ^ value,
    "atomic_xchg": lambda old, value, _: value,
}


def _cas(old: np.ndarray, compare: np.ndarray, value: np.ndarray) -> np.ndarray:
    return np.where(_bits(old) == _bits(compare), value, old)


def _bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def _order_others(
    wg: Warpgroup, found: Elements, stored: np.ndarray, reach: Reach, sem: str
) -> None:
    """Lets the issuer know what has been released, and releases what it knows.

    All changes are read-modify-write operations, which continue the release sequences
    of those before them (PTX ISA, Memory Consistency Model, Observation).

    Args:
      stored: which of them it has written.
      reach: whom its scope includes.
      sem: its semantics.
    """
    released, places = found.memory.released, found.flat[:, 0]
    if atomics.acquires(sem):
        seen = {
            id(known_): known_
            for place in places.tolist()
            for other, known_ in released.get(place, {}).items()
            if reach.includes(other)
        }
        for known_ in seen.values():
            ordering.join(wg.clock, known_)
    if not atomics.releases(sem):
        return
    now = wg.release()
    for place in places[stored].tolist():
        by_reach = released.setdefault(place, {})
        earlier = by_reach.get(reach)
        by_reach[reach] = now if earlier is None else ordering.joined(earlier, now)


def _make(name: str) -> Callable[..., Any]:
    def rule(
        wg: Warpgroup,
        operands: dict[str, Any],
        used: Any,
        sem: str,
        scope: str | None,
        **params: Any,
    ) -> Run:
        # Who comes first is a choice of the schedule; a loop may wait for others.
        yield TURN
        found = elements(wg, operands["ref"], operands, params, "updated")
        names = ("compare", "value") if name == "atomic_cas" else ("value",)
        values = [
            np.broadcast_to(known(operands[n], found.active), found.shape)[found.active]
            for n in names
        ]
        if found.missing() is not None:
            report(found.origin(wg.where()).error())
        if scope is None and found.memory.fence is ordering.Fence.GMEM:
            scope = "gpu"
        reach = wg.reach(scope)
        for region in found.regions():
            cluster.access(wg, region, writes=True, atomic=True, reach=reach)
        # Updates of one kind commute where nobody sees what was there before; of
        # floating-point sums, what the order changes is rounding.
        commutes = name not in ("atomic_xchg", "atomic_cas") and not any(used)
        _report(wg, name, found, commutes and not atomics.acquires(sem))
        in_gmem = isinstance(found.memory, GlobalArray)

        def combine(old: np.ndarray, *others: np.ndarray) -> np.ndarray:
            if name == "atomic_cas":
                return _cas(old, *others)
            return COMBINE[name](old, *others, in_gmem)

        old = _update(wg, found, values, combine, commutes)
        stored = np.ones(len(old), np.bool_)
        if name == "atomic_cas":
            stored = _bits(old) == _bits(values[0])
        _order_others(wg, found, stored, reach, sem)
        result = found.spread(old, None)
        return result[()] if result.ndim == 0 else result

    return rule


def _report(wg: Warpgroup, name: str, found: Elements, commutes: bool) -> None:
    """Reports elements that are updated, if anybody reads that."""
    if wg.execution.touches is None:
        return
    memory = found.memory
    part = frozenset(found.flat.reshape(-1).tolist())
    kinds = list(atomics.PRIMITIVES)
    wg.execution.touch(
        Touch(
            ("atomic", memory.identity),
            Kind.ADD if commutes else Kind.WRITE,
            epoch=kinds.index(name),
            part=None if isinstance(memory, ReinterpretedArray) else part,
        )
    )


def _update(
    wg: Warpgroup,
    found: Elements,
    values: list[np.ndarray],
    combine: Combine,
    commutes: bool,
) -> np.ndarray:
    """Updates the elements and returns the old ones, [accesses]."""
    old = found.load()
    several = found.several()
    single = np.flatnonzero(~several)
    new = combine(old, *values)
    found.some(single).store(new[single])
    # Elements that are named repeatedly take one value after the other.
    order = np.flatnonzero(several).tolist()
    if not commutes or wg.execution.touches is None:
        wg.execution.choices.shuffle(order)
    for i in order:
        one = found.some(np.array([i]))
        old[i] = one.load()[0]
        one.store(combine(old[i : i + 1], *(v[i : i + 1] for v in values)))
    return old


for _name, _primitive in atomics.PRIMITIVES.items():
    registry.register(_primitive, registry.RuleKind.EMULATE)(_make(_name))

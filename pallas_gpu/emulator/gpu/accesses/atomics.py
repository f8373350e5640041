# SPDX-License-Identifier: Apache-2.0
"""Atomic operations: one element after the other, in an order that the seed chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pallas_gpu.emulator.gpu import cluster
from pallas_gpu.emulator.gpu.accesses.elements import Elements, known
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


_COMBINE: dict[str, Combine] = {
    "atomic_add": _add,
    "atomic_max": _extreme(largest=True),
    "atomic_min": _extreme(largest=False),
    "atomic_and": lambda old, value, _: old & value,
    "atomic_or": lambda old, value, _: old | value,
    "atomic_xor": lambda old, value, _: old ^ value,
    "atomic_xchg": lambda old, value, _: value,
}


def _cas(old: np.ndarray, compare: np.ndarray, value: np.ndarray) -> np.ndarray:
    integer = f"u{old.dtype.itemsize}"
    same = [np.ascontiguousarray(x).view(integer) for x in (old, compare)]
    return np.where(same[0] == same[1], value, old)


def _make(name: str) -> Callable[..., Any]:
    def rule(
        wg: Warpgroup, operands: dict[str, Any], used: Any, **params: Any
    ) -> np.ndarray:
        found = elements(wg, operands["ref"], operands, params, "updated")
        names = ("compare", "value") if name == "atomic_cas" else ("value",)
        values = [
            np.broadcast_to(known(operands[n], found.active), found.shape)[found.active]
            for n in names
        ]
        if found.missing() is not None:
            raise found.origin(wg.where()).error()
        for region in found.regions():
            cluster.access(wg, region, writes=True, atomic=True)
        in_gmem = isinstance(found.memory, GlobalArray)

        def combine(old: np.ndarray, *others: np.ndarray) -> np.ndarray:
            if name == "atomic_cas":
                return _cas(old, *others)
            return _COMBINE[name](old, *others, in_gmem)

        old = _update(wg, found, values, combine)
        result = found.spread(old, None)
        return result[()] if result.ndim == 0 else result

    return rule


def _update(
    wg: Warpgroup, found: Elements, values: list[np.ndarray], combine: Combine
) -> np.ndarray:
    """Updates the elements and returns the old ones, [accesses]."""
    old = found.load()
    several = found.several()
    single = np.flatnonzero(~several)
    new = combine(old, *values)
    found.some(single).store(new[single])
    # Elements that are named repeatedly take one value after the other.
    order = np.flatnonzero(several).tolist()
    wg.execution.rng.shuffle(order)
    for i in order:
        one = found.some(np.array([i]))
        old[i] = one.load()[0]
        one.store(combine(old[i : i + 1], *(v[i : i + 1] for v in values)))
    return old


for _name, _primitive in atomics.PRIMITIVES.items():
    registry.register(_primitive, registry.RuleKind.EMULATE)(_make(_name))

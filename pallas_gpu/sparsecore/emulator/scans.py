# SPDX-License-Identifier: Apache-2.0
"""Operations across the lanes of a register: scans, counts, sorts, masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pallas_gpu.emulator.engine import poison
from pallas_gpu.emulator.engine.operations.elements import known
from pallas_gpu.emulator.engine.poison import Origin, Poisoned
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.sparsecore.emulator.cores import Subcore
from pallas_gpu.sparsecore.primitives import scans
from pallas_gpu.sparsecore.types import MACHINE

_EMULATE = registry.RuleKind.EMULATE
_SCANS: dict[str, np.ufunc] = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def _evaluated(function: Callable[..., Any], *operands: Any) -> Any:
    """Returns a value of operands that may be poisoned."""
    if any(isinstance(x, Poisoned) for x in operands):
        return poison.apply(function, operands)
    return function(*operands)


@registry.register(scans.masked_scan_p, _EMULATE, MACHINE)
def _masked_scan(
    thread: Subcore, operands: list[Any], kind: str, **_: Any
) -> list[Any]:
    x, *masks = operands
    mask = np.asarray(known(masks[0])) if masks else None

    def scan(x: Any) -> Any:
        x = np.asarray(x)
        if mask is not None:
            x = np.where(mask, x, _neutral(kind, x.dtype))
        return _SCANS[kind].accumulate(x).astype(x.dtype)

    result = _evaluated(scan, x)
    if mask is None or mask[0]:
        return [result]
    before = np.cumsum(mask) == 0
    origin = Origin(
        f"the scan ({kind}) has no value in the lanes before the first true one",
        f"lane 0, the first true lane is {int(before.sum())}",
        "select the other lanes with jnp.where, or pass a mask whose lane 0 is true",
        thread.where(),
    )
    return [_without(result, before, origin)]


def _neutral(kind: str, dtype: Any) -> Any:
    if kind == "sum":
        return dtype.type(0)
    low = kind == "max"
    if dtype.kind == "f":
        return dtype.type(-np.inf if low else np.inf)
    info = np.iinfo(dtype)
    return dtype.type(info.min if low else info.max)


@registry.register(scans.scan_count_p, _EMULATE, MACHINE)
def _scan_count(_: Subcore, operands: list[Any], **__: Any) -> list[Any]:
    mask = np.asarray(known(operands[1]))
    x = np.asarray(known(operands[0], mask))
    same = (x[:, None] == x[None, :]) & mask[:, None] & mask[None, :]
    upto = np.tri(x.size, dtype=np.bool_)
    counts = (same & upto).sum(axis=1).astype(np.int32)
    last = mask & ~(same & ~upto).any(axis=1)
    return [counts, last]


@registry.register(scans.mask_reduce_p, _EMULATE, MACHINE)
def _mask_reduce(
    _: Subcore, operands: list[Any], kind: str, reduce: int, **__: Any
) -> list[Any]:
    def count(mask: Any) -> Any:
        mask = np.asarray(mask)
        first = int(np.argmax(mask)) if mask.any() else mask.size
        number = int(mask.sum()) if kind == "population_count" else first
        return np.full(mask.size // reduce, number, np.int32)

    return [_evaluated(count, operands[0])]


@registry.register(scans.sort_key_val_p, _EMULATE, MACHINE)
def _sort_key_val(
    thread: Subcore, operands: list[Any], descending: bool, **_: Any
) -> list[Any]:
    keys, values, *masks = operands
    mask = np.asarray(known(masks[0])) if masks else None
    keys = np.asarray(known(keys, mask))
    order = _order(keys, mask, descending)
    moved = _evaluated(lambda x: np.asarray(x)[order], values)
    if mask is None or mask.all():
        return [keys[order], moved, *([] if mask is None else [mask])]
    after = ~mask[order]
    origin = Origin(
        "sort_key_val: a lane that the mask excludes is used",
        f"lane {int(mask.sum())} of the result: those behind the valid ones are in no "
        "defined order",
        "select the valid lanes with jnp.where and the mask that sort_key_val returns",
        thread.where(),
    )
    results = [_without(keys[order], after, origin), _without(moved, after, origin)]
    return [*results, ~after]


def _without(value: Any, mask: np.ndarray, origin: Origin) -> Poisoned:
    """Returns a value whose lanes in a mask have none."""
    if isinstance(value, Poisoned):
        return Poisoned(value.value, value.mask | mask, value.origin)
    return Poisoned(value, mask, origin)


def _order(keys: np.ndarray, mask: np.ndarray | None, descending: bool) -> np.ndarray:
    """Returns the lanes in order: valid ones first, equal keys as they were."""
    if descending:
        # Of the reversed lanes, so that equal keys keep their order.
        order = np.argsort(keys[::-1], kind="stable")[::-1]
        order = keys.size - 1 - order
    else:
        order = np.argsort(keys, kind="stable")
    return order if mask is None else order[np.argsort(~mask[order], kind="stable")]

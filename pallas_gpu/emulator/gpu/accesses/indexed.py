# SPDX-License-Identifier: Apache-2.0
"""Accesses with an index for each element: index arrays, strides, reshapes, masks."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_gpu.emulator.engine.execution import report
from pallas_gpu.emulator.engine.operations.elements import (
    Elements,
    known,
    require_one_value,
)
from pallas_gpu.emulator.engine.poison import Origin, Poisoned, poison
from pallas_gpu.emulator.gpu import cluster
from pallas_gpu.emulator.gpu.machine.cta import Warpgroup
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import indexed

_EMULATE = registry.RuleKind.EMULATE
# How elements are masked, by what an access does.
_MASKED = {
    "read": "plgpu.load(ref, index, mask=...)",
    "written": "plgpu.store(ref, index, x, mask=...)",
    "updated": "pass mask=...",
}


def elements(
    wg: Warpgroup,
    region: Any,
    operands: dict[str, Any],
    params: dict[str, Any],
    verb: str,
    lenient: bool = False,
) -> Elements:
    """Returns the elements that an equation accesses.

    Raises:
      OutOfBoundsError: an index that is not masked is out of bounds, or the cluster has
        no such CTA.
      UninitializedReadError: the mask, or an index where it holds, is poison.
    """
    region = cluster.elsewhere(wg, region, params["cta_axes"], operands["cta"])
    shape = params["shape"]
    mask = operands["mask"]
    mask = None if mask is None else np.broadcast_to(known(mask), shape)
    indices = [known(index, mask) for index in operands["indices"]]
    return Elements(
        region,
        params["view_shape"],
        params["dtype"],
        indices,
        shape,
        mask,
        verb,
        _MASKED[verb],
        lenient,
    )


@registry.register(indexed.load_indexed_p, _EMULATE)
def _load(wg: Warpgroup, operands: dict[str, Any], **params: Any) -> Any:
    lenient = wg.execution.lenient_reads
    found = elements(wg, operands["src"], operands, params, "read", lenient)
    for region in found.regions():
        cluster.access(wg, region, writes=False)
    missing, lost = found.missing(), found.lost if lenient else None
    other = operands["other"]
    masked = None
    if isinstance(other, Poisoned):
        masked = np.broadcast_to(other.mask, found.shape) & ~found.active
        other, origin = other.value, other.origin
    result = found.spread(found.load(), other)
    if lost is not None and lost.any():
        result[lost] = poison(found.dtype)
    empty = np.zeros(found.shape, np.bool_) if masked is None else masked
    if missing is not None:
        empty[found.active] = missing
        origin = found.origin(wg.where())
    if lost is not None and lost.any():
        empty |= lost
        origin = _outside(found, wg.where())
    value = result[()] if result.ndim == 0 else result
    return Poisoned(value, empty, origin) if empty.any() else value


def _outside(found: Elements, where: str | None) -> Origin:
    element = np.argwhere(found.lost)[0].tolist()
    return Origin(
        f"{found.memory.name} is read out of bounds",
        f"element {element} of the access, which has no value",
        "check the index, or mask the elements outside",
        where,
    )


@registry.register(indexed.store_indexed_p, _EMULATE)
def _store(wg: Warpgroup, operands: dict[str, Any], **params: Any) -> None:
    found = elements(wg, operands["dst"], operands, params, "written")
    value = operands["value"]
    poisoned = isinstance(value, Poisoned)
    mask = np.broadcast_to(value.mask, found.shape) & found.active if poisoned else None
    if mask is not None and mask.any() and not found.memory.admits_poison:
        report(value.origin.error())
        mask = None
    values = np.broadcast_to(value.value if poisoned else value, found.shape)
    values = values[found.active]
    require_one_value(found, values)
    proposal = found.stored(values)
    for region in found.regions():
        compared = None if poisoned else proposal.of(region)
        cluster.access(wg, region, writes=True, value=compared)
    found.store(values)
    if mask is not None and mask.any():
        # By elements: the parts of a window may be poisoned or not.
        for region in found.regions():
            part = np.zeros(found.memory.shape, np.bool_)
            part.reshape(-1)[found.flat[mask[found.active]]] = True
            found.memory.mark_poisoned(region, region.view(part), value.origin)

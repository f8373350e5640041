# SPDX-License-Identifier: Apache-2.0
"""Loads and stores in VMEM with a position, or a mask, for each lane; prints."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_gpu.emulator.engine import ordering
from pallas_gpu.emulator.engine.execution import report
from pallas_gpu.emulator.engine.memory import Region
from pallas_gpu.emulator.engine.operations.elements import Elements, known
from pallas_gpu.emulator.engine.poison import Origin, Poisoned
from pallas_gpu.emulator.gpu.debug import print_line
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.sparsecore.emulator.cores import Subcore
from pallas_gpu.sparsecore.primitives import gathers
from pallas_gpu.sparsecore.primitives.debug import print_reference_p
from pallas_gpu.sparsecore.types import MACHINE
from pallas_gpu.types import formats

_EMULATE = registry.RuleKind.EMULATE


@registry.register(gathers.load_gather_p, _EMULATE, MACHINE)
def _load_gather(thread: Subcore, operands: dict[str, Any], **_: Any) -> Any:
    found = _at_indices(operands, "read", thread.execution.lenient_reads)
    return _loaded(thread, found, "load_gather")


@registry.register(gathers.store_scatter_p, _EMULATE, MACHINE)
def _store_scatter(
    thread: Subcore, operands: dict[str, Any], add: bool, **_: Any
) -> None:
    found = _at_indices(operands, "updated" if add else "written")
    _store(thread, found, operands["value"], add)


@registry.register(gathers.load_expanded_p, _EMULATE, MACHINE)
def _load_expanded(thread: Subcore, operands: dict[str, Any], **_: Any) -> Any:
    return _loaded(thread, _of_mask(operands, "read"), "load_expanded")


@registry.register(gathers.store_compressed_p, _EMULATE, MACHINE)
def _store_compressed(
    thread: Subcore, operands: dict[str, Any], add: bool, **_: Any
) -> None:
    found = _of_mask(operands, "updated" if add else "written")
    _store(thread, found, operands["value"], add)


@registry.register(print_reference_p, _EMULATE, MACHINE)
def _print_reference(thread: Subcore, operands: Any, fmt: str, **_: Any) -> None:
    print_line(formats.parse(fmt), [known(thread.read(operands["ref"]))])


def _at_indices(operands: dict[str, Any], verb: str, lenient: bool = False) -> Elements:
    """Returns the elements that indices name."""
    region, indices, mask = (operands[k] for k in ("ref", "indices", "mask"))
    shape = np.shape(getattr(indices[0], "value", indices[0]))
    mask = None if mask is None else known(mask)
    chosen = [known(index, mask) for index in indices]
    return Elements(
        region, None, region.dtype, chosen, shape, mask, verb, lenient=lenient
    )


def _of_mask(operands: dict[str, Any], verb: str) -> Elements:
    """Returns as many elements as a mask has true lanes, one after the other."""
    region, mask = operands["ref"], np.asarray(known(operands["mask"]))
    position = np.cumsum(mask) - 1
    return Elements(
        region, None, region.dtype, [position], mask.shape, mask, verb,
        "keep the mask's true lanes in bounds",
    )  # fmt: skip


def _loaded(thread: Subcore, found: Elements, who: str) -> Any:
    """Returns the elements; those of other lanes are poison."""
    _access(thread, found, writes=False)
    missing = found.missing()
    value = found.spread(found.load(), None)
    empty = ~found.active
    if missing is not None:
        empty[found.active] = missing
        return Poisoned(value, empty, found.origin(thread.where()))
    if not empty.any():
        return value
    lane = int(np.argmax(empty))
    origin = Origin(
        f"{who}: a lane that is not loaded is used",
        f"lane {lane}, where the mask is false",
        "select the lanes with jnp.where(mask, x, 0)",
        thread.where(),
    )
    return Poisoned(value, empty, origin)


def _store(thread: Subcore, found: Elements, value: Any, add: bool) -> None:
    poisoned = None
    if isinstance(value, Poisoned):
        poisoned = np.broadcast_to(value.mask, found.shape)[found.active]
        origin, value = value.origin, value.value
    values = np.broadcast_to(value, found.shape)[found.active]
    if add and poisoned is not None and poisoned.any():
        report(origin.error())
    _access(thread, found, writes=True)
    if not add:
        # Of lanes with one position the highest remains, as NumPy has it.
        found.store(values)
        if poisoned is not None and poisoned.any():
            _mark(found, poisoned, origin)
        return
    if found.missing() is not None:
        report(found.origin(thread.where()).error())
    with np.errstate(all="ignore"):
        np.add.at(found.memory.data.reshape(-1), found.flat[:, 0], values)


def _mark(found: Elements, poisoned: np.ndarray, origin: Origin) -> None:
    mask = np.zeros(found.memory.shape, np.bool_)
    mask.reshape(-1)[found.flat[poisoned]] = True
    for region in found.some(poisoned).regions():
        found.memory.mark_poisoned(region, region.view(mask), origin)


def _access(thread: Subcore, found: Elements, writes: bool) -> None:
    """Compares the elements with other accesses, all at once where none conflicts."""
    whole = Region(found.memory, found.region.place)
    new = ordering.Access(
        whole.box(), writes, thread.actor, thread.clock[thread.actor], False, ""
    )
    if not thread.must_record(found.memory, writes) and not (
        found.memory.history.may_conflict(new, thread.clock, True)
    ):
        return
    for region in found.regions():
        thread.access(region, writes=writes)

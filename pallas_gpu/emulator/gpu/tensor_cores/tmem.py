# SPDX-License-Identifier: Apache-2.0
"""Tensor memory: arrays, loads and stores of warpgroups, and their waits.

Every access to TMEM is asynchronous work: it belongs to an actor of its kind, and who
may access the columns next must know its time. A wait tells the warpgroup itself; other
threads learn it only through barriers with `orders_tensor_core`, whose fences order
tcgen05 instructions (PTX ISA, tcgen05 "Memory consistency"). So a missing wait, commit
or fence is an error in every run.

A load returns its values at once, as its registers are waited for where they are used.
A store is in flight until `commit_tmem`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pallas_gpu.emulator.engine import ordering
from pallas_gpu.emulator.engine.memory import Memory, Region
from pallas_gpu.emulator.engine.tables import Key
from pallas_gpu.emulator.engine.threads import Thread
from pallas_gpu.emulator.engine.waits import Run, Wait
from pallas_gpu.emulator.gpu.machine.cta import Warpgroup
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.tensor_cores import tmem

_EMULATE = registry.RuleKind.EMULATE
_ORDERED = (
    "; another warpgroup also waits for a barrier with orders_tensor_core on which "
    "this one arrives"
)
WAIT_LOAD = "call wait_load_tmem() in the warpgroup that has loaded" + _ORDERED
_COMMIT = "call commit_tmem() in the warpgroup that has stored" + _ORDERED


class TensorArray(Memory):
    """An array in TMEM.

    Attributes:
      place: (visit of a scope, position in it), which identifies the same array in the
        other CTA of a pair.
    """

    __slots__ = ("place",)

    def __init__(
        self, name: str, data: np.ndarray, written: np.ndarray | None, place: Any
    ):
        super().__init__(name, data, written)
        self.admits_poison = True
        self.place = place


class Transfers:
    """The loads, or the stores, of one warpgroup.

    Attributes:
      actor: its number in clocks; its time is a number of waits.
      waits: how often the warpgroup has waited for them.
      pending: number of those in flight.
    """

    def __init__(self, thread: Thread):
        self.actor = thread.execution.actors.tensor_core()
        self.waits = 0
        self.pending = 0

    @property
    def time(self) -> tuple[int, int]:
        """The actor, and the time of a transfer that is issued now."""
        return self.actor, self.waits + 1

    def awaited(self, thread: Thread) -> None:
        """Records that the thread has waited for all of them."""
        self.waits += 1
        ordering.join(thread.clock, {self.actor: self.waits})


_LOADS: Key[Thread, Transfers] = Key("loads from TMEM", Transfers)
_STORES: Key[Thread, Transfers] = Key("stores to TMEM", Transfers)


@dataclasses.dataclass(slots=True)
class Store:
    """A store that has been issued."""

    region: Region
    value: Any
    stores: Transfers

    def advance(self) -> bool:
        """Writes the elements."""
        self.region.store(self.value)
        self.stores.pending -= 1
        return True


def is_in_tmem(region: Region) -> bool:
    """True for a part of an array in TMEM."""
    return isinstance(region.memory, TensorArray)


@registry.register(tmem.async_load_tmem_p, _EMULATE)
def _async_load(wg: Warpgroup, operands: dict[str, Any], **_: Any) -> Any:
    return _load(wg, operands["src"])


def _load(wg: Warpgroup, region: Region) -> Any:
    region.require_inside("loaded")
    loads = _LOADS.of(wg)
    wg.access(region, writes=False, what="the load", by=loads.time, hint=WAIT_LOAD)
    return wg.value_of(region)


@registry.register(tmem.wait_load_tmem_p, _EMULATE)
def _wait_load(wg: Warpgroup, *_: Any, **__: Any) -> None:
    _LOADS.of(wg).awaited(wg)


@registry.register(tmem.async_store_tmem_p, _EMULATE)
def _async_store(wg: Warpgroup, operands: dict[str, Any], **_: Any) -> None:
    _store(wg, operands["ref"], operands["value"])


def _store(wg: Warpgroup, region: Region, value: Any) -> None:
    region.require_inside("stored to")
    stores = _STORES.of(wg)
    wg.access(region, writes=True, what="the store", by=stores.time, hint=_COMMIT)
    stores.pending += 1
    wg.group.in_flight.submit(Store(region, value, stores))


@registry.register(tmem.commit_tmem_p, _EMULATE)
def _commit(wg: Warpgroup, *_: Any, **__: Any) -> Run:
    return _wait_stores(wg)


def _wait_stores(wg: Warpgroup) -> Run:
    stores = _STORES.of(wg)
    if stores.pending:
        yield Wait(
            lambda: not stores.pending,
            "its stores to TMEM",
            lambda: f"{stores.pending} of them are in flight",
        )
    stores.awaited(wg)


def read(wg: Warpgroup, region: Region) -> Any:
    """Loads elements and waits: an index expression."""
    value = _load(wg, region)
    _LOADS.of(wg).awaited(wg)
    return value


def write(wg: Warpgroup, region: Region, value: Any) -> Run:
    """Stores elements and waits: an index expression."""
    _store(wg, region, value)
    yield from _wait_stores(wg)

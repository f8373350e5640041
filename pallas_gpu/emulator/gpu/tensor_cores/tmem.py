# SPDX-License-Identifier: Apache-2.0
"""Tensor memory: arrays, loads and stores of warpgroups, and their waits.

Every access to TMEM is asynchronous work: it belongs to an actor of its kind, and who
may access the columns next must know its time, unless the two are in order (`order`). A
wait tells the warpgroup itself; other threads learn it only through barriers with
`orders_tensor_core`, whose fences order tcgen05 instructions (PTX ISA, tcgen05 "Memory
consistency"). So a missing wait, commit or fence is an error in every run.

A load returns its values at once, as its registers are waited for where they are used.
A store is in flight until `commit_tmem`, or until a load of the warpgroup, which comes
after it.
"""

from __future__ import annotations

import collections
from typing import Any

import numpy as np

from pallas_gpu.emulator.engine import in_flight, ordering
from pallas_gpu.emulator.engine.memory import Memory, Region
from pallas_gpu.emulator.engine.tables import Key
from pallas_gpu.emulator.engine.threads import Thread
from pallas_gpu.emulator.engine.waits import Run, Wait
from pallas_gpu.emulator.gpu.machine.cta import Warpgroup
from pallas_gpu.emulator.gpu.tensor_cores.order import Issue, Operation
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

    unwritten_hint = (
        "store to it and call commit_tmem(), or wait for a barrier on which "
        "tcgen05_commit_arrive arrives after the product or the copy that writes it"
    )

    def __init__(
        self, name: str, data: np.ndarray, written: np.ndarray | None, place: Any
    ):
        super().__init__(name, data, written)
        self.admits_poison = True
        self.place = place

    def read(self, thread: Any, region: Region) -> Any:
        """Loads elements and waits."""
        value = _load(thread, region)
        _LOADS.of(thread).awaited(thread)
        return value

    def write(self, thread: Any, region: Region, value: Any) -> Run:
        """Stores elements and waits."""
        _store(thread, region, value)
        yield from _wait_stores(thread)


class Transfers:
    """The loads, or the stores, of one warpgroup.

    Attributes:
      actor: its number in clocks; its time is a number of waits.
      waits: how often the warpgroup has waited for them.
      queue: the stores in flight.
    """

    def __init__(self, thread: Thread):
        self.actor = thread.execution.actors.tensor_core()
        self.waits = 0
        self.queue: collections.deque[in_flight.InOrder] = collections.deque()
        self._thread = thread

    def issue(self, operation: Operation, region: Region) -> Issue:
        """Returns a transfer that is issued now."""
        issuer, time = self._thread.actor, self.waits + 1
        return Issue(operation, region.box(), issuer, 0, self.actor, time)

    def perform(self) -> None:
        """Performs the stores in flight."""
        if self.queue:
            self.queue[-1].advance()

    def awaited(self, thread: Thread) -> None:
        """Records that the thread has waited for all of them."""
        self.waits += 1
        ordering.join(thread.clock, {self.actor: self.waits})


_LOADS: Key[Thread, Transfers] = Key("loads from TMEM", Transfers)
_STORES: Key[Thread, Transfers] = Key("stores to TMEM", Transfers)


class Store(in_flight.InOrder):
    """A store that has been issued."""

    def __init__(
        self, queue: collections.deque[in_flight.InOrder], region: Region, value: Any
    ):
        super().__init__(queue)
        self._region, self._value = region, value

    def perform(self) -> None:
        """Writes the elements."""
        self._region.store(self._value)


def is_in_tmem(region: Region) -> bool:
    """True for a part of an array in TMEM."""
    return isinstance(region.memory, TensorArray)


@registry.register(tmem.async_load_tmem_p, _EMULATE)
def _async_load(wg: Warpgroup, operands: dict[str, Any], **_: Any) -> Any:
    return _load(wg, operands["src"])


def _load(wg: Warpgroup, region: Region) -> Any:
    region.require_inside("loaded")
    issue = _LOADS.of(wg).issue(Operation.LOAD, region)
    by = (issue.actor, issue.time)
    what = "the load"
    wg.access(region, writes=False, what=what, by=by, hint=WAIT_LOAD, issue=issue)
    _STORES.of(wg).perform()
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
    issue = stores.issue(Operation.STORE, region)
    by = (issue.actor, issue.time)
    what = "the store"
    wg.access(region, writes=True, what=what, by=by, hint=_COMMIT, issue=issue)
    store = Store(stores.queue, region, value)
    stores.queue.append(store)
    wg.group.in_flight.submit(store)


@registry.register(tmem.commit_tmem_p, _EMULATE)
def _commit(wg: Warpgroup, *_: Any, **__: Any) -> Run:
    return _wait_stores(wg)


def _wait_stores(wg: Warpgroup) -> Run:
    stores = _STORES.of(wg)
    if stores.queue:
        yield Wait(
            lambda: not stores.queue,
            "its stores to TMEM",
            lambda: f"{len(stores.queue)} of them are in flight",
        )
    stores.awaited(wg)

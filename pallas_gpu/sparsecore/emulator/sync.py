# SPDX-License-Identifier: Apache-2.0
"""Signals and waits, the barrier of a core, fetch-and-add."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_gpu.emulator.engine import ordering
from pallas_gpu.emulator.engine.memory import Region
from pallas_gpu.emulator.engine.orders.choices import Kind, Touch
from pallas_gpu.emulator.engine.tables import Key
from pallas_gpu.emulator.engine.waits import TURN, Run
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.sparsecore.emulator.cores import Subcore
from pallas_gpu.sparsecore.primitives import sync
from pallas_gpu.sparsecore.types import MACHINE

_EMULATE = registry.RuleKind.EMULATE


@registry.register(sync.semaphore_signal_p, _EMULATE, MACHINE)
def _signal(thread: Subcore, operands: dict[str, Any], **_: Any) -> Run:
    # Who signals first is a choice of the schedule.
    yield TURN
    region, inc = operands["semaphore"], int(operands["inc"])
    array, core, subcore = region.memory, operands["core"], operands["subcore"]
    if core is not None or subcore is not None:
        array = thread.of_other(array, core, subcore)
    one = array.one(Region(array, region.place))
    thread.execution.touch(
        Touch(one.place, Kind.ADD if inc > 0 else Kind.WRITE, delta=inc)
    )
    one.signal(thread.release(), inc, thread.location)


@registry.register(sync.semaphore_wait_p, _EMULATE, MACHINE)
def _wait(thread: Subcore, operands: dict[str, Any], **_: Any) -> Run:
    yield TURN
    region = operands["semaphore"]
    one = region.memory.one(region)
    yield from one.wait(thread, int(operands["value"]), True)


@registry.register(sync.semaphore_read_p, _EMULATE, MACHINE)
def _read(thread: Subcore, operands: dict[str, Any], **_: Any) -> Run:
    yield TURN
    region = operands["semaphore"]
    one = region.memory.one(region)
    thread.execution.touch(Touch(one.place, Kind.READ))
    one.acquire(thread)
    return np.int32(one.value)


@registry.register(sync.subcore_barrier_p, _EMULATE, MACHINE)
def _barrier(thread: Subcore, *_: Any, **__: Any) -> Run:
    return thread.core.barrier.wait(thread)


# For each word, what those know that have added to it: each one knows what the ones
# before it did.
_CHAINS: Key[Any, dict[Any, ordering.Clock]] = Key("fetch_and_add", lambda core: {})


@registry.register(sync.fetch_and_add_p, _EMULATE, MACHINE)
def _fetch_and_add(thread: Subcore, operands: dict[str, Any], **_: Any) -> Run:
    yield TURN
    region, value = operands["ref"], int(operands["value"])
    memory = thread.of_other(region.memory, None, operands["subcore"])
    word = Region(memory, region.place)
    word.require_existing("updated")
    place = (memory.place, word.box())
    thread.execution.touch(Touch(place, Kind.WRITE))
    chain = _CHAINS.of(thread.core).setdefault(place, {})
    ordering.join(thread.clock, chain)
    thread.access(word, writes=True, atomic=True)
    word.require_written()
    old = np.int32(word.peek()[()])
    with np.errstate(over="ignore"):
        word.store(old + np.int32(value))
    ordering.join(chain, thread.release())
    return old

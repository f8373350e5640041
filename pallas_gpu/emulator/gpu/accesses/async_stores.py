# SPDX-License-Identifier: Apache-2.0
"""Asynchronous stores of threads to the SMEM of other CTAs.

PTX ISA, st.async: the bytes that have arrived are counted on an mbarrier of the other
CTA. The stores use the generic proxy, as other stores of threads.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pallas_gpu.emulator.engine import ordering
from pallas_gpu.emulator.engine.execution import report
from pallas_gpu.emulator.engine.operations.elements import Elements, require_one_value
from pallas_gpu.emulator.engine.poison import Poisoned
from pallas_gpu.emulator.gpu import cluster
from pallas_gpu.emulator.gpu.accesses.atomics import COMBINE
from pallas_gpu.emulator.gpu.accesses.indexed import elements
from pallas_gpu.emulator.gpu.machine.cta import Warpgroup
from pallas_gpu.emulator.gpu.mbarrier import Barrier
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.cluster import async_store_smem_p


@dataclasses.dataclass(slots=True)
class Store:
    """An array on its way: first one half of its elements arrives, then the other."""

    found: Elements
    values: np.ndarray
    lost: tuple[np.ndarray, Any] | None
    barrier: Barrier
    atomic: str | None
    done: int = 0

    def advance(self) -> bool:
        """Stores some elements and completes their bytes."""
        total = len(self.values)
        last = total if self.done else (total + 1) // 2
        some = np.arange(self.done, last)
        part, values = self.found.some(some), self.values[some]
        if self.atomic is not None:
            values = COMBINE[f"atomic_{self.atomic}"](part.load(), values, False)
        part.store(values)
        if self.lost is not None:
            mask, origin = self.lost
            for region in part.regions():
                lost = np.zeros(part.memory.shape, np.bool_)
                lost.reshape(-1)[part.flat[mask[some]]] = True
                part.memory.mark_poisoned(region, region.view(lost), origin)
        self.done = last
        self.barrier.complete_bytes(len(some) * self.found.dtype.itemsize)
        return self.done == total


@registry.register(async_store_smem_p, registry.RuleKind.EMULATE)
def _async_store(
    wg: Warpgroup,
    operands: dict[str, Any],
    atomic: str | None,
    sem: str,
    **params: Any,
) -> None:
    found = elements(wg, operands["ref"], operands, params, "written")
    value, lost = operands["value"], None
    if isinstance(value, Poisoned):
        mask = np.broadcast_to(value.mask, found.shape)[found.active]
        lost, value = (mask, value.origin), value.value
    values = np.broadcast_to(value, found.shape)[found.active]
    if atomic is None:
        require_one_value(found, values)
    elif lost is not None:
        report(lost[1].error())
        lost = None
    elif found.missing() is not None:
        report(found.origin(wg.where()).error())
    barrier = _barrier_in(found.memory.owner, operands["barrier"])
    if barrier.stores is None:
        barrier.stores = wg.execution.actors.thread()
    for region in found.regions():
        wg.access(
            region,
            writes=True,
            what=f"the asynchronous store by {wg.name}",
            by=(barrier.stores, barrier.phase + 1),
            hint=cluster.WAIT,
            atomic=atomic is not None,
            generic=True,
        )
    size = len(values) * found.dtype.itemsize
    # The stores themselves are known to whoever waits for the phase in any case, and so
    # is that the issuer has come so far.
    clock = wg.release()
    known = clock if sem == "release" else ordering.executed(clock)
    barrier.arrive(known, wg.location, size)
    wg.group.in_flight.submit(Store(found, values, lost, barrier, atomic))


def _barrier_in(cta: Any, operand: Any) -> Barrier:
    """Returns the barrier of an operand, in another CTA."""
    return operand.memory.same_in(cta).one(operand)

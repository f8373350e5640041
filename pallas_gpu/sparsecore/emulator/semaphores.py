# SPDX-License-Identifier: Apache-2.0
"""Semaphores of subcores: counters of signals, and of what copies have moved.

A copy adds its size when it is complete, so a wait for less than what is in flight may
be satisfied by any of the copies: it orders none of them. Once the waits have
subtracted all that was issued, all of it is complete.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from pallas_gpu import errors
from pallas_gpu.emulator.engine import ordering
from pallas_gpu.emulator.engine.execution import report
from pallas_gpu.emulator.engine.operations.semaphores import (
    Semaphore,
    Semaphores,
    Signal,
)
from pallas_gpu.emulator.engine.steps import Location
from pallas_gpu.emulator.engine.waits import Run
from pallas_gpu.sparsecore.emulator.cores import Declared, Subcore
from pallas_gpu.sparsecore.types import SemaphoreType

_SIGNALS = "signal as often as it is waited for; a wait subtracts its value"
_COPIES = (
    "wait once for each copy that was started, with the same source and destination; "
    "a wait needs a copy that was started on the same semaphore"
)


class CopySemaphore(Semaphore):
    """A semaphore that counts what copies have moved."""

    __slots__ = ("_issued", "_subtracted", "pending")

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._issued = self._subtracted = 0
        # For each copy that no wait has ordered, what it is and its line.
        self.pending: list[tuple[ordering.Clock, str, Location | None]] = []

    def issue(
        self, known: ordering.Clock, amount: int, what: str, location: Location | None
    ) -> None:
        """Counts a copy that is issued.

        Args:
          known: what its completion makes known.
          amount: its size.
          what: the copy, for messages.
          location: its line.
        """
        self._issued += amount
        self.pending.append((known, what, location))

    def wait(
        self,
        thread: Any,
        value: int,
        decrement: bool = True,
        reach: ordering.Reach | None = None,
    ) -> Run:
        """Waits until so much has arrived, and subtracts it."""
        yield from super().wait(thread, value, decrement, reach)
        self._subtracted += value
        if self._subtracted == self._issued:
            for known, _, _ in self.pending:
                ordering.join(thread.clock, known)
            self.pending.clear()

    def _first(self, missing: int) -> tuple[ordering.Clock, list[Signal]]:
        return {}, []


class SemaphoreArray(Semaphores):
    """The semaphores of a declaration, of one subcore.

    Attributes:
      declared: the declaration.
    """

    __slots__ = ("declared",)

    def __init__(self, declared: Declared, owner: Subcore, place: Hashable):
        aval = declared.aval
        counts_copies = aval.type is SemaphoreType.DMA
        kind = CopySemaphore if counts_copies else Semaphore
        hint = _COPIES if counts_copies else _SIGNALS
        across = len(owner.core.device.cores) > 1 and not counts_copies
        name = f"semaphore {declared.name}" if declared.name else "the semaphore"
        self.declared = declared

        def make(index: tuple[int, ...], at: str) -> Semaphore:
            named, counter = f"{name}{at} of {owner.name}", np.zeros((), np.int32)
            return kind(named, counter, across, hint, (place, index))

        super().__init__(name, tuple(aval.shape), make)

    def require_zero(self) -> None:
        """Reports copies that nobody has awaited, and counters that are not zero."""
        for one in self._semaphores.flat:
            _require_zero(one)


def _require_zero(one: Semaphore) -> None:
    if isinstance(one, CopySemaphore):
        for _, what, location in one.pending:
            unfinished = errors.BarrierError(
                f"{what} has not been waited for when its semaphore is freed",
                expected="a wait for every copy before the kernel or the scope ends",
                got=f"{one.name} is {one.value}",
                hint="call wait() of the copy, once for each start",
                where=location.where if location is not None else None,
            )
            report(unfinished.about(rule="unfinished-copy", barrier=one.name))
        if one.pending:
            return
    one.require_zero("the kernel or the scope ends", "signals and copies")

# SPDX-License-Identifier: Apache-2.0
"""Semaphores of subcores: counters of signals, and of what copies have moved.

A copy adds its size when it is complete, so a wait for less than what is in flight may
be satisfied by any of the copies: it orders none of them. Once the waits have
subtracted all that was issued, all of it is complete.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np

from pallas_gpu import errors
from pallas_gpu.emulator.engine import ordering
from pallas_gpu.emulator.engine.execution import report
from pallas_gpu.emulator.engine.memory import Referent, Region
from pallas_gpu.emulator.engine.operations.semaphores import Semaphore, Signal
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


class SemaphoreArray(Referent):
    """The semaphores of a declaration, of one subcore.

    Attributes:
      declared: the declaration.
    """

    __slots__ = ("_semaphores", "declared")

    def __init__(self, declared: Declared, owner: Subcore, place: Hashable):
        aval, name = declared.aval, declared.name
        counts_copies = aval.type is SemaphoreType.DMA
        kind = CopySemaphore if counts_copies else Semaphore
        super().__init__(f"semaphore {name}" if name else "the semaphore")
        self.declared = declared
        self._semaphores = np.empty(tuple(aval.shape), object)
        across = len(owner.core.device.cores) > 1 and not counts_copies
        for index in itertools.product(*map(range, aval.shape)):
            at = "".join(f"[{i}]" for i in index)
            self._semaphores[index] = kind(
                f"{self.name}{at} of {owner.name}",
                np.zeros((), np.int32),
                across,
                _COPIES if counts_copies else _SIGNALS,
                (place, index),
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return self._semaphores.shape

    def one(self, region: Region) -> Any:
        """Returns the semaphore of a region of one element.

        Raises:
          OutOfBoundsError: the index is out of bounds.
        """
        region.require_existing("used")
        return self._semaphores[tuple(region.window.starts)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._semaphores.flat)

    def require_zero(self) -> None:
        """Reports copies that nobody has awaited, and counters that are not zero."""
        for one in self:
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
    if one.value == 0:
        return
    error = errors.SemaphoreError(
        f"{one.name} is not zero when the kernel or the scope ends",
        expected="0: waits subtract what signals and copies have added",
        got=one.value,
        hint=one.hint,
        where=one.where,
    )
    report(error.about(barrier=one.name))

# SPDX-License-Identifier: Apache-2.0
"""Semaphores: counters that release and acquire what threads know.

All changes of a semaphore are atomic read-modify-write operations, which continue the
release sequence of the signals before them (PTX ISA, Memory Consistency Model,
Observation). So who reads it knows what was known to each signal. Who waits for a value
knows that of the first signals that add up to it and to what waits have subtracted:
others may have come before, and in another schedule they have not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np

from pallas_gpu import errors
from pallas_gpu.emulator.engine import ordering
from pallas_gpu.emulator.engine.execution import report
from pallas_gpu.emulator.engine.memory import Referent, Region
from pallas_gpu.emulator.engine.orders.choices import Kind, Touch
from pallas_gpu.emulator.engine.steps import Location
from pallas_gpu.emulator.engine.threads import Thread
from pallas_gpu.emulator.engine.waits import Run, Wait


class Signal(NamedTuple):
    """What is left of a signal.

    Attributes:
      inc: what it has added.
      known: what it has released.
      reach: whom its scope includes.
      location: of the operation.
    """

    inc: int
    known: ordering.Clock
    reach: ordering.Reach | None = None
    location: Location | None = None


class Semaphore:
    """One semaphore.

    Attributes:
      name: the author's, with its index.
      hint: for who waits forever.
      place: identifies it in all runs of a launch.
    """

    __slots__ = (
        "_across_groups", "_all", "_element", "_known", "_last", "_signals", "hint",
        "name", "place",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        element: np.ndarray,
        across_groups: bool,
        hint: str,
        place: Hashable,
    ):
        self.name = name
        self.place = place
        self.hint = hint
        self._element = element
        self._across_groups = across_groups
        # What is left of each signal; what those have released that waits have
        # subtracted; and what all have.
        self._signals = [Signal(self.value, {})]
        self._known: ordering.Clock = {}
        self._all: ordering.Clock = {}
        self._last: Location | None = None

    @property
    def value(self) -> int:
        """The counter."""
        return int(self._element[()])

    @property
    def where(self) -> str | None:
        """The line of the last signal."""
        return self._last.where if self._last is not None else None

    def state(self) -> str:
        """Describes the semaphore, for reports."""
        signalled = f", last signalled at {self.where}" if self.where else ""
        return f"{self.name} is {self.value}{signalled}"

    def signal(
        self,
        known: ordering.Clock,
        inc: int,
        location: Location | None,
        reach: ordering.Reach | None = None,
    ) -> None:
        """Adds to it, and releases what a thread knows to whom a scope includes."""
        self._element[...] += np.int32(inc)
        self._last = location
        ordering.join(self._all, known)
        if inc > 0:
            self._signals.append(Signal(inc, known, reach, location))
            return
        self._known, self._signals = self._first(-inc)
        ordering.join(self._known, known)

    def wait(
        self,
        thread: Thread,
        value: int,
        decrement: bool,
        reach: ordering.Reach | None = None,
    ) -> Run:
        """Waits until it has reached a value, and may subtract that.

        Raises:
          RaceError: a scope does not include the device of a signal, or of the wait.
        """
        while self.value < value:
            yield Wait(
                lambda: self.value >= value,
                f"{self.name} to be {value} or more",
                self.state,
                across_groups=self._across_groups,
                hint=self.hint,
                barrier=self.name,
            )
        if reach is not None:
            self.require_strong(reach, value)
        known, left = self._first(value)
        ordering.join(thread.clock, known)
        taken = value if decrement else 0
        thread.execution.touch(
            Touch(self.place, Kind.TAKE, delta=-taken, value=self.value, needs=value)
        )
        if decrement:
            self._element[...] -= np.int32(value)
            self._known, self._signals = known, left

    def acquire(self, thread: Thread) -> None:
        """Lets a thread know what all signals have released."""
        ordering.join(thread.clock, self._all)

    def require_strong(self, reach: ordering.Reach, missing: int) -> None:
        """Reports a signal that a wait for a value needs and is not ordered with."""

    def require_zero(self, when: str, added_by: str) -> None:
        """Reports a counter that is not zero, as it was at first."""
        if self.value == 0:
            return
        error = errors.SemaphoreError(
            f"{self.name} is not zero when {when}",
            expected=f"0: waits subtract what {added_by} have added",
            got=self.value,
            hint=self.hint,
            where=self.where,
        )
        report(error.about(barrier=self.name))

    def _first(self, missing: int) -> tuple[ordering.Clock, list[Signal]]:
        """Returns what the first signals that add up to a value have released.

        And what is left of the signals without that value.
        """
        known, left = dict(self._known), []
        for one in self._signals:
            taken = min(one.inc, missing)
            if taken:
                ordering.join(known, one.known)
            if taken < one.inc:
                left.append(one._replace(inc=one.inc - taken))
            missing -= taken
        return known, left


class Semaphores(Referent):
    """The semaphores of a declaration.

    Args:
      name: for messages.
      shape: of the array of semaphores.
      make: makes one for an index, which is `[i]...` in messages.
    """

    __slots__ = ("_semaphores",)

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        make: Callable[[tuple[int, ...], str], Semaphore],
    ):
        super().__init__(name)
        self._semaphores = np.empty(shape, object)
        for index in itertools.product(*map(range, shape)):
            self._semaphores[index] = make(index, "".join(f"[{i}]" for i in index))

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

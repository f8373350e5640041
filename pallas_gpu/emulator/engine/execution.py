# SPDX-License-Identifier: Apache-2.0
"""The state that all threads of a run share: choices, step budget, actors.

An ordinary run raises the mistakes that it finds. That of a check records those after
which it can go on; what is raised ends it: an operation that cannot be executed.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from pallas_gpu import errors
from pallas_gpu.emulator.engine import ordering
from pallas_gpu.emulator.engine.in_flight import InFlight
from pallas_gpu.emulator.engine.orders.choices import Directed, Sampled, Touch
from pallas_gpu.emulator.engine.waits import Positioned, positions

Record = Callable[[errors.PallasGpuError], None]


class _Run(threading.local):
    """The run of the current thread of Python."""

    record: Record | None = None


_RUN = _Run()


def report(error: errors.PallasGpuError) -> None:
    """Raises an error, or records it if the run is a check's."""
    if _RUN.record is None:
        raise error
    _RUN.record(error)


@contextlib.contextmanager
def recording(record: Record) -> Iterator[None]:
    """Records what is reported inside."""
    before, _RUN.record = _RUN.record, record
    try:
        yield
    finally:
        _RUN.record = before


class HasThreads(Protocol):
    """The interface of a group for the report of a livelock."""

    @property
    def threads(self) -> Sequence[Positioned]:
        """Its threads."""


class Execution:
    """One run.

    Args:
      seed: of the choices, if none are given.
      asynchrony: when asynchronous work completes: `"eager"`, `"late"` or `"random"`.
      max_steps: the budget of steps from the end of one group to that of the next.
      detect_races: whether to also compare threads with threads.
      accept_races: whether to compare no accesses at all.
      lenient_reads: whether reads outside an array return poison instead of raising.
      choices: makes every choice.

    Attributes:
      choices: as given, or from the seed.
      touches: where steps report what they touch; None if nobody reads it.
      actors: their numbers in clocks.
      steps: effects, loop iterations and work on large arrays, since a group ended.
      compared: how many accesses have been compared with earlier ones.
      abandoned: whether a group has ended in a deadlock.
      resident: groups that have started and not ended.
      kind: what its groups are, for messages.
      default_line: returns the line for errors of an equation that has none.
      shortages: describes groups that have not started for lack of capacity.
    """

    def __init__(
        self,
        seed: int = 0,
        asynchrony: str = "random",
        max_steps: int = 1_000_000,
        detect_races: bool = True,
        accept_races: bool = False,
        lenient_reads: bool = False,
        choices: Directed | None = None,
    ):
        self.choices: Directed | Sampled = choices or Sampled(seed)
        self.touches: list[Touch] | None = self.choices.touches
        self.detect_races = detect_races
        self.accept_races = accept_races
        self.lenient_reads = lenient_reads
        self.steps = 0
        self.compared = 0
        self.abandoned = False
        self.resident: list[HasThreads] = []
        self.kind = "CTA"
        self.default_line: Callable[[], str | None] = lambda: None
        self.shortages: Callable[[], Sequence[str]] = lambda: ()
        self._asynchrony = asynchrony
        self._max_steps = max_steps
        self.actors = ordering.Actors()
        self._events = itertools.count()

    def new_in_flight(self) -> InFlight:
        """Returns a container for the asynchronous work of a group."""
        return self.choices.in_flight(self._asynchrony)

    def touch(self, touch: Touch) -> None:
        """Reports what the current step touches."""
        if self.touches is not None:
            self.touches.append(touch)

    def progress(self) -> None:
        """Called when a group has ended: the launch advances."""
        self.steps = 0

    def now(self) -> int:
        """Returns a time: how often a thread has asked for it."""
        return next(self._events)

    def tick(self, steps: int = 1) -> None:
        """Counts steps."""
        self.steps += steps
        if self.steps > self._max_steps:
            threads = [t for group in self.resident for t in group.threads]
            missing = self.shortages()
            hint = (
                "look for a loop whose condition never changes, or raise "
                "InterpretParams(max_steps=...)"
            )
            if missing:
                hint = (
                    f"if it polls what another {self.kind} writes, launch no more than "
                    "fit at once; otherwise " + hint
                )
            raise errors.LivelockError(
                f"the kernel still runs after {self._max_steps} steps in which no "
                f"{self.kind} has ended",
                expected="an end within the step budget",
                got="\n".join([*missing, positions(threads)]),
                hint=hint,
            )

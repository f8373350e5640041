# SPDX-License-Identifier: Apache-2.0
"""What all threads of one run share: choices, the step budget, numbers of actors."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Protocol

from pallas_gpu import errors
from pallas_gpu.emulator.engine.in_flight import InFlight
from pallas_gpu.emulator.engine.waits import Positioned, positions


class HasThreads(Protocol):
    """A group, as the report of a livelock reads it."""

    @property
    def threads(self) -> Sequence[Positioned]:
        """Its threads."""


class Execution:
    """One run.

    Args:
      seed: decides every choice.
      asynchrony: when asynchronous work completes: `"eager"`, `"late"` or `"random"`.
      max_steps: the step budget.
      detect_races: also compare threads with threads.
      lenient_reads: reads outside an array return poison instead of raising.

    Attributes:
      rng: all choices come from here.
      steps: effects and loop iterations so far.
      resident: groups that have started and not ended.
    """

    def __init__(
        self,
        seed: int = 0,
        asynchrony: str = "random",
        max_steps: int = 10_000_000,
        detect_races: bool = False,
        lenient_reads: bool = False,
    ):
        self.rng = random.Random(seed)
        self.detect_races = detect_races
        self.lenient_reads = lenient_reads
        self.steps = 0
        self.resident: list[HasThreads] = []
        self._asynchrony = asynchrony
        self._max_steps = max_steps
        self._actors = itertools.count()

    def new_actor(self) -> int:
        """Returns a number for something that moves on its own."""
        return next(self._actors)

    def new_in_flight(self) -> InFlight:
        """Returns the place for the asynchronous work of a group."""
        return InFlight(self._asynchrony, self.rng)

    def tick(self) -> None:
        """Counts a step.

        Raises:
          LivelockError: the budget is spent.
        """
        self.steps += 1
        if self.steps > self._max_steps:
            threads = [t for group in self.resident for t in group.threads]
            raise errors.LivelockError(
                f"the kernel still runs after {self._max_steps} steps",
                expected="an end within the step budget",
                got=positions(threads),
                hint="look for a loop whose condition never changes, or raise "
                "InterpretParams(max_steps=...)",
            )

# SPDX-License-Identifier: Apache-2.0
"""Who makes the choices of a run, and what steps touch that depends on their order.

A seed samples the choices (`Sampled`), or each order of the steps is one run
(`directed.Order`). For the latter a step reports what it touches: barriers, semaphores,
counters, elements of atomic operations. Two steps that touch nothing in common, or only
in ways that commute, lead to the same state in both orders.

Plain accesses to memory are not reported. Where the clocks order two of them, they have
that order in all equivalent runs; where they do not, each run reports a race. Memory is
an exception once threads have stored what it contains, which is accepted without an
order: in another order it may contain something else.

Nor is the order between a wait for a phase and the arrivals of later ones reported: if
the clocks do not order them, each run reports that the wait can miss its phase.
"""

from __future__ import annotations

import dataclasses
import enum
import random
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

from pallas_gpu.emulator.engine.in_flight import InFlight
from pallas_gpu.emulator.engine.ordering import Box, overlap

Unchanged = Callable[[Any], bool]


class Kind(enum.Enum):
    """How a step touches something."""

    # Counts in an epoch: a phase of a barrier, a signal. Within an epoch all commute.
    ADD = enum.auto()
    # Continues once its epoch is complete, so after all that counts in it.
    AWAIT = enum.auto()
    # Continues once a counter has reached a value, and may subtract it.
    TAKE = enum.auto()
    READ = enum.auto()
    WRITE = enum.auto()


CHANGES = (Kind.ADD, Kind.TAKE, Kind.WRITE)


@dataclasses.dataclass(slots=True, eq=False)
class Touch:
    """What one step does to one thing.

    Attributes:
      place: identifies the thing in all runs.
      kind: how it is touched.
      epoch: of ADD, AWAIT and WRITE.
      closes: whether the epoch is complete with this step.
      delta: what it adds to a counter.
      value, needs: of TAKE: the counter before, and what it has to be at least.
      part: the elements, numbers or a box; None for all.
    """

    place: Hashable
    kind: Kind
    epoch: int = 0
    closes: bool = False
    delta: int = 0
    value: int = 0
    needs: int = 0
    part: frozenset[int] | Box | None = None


class Choices(Protocol):
    """What an execution asks for its choices."""

    @property
    def touches(self) -> list[Touch] | None:
        """Where a step reports what it touches; None if nobody reads it."""

    def randint(self, a: int, b: int) -> int:
        """Returns a number from a to b, both included."""

    def shuffle(self, x: list[Any]) -> None:
        """Puts a list in an order."""

    def in_flight(self, mode: str) -> InFlight:
        """Returns a container for asynchronous work."""

    def accessed(
        self, access: Any, memory: Any, value: Any, unchanged: Unchanged | None
    ) -> Unchanged | None:
        """Called before an access; returns whether it leaves elements as they are."""


class Directed(Choices, Protocol):
    """Choices that also decide who takes each step."""

    def drive(self, execution: Any, pools: Sequence[Any]) -> None:
        """Runs the groups of pools; see `scheduler.run`."""


class Sampled(random.Random):
    """Choices from a seed."""

    touches: list[Touch] | None = None

    def in_flight(self, mode: str) -> InFlight:
        """Returns a container for asynchronous work, which the seed advances."""
        return InFlight(mode, self)

    def accessed(
        self, access: Any, memory: Any, value: Any, unchanged: Unchanged | None
    ) -> Unchanged | None:
        """Nobody is interested in it."""
        return unchanged


def are_ordered(first: Touch, second: Touch) -> bool:
    """True if two touches of one thing do not commute: the order of them counts."""
    kinds = {first.kind, second.kind}
    if not _overlap(first.part, second.part):
        return False
    if kinds == {Kind.ADD}:
        return first.epoch != second.epoch
    if Kind.AWAIT in kinds:
        counts = first.kind in (Kind.ADD, Kind.WRITE)
        return counts and first.epoch <= second.epoch
    if kinds <= {Kind.READ, Kind.TAKE}:
        return first.delta != 0 or second.delta != 0
    return True


def _overlap(a: frozenset[int] | Box | None, b: frozenset[int] | Box | None) -> bool:
    if a is None or b is None:
        return True
    if isinstance(a, frozenset):
        return not a.isdisjoint(b)
    return isinstance(b, tuple) and overlap(a, b)


def are_racing(first: Touch, second: Touch) -> bool:
    """True if two touches are ordered and the second one may be possible first.

    A wait is impossible before what completes its phase.
    """
    return second.kind is not Kind.AWAIT and are_ordered(first, second)


def is_overtaken(pending: Touch, done: Touch) -> bool:
    """True if a step that is possible now means another one after `done`."""
    if pending.place != done.place:
        return False
    if pending.kind is done.kind is Kind.ADD:
        # Else it counts in the same epoch as it would have.
        return done.closes or done.epoch != pending.epoch
    return are_ordered(done, pending) or are_ordered(pending, done)

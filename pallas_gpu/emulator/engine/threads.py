# SPDX-License-Identifier: Apache-2.0
"""Threads of execution, and groups of them that are resident together."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pallas_gpu import findings
from pallas_gpu.emulator.engine import ordering
from pallas_gpu.emulator.engine.execution import Execution, report
from pallas_gpu.emulator.engine.memory import Region
from pallas_gpu.emulator.engine.ordering import Around
from pallas_gpu.emulator.engine.poison import Poisoned
from pallas_gpu.emulator.engine.race_report import too_early
from pallas_gpu.emulator.engine.steps import Location
from pallas_gpu.emulator.engine.tables import State
from pallas_gpu.emulator.engine.waits import Wait, some


def names_of(threads: Sequence[Thread]) -> str:
    """Returns the names of threads of one group, for messages."""
    different = sorted(set(threads), key=lambda thread: thread.actor)
    return some([thread.name_in_group for thread in different])


class Group:
    """Threads that start together and wait for each other.

    Attributes:
      execution: the run it belongs to.
      threads: running threads may append others, and remove them when they are done.
      in_flight: the asynchronous work of the group.
    """

    def __init__(self, execution: Execution):
        self.execution = execution
        self.threads: list[Thread] = []
        self.in_flight = execution.new_in_flight()

    def finish(self) -> None:
        """Called when all threads have ended and no work is in flight."""

    def dissolve(self) -> None:
        """Drops the threads and their state, which refer to the group and each other.

        Otherwise they and their memory wait for Python's garbage collector, which does
        not see how large arrays are.
        """
        for thread in self.threads:
            thread.state.clear()
            thread.handover = None
        self.threads.clear()


@dataclasses.dataclass(frozen=True, slots=True)
class Handover:
    """A phase of a barrier that threads have completed.

    Attributes:
      what: the barrier.
      expected: how many arrivals it expects.
    """

    what: str
    expected: str
    arrived: Sequence[Thread]


class Thread:
    """One thread of execution.

    Attributes:
      group: the threads that it runs with.
      execution: the run.
      clock: its vector clock.
      actor: its own number in clocks.
      generator, wait, done: for the scheduler.
      location: the current operation.
      around: those of the loops, branches and scopes around it, innermost first, with
        the number of the iteration of a loop.
      position: which thread it is, by name, as findings have it.
      state: state of families, such as streams of asynchronous work.
      alone: whether no other thread of its group shares memory with it, nor the order
        of its steps and of asynchronous work is explored.
      handover: of the phase that it has waited for last, if threads have arrived.
      iteration: of a loop without a known end: a token of the loop, and its values.
      has_written: whether it has written to memory; set to False by those who ask.
    """

    kind = "thread"

    def __init__(self, group: Group, alone: bool):
        self.group = group
        self.execution = group.execution
        self.actor = self.execution.actors.thread()
        self.clock: ordering.Clock = {self.actor: 1}
        self.generator: Iterator[Any] = iter(())
        self.wait: Wait | None = None
        self.done = False
        self.location: Location | None = None
        self.around: Around = ()
        self.position: dict[str, Any] = {}
        self.state: State = {}
        self.alone = alone and self.execution.touches is None
        self.handover: Handover | None = None
        self.iteration: tuple[Any, Sequence[Any]] = (None, ())
        self.has_written = False

    @property
    def label(self) -> str:
        """The position in the group, for messages."""
        return f"{self.kind} {self.group.threads.index(self)}"

    @property
    def name(self) -> str:
        """The position, for messages."""
        return self.label

    @property
    def name_in_group(self) -> str:
        """The position in the group, for messages."""
        return self.label

    @functools.cached_property
    def order_hint(self) -> str:
        """How another thread comes to access what this one has accessed."""
        return (
            f"order the {self.kind}s with a barrier: arrive after the first access, "
            "wait before the second"
        )

    def where(self) -> str | None:
        """Returns the current line of the kernel.

        Operations of this package's own loops have none: the line of what is around
        them stands for them, or one of the kernel.
        """
        here = () if self.location is None else (self.location,)
        outside = (location for location, _ in self.around)
        lines = (location.where for location in (*here, *outside))
        return next(filter(None, lines), None) or self.execution.default_line()

    def counted(self, other: Thread) -> str:
        """Returns how an arrival of another thread counts where this one waits."""
        return "count it in num_arrivals"

    @property
    def is_running(self) -> bool:
        """Whether it is the one that executes."""
        return getattr(self.generator, "gi_running", False)

    def loops(self) -> tuple[tuple[str | None, int], ...]:
        """Returns the line of each loop around it, and the number of the iteration."""
        return ordering.loops(self.around)

    def here(self) -> findings.Place:
        """Returns where it is."""
        return findings.place(self.where(), self.name, self.position, self.loops())

    def release(self) -> ordering.Clock:
        """Returns the clock that an arrival releases, which excludes later work."""
        known = dict(self.clock)
        self.clock[self.actor] += 1
        return known

    def fence(self, kind: ordering.Fence) -> None:
        """Orders all accesses that this thread knows before asynchronous work."""
        ordering.fence(self.clock, kind)
        self.clock[self.actor] += 1

    def must_record(self, memory: Any, writes: bool) -> bool:
        """Returns whether a later access may conflict with one of this thread."""
        # Without other threads only asynchronous work can conflict with an access; in
        # GMEM that is ordered after a load.
        return (
            writes
            or not self.alone
            or memory.viewer is not None
            or memory.fence is ordering.Fence.SMEM
        )

    def access(
        self,
        region: Region,
        *,
        writes: bool,
        what: str | None = None,
        by: tuple[int, int] | None = None,
        hint: str | None = None,
        value: Any = None,
        unchanged: Callable[[ordering.Box], bool] | None = None,
        gradual: ordering.Gradual | None = None,
        atomic: bool = False,
        reach: ordering.Reach | None = None,
        generic: bool = False,
        issue: ordering.Issue | None = None,
    ) -> ordering.Access | None:
        """Checks an access against earlier ones and records it.

        Args:
          region: the accessed elements.
          writes: whether it is a write.
          what: the accessing thread or work, for messages; default: this thread.
          by: (actor, time) of asynchronous work that this thread issues.
          hint: how to order other accesses after this one; default: a barrier.
          value: what this thread stores.
          unchanged: whether what a copy stores leaves elements of a box as they are.
          gradual: the state of a write that is issued part by part, `region` in all.
          atomic: whether it needs no order with other atomic accesses of threads, or of
            asynchronous work if it is by such work.
          reach: with which of them; None for all.
          generic: whether the asynchronous work uses the generic proxy.
          issue: of asynchronous work that may be in order with other such work.

        Returns:
          The record; None if no access can conflict.

        Raises:
          RaceError: an earlier access conflicts and is not ordered before.
        """
        memory = region.memory
        self.has_written |= writes
        earlier = memory.earlier
        if (
            earlier is not None
            and self.execution.detect_races
            and self.clock.get(earlier.actor, 0) < earlier.time
        ):
            who = what or self.label
            report(too_early(earlier, memory.name, region.box(), who, writes))
        if memory.read_only or self.execution.accept_races:
            return None
        actor, time = by or (self.actor, self.clock[self.actor])
        viewer = memory.viewer
        record = by is not None or self.must_record(memory, writes)
        if not record and memory.history.is_empty:
            return None
        new = ordering.Access(
            region.box(), writes, actor, time, by is not None, what or self.label,
            self.location, hint or self.order_hint, viewer, gradual, atomic,
            generic, reach, issue, self.position, self.around,
        )  # fmt: skip
        if value is not None:
            unchanged = functools.partial(region.holds, value)
        self.execution.compared += 1
        if self.execution.touches is not None:
            choices = self.execution.choices
            unchanged = choices.accessed(new, region.memory, value, unchanged)
        memory.history.access(
            new,
            self.clock,
            memory.name,
            threads_too=self.execution.detect_races,
            record=record,
            unchanged=unchanged,
            hint=self._advice if writes else self._advice_to_read,
        )
        return new

    def _advice_to_read(self, old: ordering.Access) -> str:
        """Returns what to do before a read: what a copy brings has its own wait."""
        return old.hint if old.by_copy else self._advice(old)

    def _advice(self, old: ordering.Access) -> str:
        """Returns what to do about an access that conflicts with one of this thread.

        A barrier that expects too few arrivals does not wait for whoever made it.
        """
        handover = self.handover
        if handover is None or old.position is self.position:
            return old.hint
        others = [t for t in self.group.threads if t.position is old.position]
        if not others or not handover.arrived or others[0] in handover.arrived:
            return old.hint
        own, other = self.name_in_group, others[0].name_in_group
        return (
            f"{own} has waited for {handover.what}, which expects {handover.expected}; "
            f"the arrivals came from {names_of(handover.arrived)}, none from {other}: "
            f"let {other} arrive after its access, and {self.counted(others[0])}; or "
            f"{old.hint}"
        )

    def read(self, region: Region) -> Any:
        """Returns the elements of a region as the threads see them.

        Elements without a value are poisoned.

        Raises:
          OutOfBoundsError, RaceError.
        """
        if not self.execution.lenient_reads:
            region.require_in_bounds("read")
        self.access(region, writes=False)
        return self.value_of(region)

    def value_of(self, region: Region) -> Any:
        """Returns the elements of a region; those without a value are poisoned."""
        missing = region.missing()
        value = region.load()
        value = value[()] if value.ndim == 0 else value
        if missing is None:
            return value
        return Poisoned(value, missing, region.origin(missing, self.where()))

    def write(self, region: Region, value: Any) -> None:
        """Stores values as the threads do.

        Raises:
          OutOfBoundsError, RaceError.
          UninitializedReadError: the array is in GMEM, and the value is poisoned.
        """
        region.require_in_bounds("written")
        compared = None if isinstance(value, Poisoned) else value
        self.access(region, writes=True, value=compared)
        region.store(value)

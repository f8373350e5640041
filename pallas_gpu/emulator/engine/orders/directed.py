# SPDX-License-Identifier: Apache-2.0
"""One order of a run: which process takes the next step is looked up in a tree.

A process is a thread, asynchronous work in flight, or the start of groups. It runs
until it has touched something whose order counts: that is an event. What it does on the
way concerns no other process, so only events are ordered.
"""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from pallas_gpu.emulator.engine import scheduler
from pallas_gpu.emulator.engine.execution import Execution
from pallas_gpu.emulator.engine.in_flight import InFlight, Work
from pallas_gpu.emulator.engine.ordering import Access
from pallas_gpu.emulator.engine.orders.choices import CHANGES, Kind, Touch, Unchanged
from pallas_gpu.emulator.engine.orders.reduction import Tree
from pallas_gpu.emulator.engine.poison import Poisoned
from pallas_gpu.emulator.engine.reinterpreted import ReinterpretedArray
from pallas_gpu.emulator.engine.threads import Group, Thread
from pallas_gpu.emulator.engine.waits import ITERATION, Wait

# The longest list of which all permutations are tried.
_PERMUTED = 4


class RedundantOrder(BaseException):
    """The rest of the run is equivalent to what has been explored."""


class OutOfTime(BaseException):
    """The time for exploring is over."""


class _Process:
    """What takes steps.

    Attributes:
      name: the same in all runs that have the same events before it was made.
      group: that of the thread or the work.
      known: the set of events before its next one.
      made: how many processes it has made.
      last: when it was last chosen.
    """

    def __init__(self, name: str, group: Group | None):
        self.name, self.group = name, group
        self.known = self.made = self.last = 0

    def is_able(self) -> bool:
        """True if it can take a step."""
        return True

    def step(self, order: Order) -> bool:
        """Takes a step; returns True if it may let others go on.

        What it touches may do so too.
        """
        raise NotImplementedError

    def has_touched(self, order: Order) -> None:
        """Called after each of its events."""


class _Start(_Process):
    """The start of the groups of a pool."""

    def __init__(self, name: str, pool: scheduler.Pool):
        super().__init__(name, None)
        self._pool = pool

    def is_able(self) -> bool:
        return self._pool.can_start

    def step(self, order: Order) -> bool:
        order.touches.append(Touch(self._pool.place, Kind.WRITE))
        order.add_threads(scheduler.start(order.execution, self._pool))
        return True


class _Running(_Process):
    """A thread."""

    def __init__(self, name: str, thread: Thread):
        super().__init__(name, thread.group)
        self._thread = thread
        self._forked: list[_Process] = []
        self._siblings = 0
        # Of the latest iteration of a loop without a known end: what it has read, and
        # how often that had been changed; whether it has done nothing else.
        self._iteration = thread.iteration
        self._read: dict[Hashable, int] = {}
        self._only_reads = True

    def is_able(self) -> bool:
        wait = self._thread.wait
        return wait is None or wait.ready()

    def step(self, order: Order) -> bool:
        thread = self._thread
        if thread.wait is not None and thread.wait.for_threads:
            for process in self._forked:
                self.known |= process.known
            self._forked = []
        thread.wait = None
        try:
            thread.wait = next(thread.generator)
        except StopIteration:
            thread.done = True
            order.ended(self, thread)
            return True
        iterates = thread.wait is ITERATION
        if iterates:
            self._iterate(order)
        if len(thread.group.threads) != self._siblings:
            self._forked += order.add_threads(thread.group)
            self._only_reads = False
            self._siblings = len(thread.group.threads)
        # A loop without a known end may poll memory, if races are accepted.
        return iterates

    def has_touched(self, order: Order) -> None:
        for touch in order.touches:
            if touch.kind is Kind.READ:
                self._read[touch.place] = order.changes[touch.place]
            else:
                self._only_reads = False

    def _iterate(self, order: Order) -> None:
        """Lets the thread wait if an iteration has left it as it was before.

        It would do the same again until another thread changes what it has read.
        """
        thread, read, only_reads = self._thread, self._read, self._only_reads
        (before, old), (loop, values) = self._iteration, thread.iteration
        if (
            loop is before
            and read
            and only_reads
            and order.execution.detect_races
            and not thread.has_written
            and all(map(_are_same, old, values))
        ):
            changes = order.changes
            thread.wait = Wait(
                lambda: any(changes[place] != n for place, n in read.items()),
                "a change of what its loop reads",
                lambda: "nothing has changed in an iteration",
                across_groups=True,
                hint="look for a loop whose condition never changes",
            )
        self._iteration = thread.iteration
        self._read, self._only_reads, thread.has_written = {}, True, False


def _are_same(a: Any, b: Any) -> bool:
    if isinstance(a, Poisoned) or isinstance(b, Poisoned):
        return a is b
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


class _Moving(_Process):
    """Asynchronous work."""

    def __init__(self, name: str, group: Group, work: Work):
        super().__init__(name, group)
        self._work = work

    def step(self, order: Order) -> bool:
        if self._work.advance():
            assert self.group is not None
            self.group.in_flight.remove(self._work)
            order.ended(self)
        return True


class _Watched(InFlight):
    """Asynchronous work that an order advances."""

    def __init__(self, order: Order):
        super().__init__("late", None)
        self._order = order

    def submit(self, work: Work) -> None:
        """Adds new work."""
        super().submit(work)
        self._order.add_work(work)


class Order:
    """Choices that follow a tree.

    Args:
      tree: knows which choice is next.

    Attributes:
      touches: what the current event touches.
      changes: how often each thing has been changed.
      execution: the run.
    """

    execution: Execution

    def __init__(self, tree: Tree, end: float | None = None):
        self._end = end
        self.touches: list[Touch] = []
        self.changes: collections.Counter[Hashable] = collections.Counter()
        self._tree = tree
        self._depth = 0
        # The processes that have not ended, and the threads among them.
        self._processes: dict[str, _Process] = {}
        self._threads: set[Thread] = set()
        # Who takes a step, and what it makes.
        self._current = _Process("", None)
        self._made: list[_Process] = []
        # Who cannot go on; the events up to the latest if that may be what they wait
        # for, although it touches nothing.
        self._unable: set[str] = set()
        self._woken_by = 0

    # --- choices of operations --------------------------------------------------------

    def randint(self, a: int, b: int) -> int:
        """Returns a number from a to b, both included; the largest first."""
        return b - self._value(b - a + 1)

    def shuffle(self, x: list[Any]) -> None:
        """Puts a list in an order; only one is tried if it is long."""
        if len(x) > _PERMUTED:
            self._tree.skip()
            return
        orders = list(itertools.permutations(x))
        x[:] = orders[self._value(len(orders))]

    def in_flight(self, mode: str) -> InFlight:
        """Returns a container for asynchronous work, each a process."""
        return _Watched(self)

    def _value(self, count: int) -> int:
        if count < 2:
            return 0
        self._depth += 1
        return self._tree.value(self._depth - 1, count)

    def accessed(
        self, access: Access, memory: Any, value: Any, unchanged: Unchanged | None
    ) -> Unchanged | None:
        """Called before an access; returns whether it leaves elements as they are.

        If only that excuses a store, the accesses to its memory are ordered, too.
        """
        identity = memory.identity
        if identity in self._tree.contested and not access.by_copy:
            touch = Touch(("memory", identity), Kind.READ, part=access.box)
            if isinstance(memory, ReinterpretedArray):
                touch.part = None
            if access.writes:
                touch.kind = Kind.WRITE
            if value is not None:
                # Stores of the same values to the same elements commute.
                touch.kind = Kind.ADD
                touch.epoch = hash((access.box, np.asarray(value).tobytes()))
            self.touches.append(touch)
        if unchanged is None:
            return None

        def excused(box: Any) -> bool:
            is_so = unchanged(box)
            if is_so and access.by_copy:
                self._tree.skip()
            elif is_so:
                self._tree.contest(identity)
            return is_so

        return excused

    # --- processes --------------------------------------------------------------------

    def add_threads(self, group: Group) -> list[_Process]:
        """Makes processes for the threads of a group without one."""
        new = [t for t in group.threads if not t.done and t not in self._threads]
        self._threads.update(new)
        return [self._add(_Running(self._name(), t)) for t in new]

    def add_work(self, work: Work) -> None:
        """Makes a process for work that the current one submits."""
        assert self._current.group is not None
        self._add(_Moving(self._name(), self._current.group, work))

    def _name(self) -> str:
        self._current.made += 1
        return f"{self._current.name}.{self._current.made}"

    def _add(self, process: _Process) -> _Process:
        self._processes[process.name] = process
        self._made.append(process)
        return process

    def ended(self, process: _Process, thread: Thread | None = None) -> None:
        """Drops a process, and its group if it was the last one."""
        del self._processes[process.name]
        group = process.group
        assert group is not None
        if thread is not None:
            self._threads.discard(thread)
        if not len(group.in_flight) and all(t.done for t in group.threads):
            scheduler.end(self.execution, self._pools, group)

    # --- the run ----------------------------------------------------------------------

    def drive(self, execution: Execution, pools: Sequence[scheduler.Pool]) -> None:
        """Runs the groups of all pools.

        Raises:
          RedundantOrder: what remains has been explored.
          DeadlockError: nothing can go on.
          Errors of the threads.
        """
        self.execution, self._pools = execution, pools
        if not execution.detect_races:
            # A race in one order says nothing of the others.
            self._tree.skip()
        for i, pool in enumerate(pools):
            pool.touches, pool.place = self.touches, ("launch", i)
            self._processes[f"launch {i}"] = _Start(f"launch {i}", pool)
        try:
            while self._take_event():
                pass
        except RedundantOrder:
            raise
        except BaseException:
            # Events that have not happened race with none.
            self._tree.skip()
            raise

    def _take_event(self) -> bool:
        """Lets a process reach its next event; False if none is left.

        Raises:
          OutOfTime: the order has no time left.
        """
        if self._end is not None and time.monotonic() > self._end:
            raise OutOfTime
        depth, self._depth = self._depth, self._depth + 1
        able = [name for name, p in self._processes.items() if p.is_able()]
        if self._woken_by:
            for name in set(able) & self._unable:
                self._processes[name].known |= self._woken_by
        self._unable = self._processes.keys() - able
        while True:
            able.sort(key=lambda name: self._processes[name].last)
            chosen = self._tree.choose(depth, able)
            if chosen is None:
                self._stop(able)
                return False
            if self._reach_event(depth, chosen):
                return True
            # It waits, or another order of this process has found it.
            able = [name for name in able if name != chosen]
            self._unable.add(chosen)
            self._tree.refuse(depth, able)

    def _reach_event(self, depth: int, name: str) -> bool:
        """Takes steps until one is an event; False if the process waits before."""
        process = self._processes.get(name)
        if process is None:
            return False
        self._current, process.last = process, depth
        self.touches.clear()
        self._made = []
        try:
            while process.is_able():
                wakes = process.step(self)
                if wakes or self.touches or self._made:
                    break
            else:
                return False
        except BaseException:
            self._tree.record(depth, self.touches, process.known)
            raise
        process.has_touched(self)
        self.changes.update(t.place for t in self.touches if t.kind in CHANGES)
        process.known = self._tree.record(depth, self.touches, process.known)
        self._woken_by = 0 if self.touches else process.known
        for made in self._made:
            made.known = process.known
        return True

    def _stop(self, able: Sequence[str]) -> None:
        """Ends the run where no process has a next event that is to be explored."""
        if able:
            raise RedundantOrder
        resident = [group for pool in self._pools for group in pool.resident]
        for group in resident:
            if not scheduler.waits_for_groups(group):
                raise scheduler.deadlock(group.threads)
        if resident:
            threads = [t for group in resident for t in group.threads]
            raise scheduler.deadlock(threads, self._pools)

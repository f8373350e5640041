# SPDX-License-Identifier: Apache-2.0
"""The scheduler: groups of threads with limited residency, in an order from a seed.

A thread is a generator. It yields None where another thread of its group may run, and a
`Wait` where it blocks on a condition. A group runs until none of its threads can; then
another group that can run does, or the next one starts, if the capacity allows it. So
groups are created late, and all resident groups make progress, including those that
wait for each other.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterator, Sequence

from pallas_gpu import errors
from pallas_gpu.emulator.engine.execution import Execution, report
from pallas_gpu.emulator.engine.orders.choices import Kind, Sampled, Touch
from pallas_gpu.emulator.engine.threads import Group, Thread
from pallas_gpu.emulator.engine.waits import ITERATION, TURN, positions

# Iterations of loops without a known end after which another group runs: the
# loop may poll memory that one of them has to write.
_ITERATIONS = 256
# How often a group that waits for its own asynchronous work lets another group run
# first, once groups have waited for each other: so seeds try different orders. Groups
# that never do run one after the other, which keeps few of them in memory at once.
_SWITCH_PROBABILITY = 1 / 8
# How often another group runs first where the order of the groups decides.
_TURN_PROBABILITY = 1 / 2


class Pool:
    """Groups of which a limited number is resident at once.

    Args:
      groups: yields them in the order in which they start.
      total: number of groups.
      capacity: maximum number of resident groups.
      what: the groups in the plural, for messages.
      limit: what limits the capacity, for messages.

    Attributes:
      resident: groups that have started and not ended.
      started: how many have started.
      touches, place: where it reports that its next group is taken, and as what.
    """

    touches: list[Touch] | None = None
    place: Hashable = None

    def __init__(
        self, groups: Iterator[Group], total: int, capacity: int, what: str, limit: str
    ):
        self._groups = groups
        self.total = total
        self.capacity = capacity
        self.what = what
        self.limit = limit
        self.resident: list[Group] = []
        self.started = 0

    @property
    def can_start(self) -> bool:
        """True when a group has not started and the capacity allows it."""
        return self.started < self.total and len(self.resident) < self.capacity

    def start(self) -> Group:
        """Starts the next group."""
        group = next(self._groups)
        self.started += 1
        self.resident.append(group)
        return group

    def cancel(self) -> Group | None:
        """Takes the next group out of the pool, if one has not started."""
        if self.touches is not None:
            self.touches.append(Touch(self.place, Kind.WRITE))
        if self.started == self.total:
            return None
        self.total -= 1
        return next(self._groups)

    def close(self) -> None:
        """Drops the groups, also those that have not started."""
        for group in self.resident:
            group.dissolve()
        self.resident.clear()
        self._groups = iter(())

    def shortage(self) -> str | None:
        """Describes the groups that have not started for lack of capacity, or None."""
        left = self.total - self.started
        if not left:
            return None
        return (
            f"{self.capacity} of {self.total} {self.what} fit at once ({self.limit}); "
            f"{left} not started"
        )


class _Stop(enum.Enum):
    """Why a group has stopped running."""

    ENDED = enum.auto()
    # No thread can run and no work is in flight.
    BLOCKED = enum.auto()
    # Waits for its own work; another group may run before.
    WAITS = enum.auto()
    # Another group may run before, also one that has not started: this one may poll
    # memory that it writes, or claim what it would have claimed.
    POLLS = enum.auto()


def run(execution: Execution, pools: Sequence[Pool]) -> None:
    """Runs the groups of all pools until all have ended.

    Raises:
      DeadlockError: all remaining threads wait, and no work is in flight.
      Errors of the threads.
    """
    execution.shortages = lambda: shortages(pools)
    choices = execution.choices
    try:
        if isinstance(choices, Sampled):
            _Scheduler(execution, choices, pools).run()
        else:
            choices.drive(execution, pools)
    finally:
        execution.shortages = tuple
        for pool in pools:
            pool.close()


class _Scheduler:
    def __init__(self, execution: Execution, rng: Sampled, pools: Sequence[Pool]):
        self.execution = execution
        self.rng = rng
        self.pools = pools
        self.groups_wait = False

    def run(self) -> None:
        current, stop = None, _Stop.ENDED
        while (current := self._next(current, stop)) is not None:
            stop = self._run_group(current)
            if stop is _Stop.ENDED:
                current.in_flight.drain()
                end(self.execution, self.pools, current)
                continue
            if stop is _Stop.BLOCKED and not waits_for_groups(current):
                report(deadlock(current.threads))
                abandon(self.execution, self.pools, current)
                continue
            self.groups_wait = True

    def _start(self) -> Group | None:
        pools = [pool for pool in self.pools if pool.can_start]
        if not pools:
            return None
        pool = pools[0] if len(pools) == 1 else self.rng.choice(pools)
        return start(self.execution, pool)

    def _next(self, current: Group | None, stop: _Stop) -> Group | None:
        """Returns the group that runs next; None when all have ended."""
        if stop is _Stop.POLLS and (new := self._start()) is not None:
            return new
        resident = [group for pool in self.pools for group in pool.resident]
        others = [g for g in resident if g is not current and _can_run(g)]
        if others:
            return self.rng.choice(others)
        if stop in (_Stop.POLLS, _Stop.WAITS):
            return current
        if (new := self._start()) is not None:
            return new
        if resident:
            raise deadlock([t for g in resident for t in g.threads], self.pools)
        return None

    def _below(self, n: int) -> int:
        """Returns a random number below n, faster than `Random.randrange`."""
        bits = n.bit_length()
        while (number := self.rng.getrandbits(bits)) >= n:
            pass
        return number

    def _is_contended(self) -> bool:
        """True when another group has started, or could."""
        return len(self.execution.resident) > 1 or any(p.can_start for p in self.pools)

    def _run_group(self, group: Group) -> _Stop:
        threads, in_flight, rng = group.threads, group.in_flight, self.rng
        contended = self._is_contended()
        may_switch = contended and self.groups_wait
        iterations = 0
        while True:
            ready = [
                t for t in threads if not t.done and (t.wait is None or t.wait.ready())
            ]
            if not ready:
                if all(t.done for t in threads):
                    return _Stop.ENDED
                if not len(in_flight):
                    return _Stop.BLOCKED
                if may_switch and rng.random() < _SWITCH_PROBABILITY:
                    return _Stop.WAITS
                in_flight.advance_one()
                continue
            in_flight.maybe_advance()
            thread = ready[0] if len(ready) == 1 else ready[self._below(len(ready))]
            thread.wait = None
            try:
                thread.wait = next(thread.generator)
            except StopIteration:
                thread.done = True
            if thread.wait is ITERATION:
                thread.wait = None
                iterations += 1
                if contended and iterations == _ITERATIONS:
                    return _Stop.POLLS
            elif thread.wait is TURN:
                thread.wait = None
                if contended and rng.random() < _TURN_PROBABILITY:
                    return _Stop.POLLS


def start(execution: Execution, pool: Pool) -> Group:
    """Starts the next group of a pool."""
    group = pool.start()
    execution.resident.append(group)
    return group


def end(execution: Execution, pools: Sequence[Pool], group: Group) -> None:
    """Ends a group of which all threads have ended and no work is in flight."""
    _remove(execution, pools, group)
    group.finish()
    group.dissolve()


def abandon(execution: Execution, pools: Sequence[Pool], group: Group) -> None:
    """Ends a group that cannot; the others go on."""
    execution.abandoned = True
    _remove(execution, pools, group)
    group.dissolve()


def _remove(execution: Execution, pools: Sequence[Pool], group: Group) -> None:
    for pool in pools:
        if group in pool.resident:
            pool.resident.remove(group)
    execution.resident.remove(group)
    execution.progress()


def _can_run(group: Group) -> bool:
    if len(group.in_flight):
        return True
    return any(not t.done and (t.wait is None or t.wait.ready()) for t in group.threads)


def waits_for_groups(group: Group) -> bool:
    """True when another group can wake a thread of the group."""
    waits = [t.wait for t in group.threads if not t.done]
    return any(wait is not None and wait.across_groups for wait in waits)


def shortages(pools: Sequence[Pool]) -> list[str]:
    """Describes the groups of each pool that lack capacity to start."""
    return [text for pool in pools if (text := pool.shortage()) is not None]


def deadlock(
    threads: Sequence[Thread], pools: Sequence[Pool] = ()
) -> errors.DeadlockError:
    """Returns the error for threads that all wait.

    Args:
      threads: of all resident groups.
      pools: the pools, of which groups may not have started.
    """
    parents = [t for t in threads if t.wait is not None and t.wait.for_threads]
    waiting = [t for t in threads if not t.done and t not in parents]
    kinds = dict.fromkeys(f"{t.kind}s" for t in threads)
    missing = shortages(pools)
    hints = dict.fromkeys(t.wait.hint for t in waiting if t.wait is not None)
    hint = "; ".join(hints)
    if missing:
        hint = (
            "if they wait for each other, launch no more than fit at once, and let "
            "each loop over its part of the work; otherwise " + hint
        )
    error = errors.DeadlockError(
        f"deadlock: {len(waiting)} of {len(threads) - len(parents)} "
        f"{' and '.join(kinds)} wait, and nothing is in flight that could wake "
        "them",
        expected="an arrival, a signal or a copy for every wait",
        got="\n".join([*missing, positions(threads)]),
        hint=hint,
        where=waiting[0].where() if waiting else None,
    )
    for thread in waiting[:1]:
        error.about(
            who=thread.name,
            position=thread.position,
            loops=thread.loops(),
            barrier=thread.wait.barrier if thread.wait is not None else None,
        )
    return error

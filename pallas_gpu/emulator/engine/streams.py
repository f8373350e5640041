# SPDX-License-Identifier: Apache-2.0
"""Streams: asynchronous work that a thread issues and awaits in groups.

A thread waits until at most a number of the latest groups is pending. Work may pass
several milestones, each awaited separately: a copy first has read its source, then has
written its destination.
"""

from __future__ import annotations

from pallas_gpu.emulator.engine import ordering
from pallas_gpu.emulator.engine.threads import Thread
from pallas_gpu.emulator.engine.waits import Run, Wait


class Milestone:
    """A point in the progress of a stream's work, passed group by group.

    Attributes:
      actor: its number in clocks; its time is a number of groups.
      awaited: how many groups the thread has waited for.
    """

    def __init__(self, actor: int):
        self.actor = actor
        self.awaited = 0
        self._pending: dict[int, int] = {}

    def expect(self, group: int) -> None:
        """Counts work of a group that has not passed."""
        self._pending[group] = self._pending.get(group, 0) + 1

    def passed(self, group: int) -> None:
        """Counts work of a group that has passed."""
        self._pending[group] -= 1
        if not self._pending[group]:
            del self._pending[group]

    def is_pending(self, upto: int) -> bool:
        """True when some work of the first `upto` groups has not passed."""
        # Groups are issued in order, so the first one is the oldest.
        return next(iter(self._pending), upto + 1) <= upto

    def pending(self, upto: int) -> int:
        """Returns how much work of the first `upto` groups has not passed."""
        return sum(n for group, n in self._pending.items() if group <= upto)


class Stream:
    """Asynchronous work of one thread, in groups that are numbered from 1.

    Attributes:
      milestones: in the order in which work passes them.
      closed: number of groups that have been closed.
    """

    def __init__(self, thread: Thread, milestones: int):
        new_actor = thread.execution.actors.other
        self.milestones = tuple(Milestone(new_actor()) for _ in range(milestones))
        self.closed = 0

    @property
    def open_group(self) -> int:
        """The group that work issued now belongs to."""
        return self.closed + 1

    def issue(self) -> int:
        """Counts work that is issued now; returns its group."""
        for milestone in self.milestones:
            milestone.expect(self.open_group)
        return self.open_group

    def close_group(self) -> None:
        """Ends the group: what is issued next belongs to another."""
        self.closed += 1

    def wait(self, thread: Thread, n: int, passed: int, what: str) -> Run:
        """Waits until at most `n` closed groups are pending.

        Args:
          thread: the waiting thread.
          n: how many groups may be pending.
          passed: number of milestones that must have been passed.
          what: the work, in the plural, for messages.
        """
        upto = max(0, self.closed - n)
        milestones = self.milestones[:passed]
        last = milestones[-1]
        if last.is_pending(upto):
            yield Wait(
                lambda: not last.is_pending(upto),
                f"{what}, all but {n} groups",
                lambda: f"{last.pending(upto)} {what} are pending",
            )
        for milestone in milestones:
            milestone.awaited = max(milestone.awaited, upto)
        ordering.join(thread.clock, {m.actor: upto for m in milestones})

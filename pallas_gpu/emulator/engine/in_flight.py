# SPDX-License-Identifier: Apache-2.0
"""Asynchronous work in flight: the seed decides when it advances.

Work advances in stages. If no thread of its group can run, it is advanced, so it is as
late as the waits allow, unless the parameters or the seed make it earlier.
"""

from __future__ import annotations

import collections
from typing import Any, Protocol


class Work(Protocol):
    """Asynchronous work that has been issued."""

    def advance(self) -> bool:
        """Performs one stage; returns True when it was the last."""


class InOrder:
    """Work that is performed in the order of a queue, in one stage.

    Args:
      queue: what has been issued to it, and not performed.
    """

    __slots__ = ("_done", "queue")

    def __init__(self, queue: collections.deque[InOrder]):
        self.queue = queue
        self._done = False

    def advance(self) -> bool:
        """Performs it, after what was issued before."""
        while not self._done:
            first = self.queue.popleft()
            first.perform()
            first._done = True
        return True

    def perform(self) -> None:
        """Performs it."""
        raise NotImplementedError


class InFlight:
    """Asynchronous work that has been issued and is not complete.

    Args:
      mode: `"eager"`, `"late"` or `"random"`.
      rng: decides for `"random"`, and in which order work advances; None where others
        do.
    """

    def __init__(self, mode: str, rng: Any):
        self._mode = mode
        self._rng = rng
        self._work: list[Work] = []

    def __len__(self) -> int:
        return len(self._work)

    def submit(self, work: Work) -> None:
        """Adds new work, and may advance it immediately."""
        eager = self._mode == "eager"
        if self._mode == "random":
            eager = self._rng.random() < 0.5
        done = False
        while eager and not done:
            done = work.advance()
            eager = self._mode == "eager" or self._rng.random() < 0.75
        if not done:
            self._work.append(work)

    def remove(self, work: Work) -> None:
        """Drops work that is complete."""
        self._work = [other for other in self._work if other is not work]

    def advance_one(self) -> None:
        """Advances some work by one stage."""
        index = self._rng.randrange(len(self._work))
        if self._work[index].advance():
            self._work.pop(index)

    def maybe_advance(self) -> None:
        """Advances some work, if the seed decides so."""
        if self._work and self._mode == "random" and self._rng.random() < 0.25:
            self.advance_one()

    def drain(self) -> None:
        """Completes all work."""
        while self._work:
            self.advance_one()

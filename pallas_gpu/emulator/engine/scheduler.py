# SPDX-License-Identifier: Apache-2.0
"""Who runs next: warpgroups and asynchronous work, chosen from a seed.

A warpgroup is a generator, and so is a warp while it runs by itself. It yields None
where another may run, and a `Wait` where it has to stop until something holds.
Asynchronous work advances by stages; it is driven at the latest when nobody can run, so
it is as late as the waits allow, unless the parameters or the seed let it be quick.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

from pallas_gpu import errors


@dataclasses.dataclass(slots=True)
class Wait:
    """What a warpgroup waits for.

    Attributes:
      ready: whether it may go on.
      what: the awaited thing, for the report of a deadlock.
      state: describes the awaited thing as it is now.
      for_threads: waits for others in the list, which say themselves what they lack.
    """

    ready: Callable[[], bool]
    what: str
    state: Callable[[], str]
    for_threads: bool = False


# A warpgroup, or a rule that can block: yields None or a Wait, ends with its results.
Run = Generator[Wait | None, None, Any]


class Work(Protocol):
    """Asynchronous work in flight."""

    def advance(self) -> bool:
        """Does one stage; returns True when nothing is left."""


class InFlight:
    """Asynchronous work that has been issued and is not done.

    Args:
      mode: `"eager"`, `"late"` or `"random"`.
      rng: decides for `"random"`, and which work comes first.
    """

    def __init__(self, mode: str, rng: random.Random):
        self._mode = mode
        self._rng = rng
        self._work: list[Work] = []

    def __len__(self) -> int:
        return len(self._work)

    def submit(self, work: Work) -> None:
        """Takes new work; some of it is done at once."""
        eager = self._mode == "eager"
        if self._mode == "random":
            eager = self._rng.random() < 0.5
        done = False
        while eager and not done:
            done = work.advance()
            eager = self._mode == "eager" or self._rng.random() < 0.75
        if not done:
            self._work.append(work)

    def advance_one(self) -> None:
        """Advances some work by one stage."""
        index = self._rng.randrange(len(self._work))
        if self._work[index].advance():
            self._work.pop(index)

    def maybe_advance(self) -> None:
        """Advances some work, if the seed says so."""
        if self._work and self._mode == "random" and self._rng.random() < 0.25:
            self.advance_one()

    def drain(self) -> None:
        """Completes everything."""
        while self._work:
            self.advance_one()


def run(threads: list[Any], in_flight: InFlight, rng: random.Random) -> None:
    """Runs warpgroups until all have ended.

    Args:
      threads: objects with `generator`, `wait` (None or a Wait), `done`; those that run
        may add others at the end, and take them out once they are done.
      in_flight: asynchronous work.
      rng: chooses the next warpgroup.

    Raises:
      DeadlockError: all that are left wait, and no work is in flight.
      Whatever the warpgroups raise.
    """
    while alive := [t for t in threads if not t.done]:
        ready = [t for t in alive if t.wait is None or t.wait.ready()]
        if not ready:
            if not len(in_flight):
                raise deadlock(threads)
            in_flight.advance_one()
            continue
        in_flight.maybe_advance()
        thread = ready[0] if len(ready) == 1 else rng.choice(ready)
        thread.wait = None
        try:
            thread.wait = next(thread.generator)
        except StopIteration:
            thread.done = True


def positions(threads: Sequence[Any]) -> str:
    """Returns a line a warpgroup: where it is and what it waits for."""
    lines = []
    for thread in threads:
        if thread.done:
            lines.append(f"{thread.name}: has ended")
        elif thread.wait is not None:
            lines.append(
                f"{thread.name}: waits for {thread.wait.what} at {thread.where()}\n"
                f"    {thread.wait.state()}"
            )
        else:
            lines.append(f"{thread.name}: runs at {thread.where()}")
    return "\n".join(lines)


def deadlock(threads: Sequence[Any]) -> errors.DeadlockError:
    """Returns the error for warpgroups that all wait."""
    parents = [t for t in threads if t.wait is not None and t.wait.for_threads]
    waiting = [t for t in threads if not t.done and t not in parents]
    who = "warpgroups and warps" if parents else "warpgroups"
    return errors.DeadlockError(
        f"deadlock: {len(waiting)} of {len(threads) - len(parents)} {who} wait, and "
        "nothing is under way that could wake them",
        expected="an arrival or a copy for every wait",
        got=positions(threads),
        hint="compare the arrivals with the barrier's num_arrivals, and the number of "
        "waits with the number of phases",
        where=waiting[0].where() if waiting else None,
    )

# SPDX-License-Identifier: Apache-2.0
"""Conditions that threads wait for, and the report of all threads' positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterable
from typing import Any, Protocol

# A report of two lines for each state, in a traceback, has at most 25 lines.
_LISTED_STATES = 4
_LISTED_NAMES = 8


@dataclasses.dataclass(slots=True)
class Wait:
    """A condition that a thread waits for.

    Attributes:
      ready: whether the thread may continue.
      what: the awaited event, for the report of a deadlock.
      state: describes the current state of the awaited event.
      for_threads: whether it waits for threads of its group, which report themselves.
      across_groups: whether another group can make it ready. A group whose threads all
        wait for each other is a deadlock, whatever other groups do.
      hint: what to look at if it never happens.
      barrier: the barrier or the semaphore that is awaited, by name.
    """

    ready: Callable[[], bool]
    what: str
    state: Callable[[], str]
    for_threads: bool = False
    across_groups: bool = False
    hint: str = (
        "compare the arrivals with the barrier's num_arrivals (a warpgroup arrives "
        "once, and so does a copy), and the number of waits with the number of phases"
    )
    barrier: str | None = None


# Yielded once per iteration of a loop without a known end, which may poll memory that
# another group writes: after some iterations the scheduler runs another group.
ITERATION = Wait(lambda: True, "the next iteration", str)

# Yielded before an operation whose result depends on the order of the groups: the
# scheduler may run another group first.
TURN = Wait(lambda: True, "its turn", str)

# A thread, or a rule that can block: yields None where another thread may run, or a
# Wait; its return value is the results.
Run = Generator[Wait | None, None, Any]


class Positioned(Protocol):
    """The interface of a thread for the report."""

    @property
    def name(self) -> str:
        """The thread's name."""

    wait: Wait | None
    done: bool

    def where(self) -> str | None:
        """Returns the current line of the kernel."""


def positions(threads: Iterable[Positioned]) -> str:
    """Returns what threads wait for, and where; those in one state together."""
    states: dict[str, list[str]] = {}
    for thread in threads:
        states.setdefault(_state(thread), []).append(thread.name)
    lines = [f"{some(names)}: {state}" for state, names in states.items()]
    if len(lines) > _LISTED_STATES:
        rest = list(states.values())[_LISTED_STATES:]
        lines[_LISTED_STATES:] = [f"... and {sum(map(len, rest))} more"]
    return "\n".join(lines)


def _state(thread: Positioned) -> str:
    if thread.done:
        return "has ended"
    if thread.wait is None:
        return f"runs at {thread.where()}"
    wait = thread.wait
    return f"waits for {wait.what} at {thread.where()}\n    {wait.state()}"


def some(names: list[str]) -> str:
    """Returns names of threads, as many as fit in a line."""
    more = len(names) - _LISTED_NAMES
    listed = ", ".join(names[:_LISTED_NAMES])
    return f"{listed} and {more} more" if more > 0 else listed

# SPDX-License-Identifier: Apache-2.0
"""Conditions that threads wait for, and the report of all threads' positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterable
from typing import Any, Protocol

# A report of thousands of threads would be unreadable.
_LISTED = 32


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
    """

    ready: Callable[[], bool]
    what: str
    state: Callable[[], str]
    for_threads: bool = False
    across_groups: bool = False


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
    """Returns a line per thread: its position and what it waits for."""
    threads = list(threads)
    lines = []
    for thread in threads[:_LISTED]:
        if thread.done:
            lines.append(f"{thread.name}: has ended")
        elif thread.wait is not None:
            lines.append(
                f"{thread.name}: waits for {thread.wait.what} at {thread.where()}\n"
                f"    {thread.wait.state()}"
            )
        else:
            lines.append(f"{thread.name}: runs at {thread.where()}")
    if len(threads) > _LISTED:
        lines.append(f"... and {len(threads) - _LISTED} more")
    return "\n".join(lines)

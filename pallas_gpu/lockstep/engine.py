# SPDX-License-Identifier: Apache-2.0
"""Threads of execution, what they wait for, and who runs next.

A strand is some warps that run in lockstep: those of a warpgroup, or a single warp
where warps go ways of their own. Strands are generators that yield what they wait for.
Asynchronous work completes when nobody can run any more: as late as the waits allow.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from pallas_gpu import errors
from pallas_gpu.errors import PtxError

LANES = 32


class DeadlockError(PtxError, errors.DeadlockError):
    """Nobody can run, and no asynchronous work is under way."""


class LivelockError(PtxError, errors.LivelockError):
    """A loop does not end."""


class RaceError(PtxError, errors.RaceError):
    """Nothing orders two accesses of the same bytes, or makes the first one visible."""


class OutOfBoundsError(PtxError, errors.OutOfBoundsError):
    """An access is out of bounds of the memory that its address belongs to."""


class BarrierError(PtxError, errors.BarrierError):
    """An mbarrier is used against its protocol."""


class SplitWarps(Exception):  # noqa: N818, not an error
    """The warps of a strand part: the kernel needs a strand for each warp."""


class Wait:
    """What a strand waits for: a condition, and words for the report."""

    def __init__(self, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        self.ready = ready
        self.what = what


class Poll(Wait):
    """What a strand asks again and again, instead of waiting for it."""


# What a strand runs.
Body = Generator[Wait, None, None]
# After how many turns in which nobody does anything but poll a run ends.
_POLLS = 10_000


class Work(Protocol):
    """Asynchronous work under way."""

    def complete(self) -> None:
        """Has its effects now."""


class Groups[T]:
    """The async-groups of a thread, or of several: those that are not waited for.

    Attributes:
      open: the work since the last group.
      groups: the groups, the oldest first.
      committed: how many groups there have been.
    """

    def __init__(self) -> None:
        self.open: list[T] = []
        self.groups: list[list[T]] = []
        self.committed = 0

    def commit(self) -> None:
        """Ends a group."""
        self.groups.append(self.open)
        self.open = []
        self.committed += 1

    def take(self, pending: int) -> list[list[T]]:
        """Removes all but the newest groups, and returns them."""
        count = max(len(self.groups) - pending, 0)
        older, self.groups = self.groups[:count], self.groups[count:]
        return older


class Strand:
    """Some warps of a block, and the values that their threads hold.

    Attributes:
      cta: the block.
      warps: their numbers in the block.
      rows: their numbers in the cluster, the rows of the clocks.
      threads: [lanes] numbers of the threads in the block.
      mask: [lanes] who is active; None when all are.
      env: values by slot.
    """

    def __init__(self, cta: Any, warps: Sequence[int], size: int) -> None:
        self.cta = cta
        self.warps = tuple(warps)
        self.rows = np.array([cta.first_row + w for w in warps])
        lanes = [LANES * w + np.arange(LANES) for w in warps]
        self.threads = np.concatenate(lanes).astype(np.uint32)
        self.row_of_lane = np.repeat(self.rows, LANES)
        self.mask: np.ndarray | None = None
        self.env: list[Any] = [None] * size
        # Groups of wgmma and of bulk copies; their files say what is in them.
        self.wgmma: Any = None

    @property
    def lanes(self) -> int:
        """Number of threads."""
        return len(self.threads)

    @property
    def name(self) -> str:
        """Who this is, for reports."""
        first, last = self.warps[0], self.warps[-1]
        warps = f"warp {first}" if first == last else f"warps {first}-{last}"
        return f"{self.cta.name} {warps}"

    def active(self) -> np.ndarray:
        """[lanes] bool: who runs the operation."""
        return np.ones(self.lanes, bool) if self.mask is None else self.mask

    @contextlib.contextmanager
    def where(self, condition: np.ndarray) -> Iterator[None]:
        """The operation runs in those active threads in which a predicate holds."""
        outer = self.mask
        self.mask = self.active() & self.per_lane(condition).astype(bool)
        try:
            yield
        finally:
            self.mask = outer

    def active_rows(self) -> np.ndarray:
        """The rows of the warps that have an active thread."""
        if self.mask is None:
            return self.rows
        return self.rows[self.mask.reshape(-1, LANES).any(axis=1)]

    def whole_warps(self, what: str) -> np.ndarray:
        """As `active_rows`; an error where only some lanes of a warp are active."""
        if self.mask is not None:
            each = self.mask.reshape(-1, LANES)
            if (each.any(axis=1) != each.all(axis=1)).any():
                raise PtxError(f"{what} is executed by some lanes of a warp only")
        return self.active_rows()

    def per_lane(self, value: Any) -> np.ndarray:
        """[lanes, ...]: a value with an entry for each thread."""
        value = np.asarray(value)
        if value.shape[0] == self.lanes:
            return value
        return np.repeat(value, self.lanes, axis=0)

    def uniform(self, value: Any) -> Any:
        """The one value that all active threads hold, as a Python number.

        Raises:
          SplitWarps: the warps of the strand hold different values.
        """
        value = np.asarray(value)
        if value.shape[0] > 1:
            held = value if self.mask is None else value[self.mask]
            if not (held == held[0]).all():
                if len(self.warps) > 1:
                    raise SplitWarps
                raise PtxError("the lanes of a warp differ where they have to agree")
            return held[0].item()
        return value[0].item()


class Scheduler:
    """Runs strands in turn, each until it waits.

    Attributes:
      in_flight: asynchronous work that completes by itself.
    """

    def __init__(self, seed: int = 0) -> None:
        self.in_flight: list[Work] = []
        self._random = random.Random(seed)

    def run(self, strands: Sequence[tuple[Strand, Body]]) -> None:
        """Runs all strands to their ends.

        Raises:
          DeadlockError: nobody can run.
        """
        waiting: dict[Strand, Wait | None] = {strand: None for strand, _ in strands}
        bodies = dict(strands)
        polls = 0
        while waiting:
            progress = polled = False
            for strand in list(waiting):
                wait = waiting[strand]
                if wait is not None and not wait.ready():
                    continue
                progress |= not isinstance(wait, Poll)
                polled |= isinstance(wait, Poll)
                try:
                    waiting[strand] = next(bodies[strand])
                except StopIteration:
                    del waiting[strand]
            if progress or self._complete_one():
                polls = 0
                continue
            polls += 1
            if waiting and (not polled or polls > _POLLS):
                raise _deadlock(waiting, bodies)

    def _complete_one(self) -> bool:
        """Completes some work; copies are in no order among each other."""
        if not self.in_flight:
            return False
        at = self._random.randrange(len(self.in_flight))
        self.in_flight.pop(at).complete()
        return True


def _deadlock(
    waiting: dict[Strand, Wait | None], bodies: dict[Strand, Body]
) -> DeadlockError:
    lines: list[str] = []
    wheres: list[str | None] = []
    for strand, wait in waiting.items():
        if wait is not None:
            where = _line_of(bodies[strand])
            wheres.append(where)
            at = f"\n    at {where}" if where else ""
            lines.append(f"  {strand.name} waits for {wait.what()}{at}")
    error = DeadlockError("deadlock\n" + "\n".join(lines))
    error.with_location(next(filter(None, wheres), None))
    return error


def _line_of(body: Body) -> str | None:
    """Returns the line at which a strand waits: blocks add theirs to an error."""
    error = DeadlockError("")
    with contextlib.suppress(PtxError):
        body.throw(error)
    return error.where

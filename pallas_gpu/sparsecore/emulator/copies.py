# SPDX-License-Identifier: Apache-2.0
"""Copies in flight: linear streams and DMAs, and rows that indices name.

A copy moves its data in pieces at any time between its start and the wait that covers
it: the seed decides. Its accesses are recorded as its own when it starts, so what is in
conflict with them before that wait is an error in every run. Indices in memory are read
with the rows that they name.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from pallas_gpu import errors
from pallas_gpu.emulator.engine import ordering
from pallas_gpu.emulator.engine.execution import report
from pallas_gpu.emulator.engine.memory import Region
from pallas_gpu.emulator.engine.operations.elements import known
from pallas_gpu.emulator.engine.poison import Origin
from pallas_gpu.emulator.engine.waits import Run
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.sparsecore.emulator.cores import Subcore
from pallas_gpu.sparsecore.emulator.memory import HBM_BYTES, Array
from pallas_gpu.sparsecore.emulator.semaphores import CopySemaphore
from pallas_gpu.sparsecore.primitives import copies
from pallas_gpu.sparsecore.types import HBM, MACHINE, SMEM, VMEM

_EMULATE = registry.RuleKind.EMULATE
# What a copy counts on its semaphore in, in bytes: a stream, and a DMA.
_WORD, _DMA = 4, 32
# In how many pieces a copy moves its data at most: an error shows in any of them.
_PIECES = 4
_WAIT = "wait for the copy first: call wait() of what async_copy returns"


@dataclasses.dataclass(slots=True, eq=False)
class Copy:
    """A copy that has been issued.

    Attributes:
      src, dst: what it copies to where; the whole table on the side of the indices.
      indices: of rows: a part of memory, or a vector; None without.
      indexed: the side that they refer to, `"src"` or `"dst"`.
      ignored: the index of rows that are not copied.
      add: whether it adds to the destination.
      pieces: the positions of the rows of each piece that is left; None for all rows.
      semaphore, amount: where it adds how much when it is complete.
      location: its line.
      done: whether it is complete.
    """

    src: Region
    dst: Region
    indices: Region | np.ndarray | None
    indexed: str | None
    ignored: int | None
    add: bool
    semaphore: CopySemaphore
    amount: int
    location: Any
    pieces: list[np.ndarray | None] = dataclasses.field(default_factory=list)
    done: bool = False

    @property
    def table(self) -> Region:
        """The side whose rows indices name."""
        return self.src if self.indexed == "src" else self.dst

    def rows(self) -> np.ndarray:
        """Returns the indices as they are now."""
        indices = self.indices
        return indices.peek() if isinstance(indices, Region) else indices  # type: ignore

    def chosen(self, rows: np.ndarray) -> np.ndarray:
        """Returns which of some indices name a row that is copied."""
        inside = (rows >= 0) & (rows < self.table.shape[0])
        return inside if self.ignored is None else inside & (rows != self.ignored)

    def advance(self) -> bool:
        """Moves a piece; the last one completes the copy."""
        if self.pieces:
            self._move(self.pieces.pop())
        if self.pieces:
            return False
        if not self.done:
            self.done = True
            self.semaphore.signal({}, self.amount, self.location)
        return True

    def leaves_unchanged(self, pending: dict[Copy, None], box: ordering.Box) -> bool:
        """True if it writes what a part of its destination contains.

        Copies in flight complete first: they have no order with this one.
        """
        if self.add or self.src.missing() is not None:
            return False
        for copy in [other for other in pending if other is not self]:
            while not copy.advance():
                pass
        memory = self.dst.memory
        at = tuple(slice(low, high) for low, high in box)
        if memory.written is not None and not memory.written[at].all():
            return False
        before = memory.data[at].tobytes()
        after = Array("", memory.data.copy(), None, memory.space, None)
        there = dataclasses.replace(self, dst=Region(after, self.dst.place))
        there._move(None)
        return after.data[at].tobytes() == before

    def _move(self, piece: np.ndarray | None) -> None:
        src: Any = ... if piece is None else piece
        dst = src
        if self.indices is not None:
            rows = self.rows()
            at = np.arange(len(rows)) if piece is None else piece
            at = at[self.chosen(rows[at])]
            named = rows[at].astype(np.int64)
            src, dst = (named, at) if self.indexed == "src" else (at, named)
        value, present = self._load(src)
        self._store(dst, value, present)

    def _load(self, at: Any) -> tuple[np.ndarray, Any]:
        memory = self.src.memory
        value = np.array(self.src.view(memory.data)[at])
        written = memory.written
        return value, True if written is None else self.src.view(written)[at]

    def _store(self, at: Any, value: np.ndarray, present: Any) -> None:
        memory = self.dst.memory
        data = self.dst.view(memory.data)
        if self.add:
            np.add.at(data, at, value)
            return
        data[at] = value
        if memory.written is not None:
            self.dst.view(memory.written)[at] = present


def size(src: Region, dst: Region) -> int:
    """Returns what a copy adds to its semaphore: words, of a DMA units of 32 bytes."""
    moved = dst if dst.memory.space is VMEM else src
    spaces = src.memory.space, dst.memory.space
    unit = _WORD if VMEM in spaces and SMEM not in spaces else _DMA
    return -(-math.prod(moved.shape) * moved.dtype.itemsize // unit)


def _described(
    thread: Subcore, operands: dict[str, Any], params: dict[str, Any]
) -> Copy:
    src, dst = operands["src"], operands["dst"]
    moved = (dst, src) if params["indexed"] == "src" else (src, dst)
    return Copy(
        src, dst, operands["indices"], params["indexed"], params["ignored_value"],
        params.get("add", False), operands["semaphore"].memory.one(
            operands["semaphore"]
        ),
        size(*moved), thread.location,
    )  # fmt: skip


@registry.register(copies.copy_wait_p, _EMULATE, MACHINE)
def _wait(thread: Subcore, operands: dict[str, Any], **params: Any) -> Run:
    copy = _described(thread, operands, params)
    yield from copy.semaphore.wait(thread, copy.amount)


@registry.register(copies.copy_start_p, _EMULATE, MACHINE)
def _start(thread: Subcore, operands: dict[str, Any], **params: Any) -> None:
    copy = _described(thread, operands, params)
    if not isinstance(copy.indices, Region | None):
        copy.indices = np.asarray(known(copy.indices))
    possible = _require_possible(copy)
    actor = thread.execution.actors.other()
    if possible:
        _record(thread, copy, actor)
        _require_values(copy)
        copy.pieces = _pieces(thread, copy)
    released = thread.release() | {actor: 1}
    what = f"the copy from {copy.src.memory.name} to {copy.dst.memory.name}"
    copy.semaphore.issue(released, copy.amount, what, thread.location)
    pending = _pending(thread)
    pending[copy] = None
    thread.group.in_flight.submit(copy)


def _pending(thread: Subcore) -> dict[Copy, None]:
    """Returns the copies in flight of all cores, without those that are complete."""
    pending: dict[Copy, None] = thread.core.device.pending
    for copy in [copy for copy in pending if copy.done]:
        del pending[copy]
    return pending


def _pieces(thread: Subcore, copy: Copy) -> list[np.ndarray | None]:
    """Returns the pieces in which a copy moves its data, as the seed decides."""
    choices = thread.execution.choices
    count = (
        len(copy.rows()) if copy.indices is not None else math.prod(copy.src.shape[:1])
    )
    most = min(_PIECES, count)
    if thread.execution.touches is not None or most < 2:
        return [None]
    number = choices.randint(1, most)
    order = np.arange(count)
    if copy.indices is not None:
        shuffled = order.tolist()
        choices.shuffle(shuffled)
        order = np.array(shuffled)
    return [*np.array_split(order, number)] if number > 1 else [None]


# --- requirements ---------------------------------------------------------------------


def _require_possible(copy: Copy) -> bool:
    """Reports a copy outside its arrays, and positions that HBM does not have.

    Returns:
      Whether all that is left of it can be moved.
    """
    sides = {"read by a copy": copy.src, "written by a copy": copy.dst}
    for verb, region in sides.items():
        region.require_in_bounds(verb)
        _require_aligned(region)
    indices = copy.indices
    if isinstance(indices, Region):
        indices.require_in_bounds("read by a copy")
        sides["indices"] = indices
    return all(region.outside() is None for region in sides.values())


def _require_aligned(region: Region) -> None:
    if region.memory.space is not HBM or not region.window.sizes:
        return
    axis, window = len(region.window.sizes) - 1, region.window
    start = window.starts[axis] * region.dtype.itemsize
    if start % HBM_BYTES == 0:
        return
    unit = max(1, HBM_BYTES // region.dtype.itemsize)
    error = errors.LayoutError(
        f"a copy of {region.memory.name} starts at a position that is not a multiple "
        f"of {HBM_BYTES} bytes",
        expected=f"a multiple of {unit} elements in dimension {axis}",
        got=f"element {window.starts[axis]}: {start} bytes",
        hint="copy from the multiple before it, and use the part that is needed; pad "
        "what each subcore stores to 32 bytes",
    )
    report(error.about(buffer=region.memory.name, elements=region.box()))


def _require_values(copy: Copy) -> None:
    """Reports poison that a copy adds to, or stores to a result."""
    src, dst = copy.src, copy.dst
    src_at: Any = ...
    dst_at: Any = ...
    if copy.indices is not None:
        rows = copy.rows()
        at = np.flatnonzero(copy.chosen(rows))
        rows = rows[at].astype(np.int64)
        src_at, dst_at = (rows, at) if copy.indexed == "src" else (at, rows)
        if copy.indexed == "dst" and not copy.add:
            _require_one_value(copy, rows, at)
    if copy.add or not dst.memory.admits_poison:
        _require_part(src, src_at)
    if copy.add:
        _require_part(dst, dst_at)


def _require_part(region: Region, at: Any) -> None:
    missing = region.missing()
    if missing is None:
        return
    mask = np.zeros(region.shape, np.bool_)
    mask[at] = missing[at]
    if mask.any():
        origin: Origin = region.origin(mask, None)
        report(origin.error())


def _require_one_value(copy: Copy, rows: np.ndarray, at: np.ndarray) -> None:
    """Reports different values that a plain scatter stores in one row."""
    order = np.argsort(rows, kind="stable")
    rows, at = rows[order], at[order]
    value = copy.src.peek()
    for i in np.flatnonzero(rows[1:] == rows[:-1]):
        if value[at[i]].tobytes() == value[at[i + 1]].tobytes():
            continue
        name = copy.dst.memory.name
        error = errors.RaceError(
            f"a copy stores different values in row {rows[i]} of {name}",
            expected="indices that name each row once, or equal values: which of them "
            "remains is not defined",
            got=f"rows {at[i]} and {at[i + 1]} of the copy have index {rows[i]}",
            hint="let one of the indices be the ignored_value of plsc.Indices, or add "
            "to VMEM_SHARED with add=True",
        )
        report(error.about(rule="repeated-index", buffer=name))
        return


# --- what it accesses -----------------------------------------------------------------


def _record(thread: Subcore, copy: Copy, actor: int) -> None:
    """Records all accesses of a copy as its own."""
    src, dst = copy.src.memory.name, copy.dst.memory.name
    pending = thread.core.device.pending
    unchanged = functools.partial(copy.leaves_unchanged, pending)

    def access(region: Region, writes: bool, atomic: bool = False) -> None:
        what = f"the copy from {src}" if writes else f"the copy to {dst}"
        thread.access(
            region, writes=writes, what=what, by=(actor, 1), hint=_WAIT,
            generic=True, atomic=atomic, unchanged=unchanged if writes else None,
        )  # fmt: skip

    parts: dict[str, list[Region]] = {"src": [copy.src], "dst": [copy.dst]}
    if isinstance(copy.indices, Region):
        access(copy.indices, False)
        copy.indices.require_written()
    if copy.indexed is not None:
        parts[copy.indexed] = [*_named(copy)]
    for region in parts["src"]:
        access(region, False)
    for region in parts["dst"]:
        access(region, True, copy.add)


def _named(copy: Copy) -> Iterator[Region]:
    """Yields parts of the table that consist of the rows that are copied."""
    rows, table = copy.rows(), copy.table
    chosen = copy.chosen(rows)
    lost = rows[~chosen]
    if copy.ignored is not None:
        lost = lost[lost != copy.ignored]
    if lost.size:
        _report_outside(copy, int(lost[0]))
    if table.memory.read_only or not chosen.any():
        return
    unique = np.unique(rows[chosen])
    runs = np.split(unique, np.flatnonzero(np.diff(unique) != 1) + 1)
    zeros, rest = (0,) * (len(table.shape) - 1), table.shape[1:]
    for run in runs:
        place = table.place.slice((int(run[0]), *zeros), (len(run), *rest))
        yield Region(table.memory, place)


def _report_outside(copy: Copy, index: int) -> None:
    name, count = copy.table.memory.name, copy.table.shape[0]
    verb = "read" if copy.indexed == "src" else "written"
    error = errors.OutOfBoundsError(
        f"an index of a copy names a row outside of {name}, which is {verb}",
        expected=f"indices 0 to {count - 1}"
        + ("" if copy.ignored is None else f", or {copy.ignored}, which is ignored"),
        got=index,
        hint="check the indices; rows to be left out have the ignored_value of "
        "plsc.Indices",
    )
    report(error.about(buffer=name))

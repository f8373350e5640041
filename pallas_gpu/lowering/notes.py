# SPDX-License-Identifier: Apache-2.0
"""Notes of what is emitted for each operation, for those who ask why a kernel is slow.

While `recording`, rules note each access and each conversion, and the code carries a
number for each operation where it would have the file and the line: what ptxas reports
of an instruction leads back to the operation, in code of this package too. Otherwise
nothing is noted, and nothing computed.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator

from pallas_gpu.program.nodes import Op


@dataclasses.dataclass(frozen=True)
class Access:
    """Loads or stores of a part of an array by the threads of a warpgroup.

    Attributes:
      kind: "load" or "store".
      memory: "SMEM" or "GMEM".
      what: dtype, part and shape of the array.
      instruction: the family of PTX, such as `ld.shared`.
      width_bytes: of a thread's access.
      wide_bytes: of one at a start that is known to be aligned.
      transactions: of SMEM the wavefronts of an instruction of a warp, of GMEM the
        sectors; None where they depend on values.
      ideal: the fewest that the bytes take.
      by_element: whether an address is computed for each element.
      is_internal: whether the array is scratch of this package.
      cycles: of one execution by a warpgroup, at most; those of `layouts.moves.rates`.
    """

    kind: str
    memory: str
    what: str
    instruction: str
    width_bytes: int
    wide_bytes: int
    transactions: float | None
    ideal: float
    by_element: bool
    is_internal: bool
    cycles: float


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy by threads between GMEM and SMEM, in chunks.

    Attributes:
      what: dtype, part and shape of the array in GMEM.
      chunk_bytes: of a thread's access.
      is_asynchronous: whether cp.async copies the chunks.
      chunks: their number.
    """

    what: str
    chunk_bytes: int
    is_asynchronous: bool
    chunks: int


@dataclasses.dataclass(frozen=True)
class Conversion:
    """Data that moves between the registers of threads.

    Attributes:
      what: dtype and shape.
      source, target: the layouts; the target is empty where only data moves.
      shared_bytes: SMEM through which it goes; 0 for shuffles.
      cycles: of one execution by a warpgroup.
    """

    what: str
    source: str
    target: str
    shared_bytes: int
    cycles: float


Note = Access | Copy | Conversion


class Notes:
    """The notes of one kernel.

    Attributes:
      found: the notes of each operation; alike ones once, as code may be emitted
        repeatedly.
    """

    def __init__(self) -> None:
        self.found: dict[Op, dict[Note, None]] = {}
        self._around: list[Op] = []
        self._numbers: dict[Op, int] = {}

    def enter(self, op: Op) -> None:
        """Called before an operation is lowered."""
        self._around.append(op)

    def leave(self) -> None:
        """Called after an operation has been lowered."""
        self._around.pop()

    def add(self, note: Note) -> None:
        """Notes something of the operation that is lowered."""
        self.found.setdefault(self._around[-1], {})[note] = None

    def number(self, op: Op) -> int:
        """Returns the number that the code of an operation has as its line."""
        return self._numbers.setdefault(op, len(self._numbers) + 1)

    def numbered(self) -> dict[int, Op]:
        """Returns the operations by their numbers."""
        return {number: op for op, number in self._numbers.items()}


_NOTES: contextvars.ContextVar[Notes | None] = contextvars.ContextVar(
    "pallas_gpu_notes", default=None
)


def current() -> Notes | None:
    """Returns the notes that are being taken; None if nobody asks for them."""
    return _NOTES.get()


def take(note: Callable[[], Note | None]) -> None:
    """Notes what a function returns, which is called only if somebody asks for it."""
    notes = _NOTES.get()
    if notes is not None and (found := note()) is not None:
        notes.add(found)


@contextlib.contextmanager
def recording() -> Iterator[Notes]:
    """Takes notes of what is lowered inside."""
    token = _NOTES.set(found := Notes())
    try:
        yield found
    finally:
        _NOTES.reset(token)


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Takes no notes of what is emitted inside and erased."""
    token = _NOTES.set(None)
    try:
        yield
    finally:
        _NOTES.reset(token)

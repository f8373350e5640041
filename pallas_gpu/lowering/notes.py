# SPDX-License-Identifier: Apache-2.0
"""Notes of what is emitted for each operation, and what is slow about it.

The compiler warns of that, and `explain` reports it with its time. While `recording`,
rules note each access and each conversion, and the code carries a number for each
operation where it would have the file and the line: what ptxas reports of an
instruction leads back to the operation, in code of this package too.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

from pallas_gpu.entry.scope import setting
from pallas_gpu.layouts.moves import rates
from pallas_gpu.layouts.registers.linear import WARP_LANES
from pallas_gpu.program.nodes import Op

# The widest access of a thread (PTX ISA, ld and cp.async).
_WIDEST_BYTES = 16
# Sectors for one that elements take: a layout that suits what follows may take 2, and
# the L1 cache has what other accesses of the same load need of a sector.
_SCATTERED = 4


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a note says: a warning of the compiler, or a finding of `explain`.

    Attributes:
      kind: of the finding.
      what: in one sentence, with figures.
      hint: what to do; None if nothing is slow.
      lost: the part of its time that better code would save.
    """

    kind: str
    what: str
    hint: str | None = None
    lost: float = 0.0


@dataclasses.dataclass(frozen=True)
class Access:
    """Loads or stores of a part of an array by the threads of a warpgroup.

    Attributes:
      kind: "load" or "store".
      memory: "SMEM" or "GMEM".
      got: dtype, part and shape of the array.
      instruction: the family of PTX, such as `ld.shared`.
      width_bytes: of a thread's access.
      wide_bytes: of one at a start that is known to be aligned.
      transactions: of SMEM the wavefronts of an instruction of a warp, of GMEM the
        sectors; None where they depend on values.
      ideal: the fewest that the bytes take.
      cycles: of one execution by a warpgroup, at most; those of `layouts.moves.rates`.
        0 for an access to GMEM while nobody takes notes.
      wasted: of GMEM the sectors of the whole access for one that its elements take.
      tolerated: wavefronts for one that the bytes take, which are no bank conflict.
      by_element: whether an address is computed for each element.
      is_internal: whether the array is scratch of this package.
    """

    kind: str
    memory: str
    got: str
    instruction: str
    width_bytes: int
    wide_bytes: int
    transactions: float | None
    ideal: float
    cycles: float
    wasted: float = math.inf
    tolerated: float = 1.0
    by_element: bool = False
    is_internal: bool = False

    @property
    def verdict(self) -> Verdict:
        name = f"a {self.kind} of {self.memory}"
        width, wide = self.width_bytes, self.wide_bytes
        ratio = 1.0 if self.transactions is None else self.transactions / self.ideal
        ratio = min(ratio, self.wasted)
        if self.by_element:
            return Verdict(
                "element-access",
                f"{name} computes an address for each element",
                "access slices, and of a tiled array whole tiles: start at multiples "
                "of the tile, and write a dynamic start as a product, or as "
                "plgpu.multiple_of(start, rows)",
                1 - width / _WIDEST_BYTES,
            )
        if self.memory == "SMEM" and ratio > self.tolerated:
            return Verdict(
                "bank-conflicts",
                f"{name} has {ratio:g}-way bank conflicts",
                "declare the array with a tiling and a swizzle, or with another minor "
                f"dimension; or accept it with plgpu.{self.kind}(..., optimized=False)",
                1 - 1 / ratio,
            )
        if width < wide:
            return Verdict(
                "narrow-access",
                f"{name} takes {width} bytes of each thread at a time, and {wide} "
                "where its start is known to be a multiple",
                "write a dynamic start as a product, or as plgpu.multiple_of",
                1 - width / wide,
            )
        if self.memory == "GMEM" and ratio >= _SCATTERED:
            return Verdict(
                "uncoalesced",
                f"{name} is not coalesced: {self.transactions:g} sectors a request "
                f"where {self.ideal:g} would do",
                "let the threads of a warp access adjacent elements: more of the minor "
                "dimension in a block, or whole rows by way of SMEM",
                1 - 1 / ratio,
            )
        what = f"{name} by {self.instruction}, {width} bytes of each thread"
        return Verdict("access", what)

    @property
    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "memory": self.memory,
            "kind": self.kind,
            "instruction": self.instruction,
            "width_bytes": self.width_bytes,
            "internal": self.is_internal,
        }
        if self.transactions is not None:
            unit = "wavefronts" if self.memory == "SMEM" else "sectors"
            facts[f"{unit}_per_request"] = self.transactions
            facts[f"ideal_{unit}"] = self.ideal
        return facts


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy by threads between GMEM and SMEM, in chunks.

    Attributes:
      got: dtype, part and shape of the array in GMEM.
      chunk_bytes: of a thread's access.
      is_asynchronous: whether cp.async copies the chunks.
      chunks: their number.
    """

    got: str
    chunk_bytes: int
    is_asynchronous: bool
    chunks: int
    is_internal = False

    @property
    def cycles(self) -> float:
        """Of one execution. An instruction of a warp moves a chunk for each lane."""
        requests = self.chunks / WARP_LANES
        moved = self._bytes / rates.GMEM_BYTES_PER_CYCLE
        cycles = max(moved, requests * rates.GMEM_INSTRUCTION)
        return cycles if self.is_asynchronous else cycles + 2 * requests

    @property
    def verdict(self) -> Verdict:
        width = self.chunk_bytes
        what = (
            f"threads copy {self._bytes} bytes by {self._path}, {width} "
            f"byte{'s' * (width > 1)} at a time"
        )
        if width >= _WIDEST_BYTES:
            return Verdict("copy", what)
        widest = min(rates.GMEM_BYTES_PER_CYCLE, WARP_LANES * _WIDEST_BYTES)
        return Verdict(
            "narrow-access",
            what,
            "start and end rows at multiples of 16 bytes, or of 4 for cp.async: pad "
            "the array's minor dimension",
            max(1 - self._bytes / widest / self.cycles, 0.0),
        )

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "path": self._path,
            "bytes": self._bytes,
            "width_bytes": self.chunk_bytes,
        }

    @property
    def _bytes(self) -> int:
        return self.chunks * self.chunk_bytes

    @property
    def _path(self) -> str:
        return "cp.async" if self.is_asynchronous else "ld and st"


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
    is_internal = False

    @property
    def got(self) -> str:
        return f"{self.source} -> {self.target}" if self.target else self.what

    @property
    def verdict(self) -> Verdict:
        way = "through SMEM" if self.shared_bytes else "by shuffles"
        if not self.target:
            # What a reduction or a slice moves has to move.
            return Verdict("conversion", f"data moves between threads {way}")
        return Verdict(
            "conversion",
            f"{self.what} is converted to another layout {way}",
            "convert before the loop what does not change in it; store to SMEM what "
            "operations need in several layouts, and load it in each",
            1.0,
        )

    @property
    def facts(self) -> dict[str, Any]:
        facts = dataclasses.asdict(self)
        del facts["what"]
        return facts


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

# Whether what is emitted will be erased.
ON_TRIAL: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "pallas_gpu_on_trial", default=False
)


def current() -> Notes | None:
    """Returns the notes that are being taken; None if nobody asks for them."""
    return None if ON_TRIAL.get() else _NOTES.get()


def take(note: Callable[[], Note | None]) -> None:
    """Notes what a function returns, which is called only if somebody asks for it."""
    notes = current()
    if notes is not None and (found := note()) is not None:
        notes.add(found)


@contextlib.contextmanager
def recording() -> Iterator[Notes]:
    """Takes notes of what is lowered inside."""
    with setting(_NOTES, found := Notes()):
        yield found


def on_trial() -> contextlib.AbstractContextManager[None]:
    """Takes no notes of what is emitted inside and erased, and warns of nothing."""
    return setting(ON_TRIAL, True)

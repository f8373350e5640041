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
import math
from collections.abc import Callable, Iterator
from typing import Any

from pallas_gpu.emitters import gmem, smem
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.layouts.gmem.thread_copy import ThreadCopy
from pallas_gpu.layouts.moves import costs, rates
from pallas_gpu.layouts.registers.linear import WARP_LANES, WARPS
from pallas_gpu.layouts.registers.placement import Placement, describe
from pallas_gpu.layouts.smem.access_plan import AccessPlan, Kind
from pallas_gpu.program.nodes import Op

_BANK_BYTES_PER_WAVEFRONT = 128


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
      wasted: of GMEM the sectors of the whole access for one that its elements take.
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
    wasted: float
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


# --- what notes say -----------------------------------------------------------------


def access(
    view: smem.SmemView | gmem.GmemView, layout: Placement, kind: Kind
) -> Access:
    """Returns the note of an access by vectors or matrices."""
    if isinstance(view, gmem.GmemView):
        return _of_gmem(view, layout, kind)
    plan = smem.plan(view, layout, kind)
    wide = smem.plan(view, layout, kind, aligned=True)
    itemsize = dtypes.stored_bits(view.dtype) / 8
    wavefronts = WARPS * len(plan.instructions) * plan.wavefronts_per_access
    return Access(
        kind,
        "SMEM",
        described(view),
        _shared_instruction(plan),
        math.ceil(plan.elements_per_access * itemsize),
        math.ceil(wide.elements_per_access * itemsize),
        plan.wavefronts_per_access,
        plan.ideal_wavefronts,
        1.0,
        False,
        view.internal,
        wavefronts * rates.SMEM_WAVEFRONT,
    )


def _shared_instruction(plan: AccessPlan) -> str:
    if plan.method == "matrix":
        return "ldmatrix" if plan.kind == "load" else "stmatrix"
    return "ld.shared" if plan.kind == "load" else "st.shared"


def _of_gmem(view: gmem.GmemView, layout: Placement, kind: Kind) -> Access:
    bits = dtypes.stored_bits(view.dtype)
    taken, aligned = gmem.access_widths(view, layout)
    requests, window = gmem.requests(view, layout), view.window
    cycles = costs.gmem_access_cost(
        window.shape, window.strides, layout, bits, window.start_multiple
    )
    each: tuple[float | None, float] = (None, 1.0)
    if requests is not None:
        each = (
            requests.sectors / requests.number,
            requests.ideal_sectors / requests.number,
        )
    return Access(
        kind,
        "GMEM",
        described(view),
        "ld.global" if kind == "load" else "st.global",
        math.ceil(taken * bits / 8),
        math.ceil(aligned * bits / 8),
        *each,
        1.0 if requests is None else requests.wasted,
        False,
        False,
        cycles or 0.0,
    )


def by_element(
    view: Any, layout: Placement | None, kind: Kind, adjacent: int = 1
) -> Access:
    """Returns the note of an access that computes the address of each element.

    Args:
      layout: of the array in registers; None for one element.
      adjacent: how many elements are accessed at a time.
    """
    in_smem = isinstance(view, smem.SmemView)
    bits = dtypes.stored_bits(view.dtype)
    cycles = 1.0
    if layout is not None:
        elements = layout.num_registers * layout.vector_length
        moved = elements * WARPS * WARP_LANES * bits / 8 / rates.GMEM_BYTES_PER_CYCLE
        cycles = costs.element_access_cost(layout, bits) / adjacent
        cycles = max(cycles, 0.0 if in_smem else moved)
    what = described(view)
    if layout is not None and layout.shape != tuple(view.window.sizes):
        what = f"{list(layout.shape)} elements of {what}"
    unit = _BANK_BYTES_PER_WAVEFRONT if in_smem else rates.SECTOR_BYTES
    width = max(adjacent * bits // 8, 1)
    return Access(
        kind,
        "SMEM" if in_smem else "GMEM",
        what,
        ("ld" if kind == "load" else "st") + (".shared" if in_smem else ".global"),
        width,
        width,
        None,
        max(WARP_LANES * width / unit, 1.0),
        1.0,
        adjacent == 1,
        in_smem and view.internal,
        cycles,
    )


def copy(plan: ThreadCopy, view: gmem.GmemView, rows: int | None = None) -> Copy:
    """Returns the note of a copy by threads.

    Args:
      rows: how many rows of the view, each of them planned; None: it is planned whole.
    """
    what, chunks = described(view), plan.chunks
    if rows is not None:
        what, chunks = f"{rows} rows of {what}", chunks * rows
    return Copy(what, plan.chunk_bytes, plan.is_asynchronous, chunks)


def conversion(
    x: Any, target: Placement, scratch_bytes: int, wanted_bytes: int
) -> Conversion:
    """Returns the note of a conversion of an array to another layout."""
    bits = dtypes.bits(x.dtype)
    cycles = costs.relayout_cost(x.layout, target, bits, scratch_bytes)
    return Conversion(
        f"{x.dtype}{list(x.shape)}",
        describe(x.layout),
        describe(target),
        wanted_bytes,
        cycles or 0.0,
    )


def exchange(wanted_bytes: int) -> Conversion:
    """Returns the note of data that moves between threads through SMEM."""
    moved = 2 * wanted_bytes / _BANK_BYTES_PER_WAVEFRONT * rates.SMEM_WAVEFRONT
    return Conversion(
        f"{wanted_bytes} bytes", "", "", wanted_bytes, moved + costs.EXCHANGE_CYCLES
    )


def described(view: Any) -> str:
    """Returns dtype, part and shape of the array of a view."""
    shape, starts = view.window.array_shape, view.window.starts
    known = ", ".join(str(s) if isinstance(s, int) else "?" for s in starts)
    dtype = dtypes.memory_dtype(view.dtype)
    return f"{dtype}{list(view.window.sizes)} at ({known}) of shape {shape}"

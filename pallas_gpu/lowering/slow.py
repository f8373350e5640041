# SPDX-License-Identifier: Apache-2.0
"""Notes of what is emitted, and Python warnings of what is slow, once per line.

Nothing is refused for its speed unless its author asks for that.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

from pallas_gpu import errors
from pallas_gpu.emitters import gmem, padding, smem
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.layouts.gmem.thread_copy import ThreadCopy
from pallas_gpu.layouts.moves import costs, rates
from pallas_gpu.layouts.registers.linear import WARP_LANES, WARPS
from pallas_gpu.layouts.registers.placement import Placement
from pallas_gpu.layouts.smem.access_plan import Kind
from pallas_gpu.lowering import notes
from pallas_gpu.lowering.notes import Access, Copy, Note

# Python's memory of the warnings that have been shown, by text and line.
_SHOWN: dict[Any, Any] = {}
# CUDA programming guide, compute capabilities: the most registers of a thread.
_MOST_REGISTERS, _REGISTER_BITS = 255, 32
# The default layouts of odd shapes have conflicts of two lanes, which no other layout
# of theirs avoids without more registers.
_TOLERATED_WITH_PADDING = 2.0
_OPCODES = {"load": "ld", "store": "st"}

Line = Callable[[], str | None]


def copied_by_threads(
    plan: ThreadCopy, view: gmem.GmemView, where: Line, rows: int | None = None
) -> None:
    """Notes a copy by threads, and warns if its parts are too narrow for cp.async.

    Args:
      rows: how many rows of the view, for each of which the plan is; None: it is whole.
    """
    what, chunks = described(view), plan.chunks
    if rows is not None:
        what, chunks = f"{rows} rows of {what}", chunks * rows
    note = Copy(what, plan.chunk_bytes, plan.is_asynchronous, chunks)
    notes.take(lambda: note)
    if not plan.is_asynchronous:
        warn_of(note, note.got, where)


def warn_of(note: Note, got: str, where: Line) -> None:
    """Warns of what a note says, if it is slow."""
    if (found := note.verdict).hint is not None:
        warn(found.what, got, found.hint, where)


# --- the notes of accesses and moves --------------------------------------------------


def of_view(
    view: smem.SmemView | gmem.GmemView, layout: Placement, kind: Kind
) -> Access:
    """Returns the note of an access by vectors or matrices."""
    if isinstance(view, gmem.GmemView):
        return _of_gmem(view, layout, kind)
    plan = smem.plan(view, layout, kind)
    wide = smem.plan(view, layout, kind, aligned=True)
    itemsize = dtypes.stored_bits(view.dtype) / 8
    way = "matrix" if plan.method == "matrix" else ".shared"
    wavefronts = WARPS * len(plan.instructions) * plan.wavefronts_per_access
    return Access(
        kind,
        "SMEM",
        described(view),
        _OPCODES[kind] + way,
        math.ceil(plan.elements_per_access * itemsize),
        math.ceil(wide.elements_per_access * itemsize),
        plan.wavefronts_per_access,
        plan.ideal_wavefronts,
        wavefronts * rates.SMEM_WAVEFRONT,
        tolerated=_TOLERATED_WITH_PADDING if padding.is_padded(layout) else 1.0,
        is_internal=view.internal,
    )


def _of_gmem(view: gmem.GmemView, layout: Placement, kind: Kind) -> Access:
    bits = dtypes.stored_bits(view.dtype)
    taken, aligned = gmem.access_widths(view, layout)
    requests, window, cycles = gmem.requests(view, layout), view.window, None
    if notes.current() is not None:
        cycles = costs.gmem_access_cost(
            window.shape, window.strides, layout, bits, window.start_multiple
        )
    few = math.prod(window.sizes) < WARP_LANES  # their latency counts
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
        _OPCODES[kind] + ".global",
        math.ceil(taken * bits / 8),
        math.ceil(aligned * bits / 8),
        *each,
        cycles or 0.0,
        1.0 if requests is None or few else requests.wasted,
    )


def by_element(
    view: Any, layout: Placement | None, kind: Kind, adjacent: int | None = None
) -> Access:
    """Returns the note of an access that computes the address of each element.

    Args:
      layout: of the array in registers; None for one element.
      adjacent: how many of the elements that indices name are accessed at a time;
        None: the elements are a part of an array.
    """
    in_smem = isinstance(view, smem.SmemView)
    bits = dtypes.stored_bits(view.dtype)
    cycles = 1.0
    if layout is not None:
        elements = layout.num_registers * layout.vector_length
        moved = elements * WARPS * WARP_LANES * bits / 8 / rates.GMEM_BYTES_PER_CYCLE
        cycles = costs.element_access_cost(layout, bits) / (adjacent or 1)
        cycles = max(cycles, 0.0 if in_smem else moved)
    unit = rates.WAVEFRONT_BYTES if in_smem else rates.SECTOR_BYTES
    width, what = max((adjacent or 1) * bits // 8, 1), described(view)
    if adjacent is not None and layout is not None:
        what = f"{list(layout.shape)} elements of {what}"
    return Access(
        kind,
        "SMEM" if in_smem else "GMEM",
        what,
        _OPCODES[kind] + (".shared" if in_smem else ".global"),
        width,
        width,
        None,
        max(WARP_LANES * width / unit, 1.0),
        cycles,
        by_element=adjacent is None,
        is_internal=in_smem and view.internal,
    )


def described(view: Any) -> str:
    """Returns dtype, part and shape of the array of a view."""
    shape, starts = view.window.array_shape, view.window.starts
    known = ", ".join(str(s) if isinstance(s, int) else "?" for s in starts)
    dtype = dtypes.memory_dtype(view.dtype)
    return f"{dtype}{list(view.window.sizes)} at ({known}) of shape {shape}"


# --- other warnings -------------------------------------------------------------------


def too_large(view: Any, layout: Placement, where: Line) -> None:
    """Warns of an array that does not fit the registers of a warpgroup."""
    bits = max(dtypes.bits(view.dtype), 8)
    taken = layout.num_registers * layout.vector_length * bits // _REGISTER_BITS
    if taken > _MOST_REGISTERS:
        warn(
            "an array is larger than the registers of a warpgroup: "
            f"{taken} registers of each thread, which has {_MOST_REGISTERS}; unless "
            "elements are used one after the other, ptxas spills, which a warning "
            "after compilation then says",
            described(view),
            "load it in parts, or use more warpgroups",
            where,
        )


def warn(what: str, got: str, hint: str, where: Line) -> None:
    """Emits a warning unless it has been shown for this line.

    What has no line is code of this package, which no user can change.
    """
    place = where()
    if place is None or notes.ON_TRIAL.get():
        return
    text = f"{what} ({place})\n  got:   {got}\n  hint:  {hint}"
    show(text, errors.PerformanceWarning, place)


def show(text: str, category: type[Warning], place: str) -> None:
    """Emits a warning about a line, `file:line (name)`, unless it has been shown."""
    file, _, rest = place.partition(":") if "://" not in place else (place, "", "0")
    number = rest.split(" ", 1)[0]
    line = int(number) if number.isdigit() else 0
    warnings.warn_explicit(text, category, file, line, file, _SHOWN)

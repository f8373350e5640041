# SPDX-License-Identifier: Apache-2.0
"""What notes say of accesses, copies by threads and conversions that are emitted."""

from __future__ import annotations

import math
from typing import Any

from pallas_gpu.emitters import gmem, smem
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.layouts.gmem.thread_copy import ThreadCopy
from pallas_gpu.layouts.moves import costs, rates
from pallas_gpu.layouts.registers.linear import WARP_LANES, WARPS
from pallas_gpu.layouts.registers.placement import Placement, describe
from pallas_gpu.layouts.smem.access_plan import AccessPlan, Kind
from pallas_gpu.lowering import notes

_BANK_BYTES_PER_WAVEFRONT = 128


def access(
    view: smem.SmemView | gmem.GmemView, layout: Placement, kind: Kind
) -> notes.Access:
    """Returns the note of an access by vectors or matrices."""
    if isinstance(view, gmem.GmemView):
        return _of_gmem(view, layout, kind)
    plan = smem.plan(view, layout, kind)
    wide = smem.plan(view, layout, kind, aligned=True)
    itemsize = dtypes.stored_bits(view.dtype) / 8
    wavefronts = WARPS * len(plan.instructions) * plan.wavefronts_per_access
    return notes.Access(
        kind,
        "SMEM",
        described(view),
        _shared_instruction(plan),
        math.ceil(plan.elements_per_access * itemsize),
        math.ceil(wide.elements_per_access * itemsize),
        plan.wavefronts_per_access,
        plan.ideal_wavefronts,
        False,
        view.internal,
        wavefronts * rates.SMEM_WAVEFRONT,
    )


def _shared_instruction(plan: AccessPlan) -> str:
    if plan.method == "matrix":
        return "ldmatrix" if plan.kind == "load" else "stmatrix"
    return "ld.shared" if plan.kind == "load" else "st.shared"


def _of_gmem(view: gmem.GmemView, layout: Placement, kind: Kind) -> notes.Access:
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
    return notes.Access(
        kind,
        "GMEM",
        described(view),
        "ld.global" if kind == "load" else "st.global",
        math.ceil(taken * bits / 8),
        math.ceil(aligned * bits / 8),
        *each,
        False,
        False,
        cycles or 0.0,
    )


def by_element(
    view: Any, layout: Placement | None, kind: Kind, adjacent: int = 1
) -> notes.Access:
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
    unit = _BANK_BYTES_PER_WAVEFRONT if in_smem else rates.SECTOR_BYTES
    width = max(adjacent * bits // 8, 1)
    return notes.Access(
        kind,
        "SMEM" if in_smem else "GMEM",
        described(view),
        ("ld" if kind == "load" else "st") + (".shared" if in_smem else ".global"),
        width,
        width,
        None,
        max(WARP_LANES * width / unit, 1.0),
        adjacent == 1,
        in_smem and view.internal,
        cycles,
    )


def copy(plan: ThreadCopy, view: gmem.GmemView) -> notes.Copy:
    """Returns the note of a copy by threads."""
    return notes.Copy(
        described(view), plan.chunk_bytes, plan.is_asynchronous, plan.chunks
    )


def conversion(
    x: Any, target: Placement, scratch_bytes: int, wanted_bytes: int
) -> notes.Conversion:
    """Returns the note of a conversion of an array to another layout."""
    bits = dtypes.bits(x.dtype)
    cycles = costs.relayout_cost(x.layout, target, bits, scratch_bytes)
    return notes.Conversion(
        f"{x.dtype}{list(x.shape)}",
        describe(x.layout),
        describe(target),
        wanted_bytes,
        cycles or 0.0,
    )


def exchange(wanted_bytes: int) -> notes.Conversion:
    """Returns the note of data that moves between threads through SMEM."""
    moved = 2 * wanted_bytes / _BANK_BYTES_PER_WAVEFRONT * rates.SMEM_WAVEFRONT
    return notes.Conversion(
        f"{wanted_bytes} bytes", "", "", wanted_bytes, moved + costs.EXCHANGE_CYCLES
    )


def described(view: Any) -> str:
    """Returns dtype, part and shape of the array of a view."""
    shape, starts = view.window.array_shape, view.window.starts
    known = ", ".join(str(s) if isinstance(s, int) else "?" for s in starts)
    dtype = dtypes.memory_dtype(view.dtype)
    return f"{dtype}{list(view.window.sizes)} at ({known}) of shape {shape}"

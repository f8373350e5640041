# SPDX-License-Identifier: Apache-2.0
"""Warnings about what is slow: bank conflicts, starts without alignment, many rounds.

They are Python warnings, once per line of a kernel: nothing is refused for its speed
unless its author asks for that.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from pallas_gpu import errors
from pallas_gpu.emitters import gmem, padding, smem
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.layouts.gmem.thread_copy import ThreadCopy
from pallas_gpu.layouts.registers.placement import Placement, describe
from pallas_gpu.layouts.smem.access_plan import Kind
from pallas_gpu.lowering import notes
from pallas_gpu.primitives.tensor_cores.mma import InsteadOfWgmma

# Python's memory of the warnings that have been shown, by text and line.
_SHOWN: dict[Any, Any] = {}
# The widest access of a thread (PTX ISA, ld and cp.async).
_WIDEST_BYTES = 16
# CUDA programming guide, compute capabilities: the most registers of a thread.
_MOST_REGISTERS, _REGISTER_BITS = 255, 32
# The default layouts of odd shapes have conflicts of two lanes, which no other layout
# of theirs avoids without more registers.
_TOLERATED_WITH_PADDING = 2.0
# Sectors for one that elements take: a layout that suits what follows may take 2.
_SCATTERED = 4
# Of fewer elements than a warp has lanes the latency counts.
_FEW_ELEMENTS = 32


def access(
    view: smem.SmemView | gmem.GmemView,
    layout: Placement,
    kind: Kind,
    where: Callable[[], str | None],
    optimized: bool | None = None,
) -> None:
    """Notes an access that has been emitted, and warns if it is slow.

    Args:
      view: a part of an array.
      layout: of the array in registers.
      kind: "load" or "store".
      where: returns the line of the access.
      optimized: what its author has said of bank conflicts; None warns of them.
    """
    notes.take(lambda: notes.access(view, layout, kind))
    if optimized is not None or _is_internal(view):
        return
    _too_large(view, layout, where)
    if isinstance(view, gmem.GmemView):
        taken, aligned = gmem.access_widths(view, layout)
        if taken < aligned:
            _unaligned(view, kind, "GMEM", taken, aligned, where)
        else:
            _uncoalesced(view, layout, kind, where)
        return
    plan = smem.plan(view, layout, kind)
    degree = plan.wavefronts_per_access / plan.ideal_wavefronts
    tolerated = _TOLERATED_WITH_PADDING if padding.is_padded(layout) else 1.0
    if degree > tolerated:
        warn(
            f"a {kind} of SMEM has bank conflicts",
            f"{degree:g} times the time of one without",
            f"{notes.described(view)} in {describe(layout)}",
            "declare the array with a tiling and a swizzle, or with another minor "
            f"dimension; or accept it with plgpu.{kind}(..., optimized=False)",
            where,
        )
    elif plan.method == "vector":
        aligned = smem.plan(view, layout, kind, aligned=True).elements_per_access
        _unaligned(view, kind, "SMEM", plan.elements_per_access, aligned, where)


def through_tiles(
    view: smem.SmemView,
    layout: Placement,
    kind: Kind,
    where: Callable[[], str | None],
) -> None:
    """Warns of an access that computes the address of each element."""
    notes.take(lambda: notes.by_element(view, layout, kind))
    if _is_internal(view):
        return
    warn(
        f"a {kind} of a part of a tiled SMEM array cuts through its tiles",
        "an address is computed for each element",
        f"{notes.described(view)}, {view.layout.description}",
        "start at multiples of the tile and take whole tiles: write a dynamic start as "
        "a product, or as plgpu.multiple_of(start, rows)",
        where,
    )


def copied_by_threads(
    plan: ThreadCopy, view: gmem.GmemView, where: Callable[[], str | None]
) -> None:
    """Notes a copy by threads, and warns if its parts are too narrow for cp.async."""
    notes.take(lambda: notes.copy(plan, view))
    if plan.is_asynchronous:
        return
    width = plan.chunk_bytes
    warn(
        f"threads copy a part of GMEM {width} byte{'s' * (width > 1)} at a time",
        f"{_WIDEST_BYTES // width} times as many instructions as 16 bytes at a time, "
        "through registers",
        notes.described(view),
        "start and end rows at multiples of 4 bytes, or of 16 bytes for TMA: pad the "
        "array's minor dimension",
        where,
    )


def in_many_rounds(
    wanted_bytes: int, scratch_bytes: int, where: Callable[[], str | None]
) -> None:
    """Warns of data that moves between threads through too little scratch."""
    warn(
        "data moves between threads a little at a time",
        f"{-(-wanted_bytes // scratch_bytes)} rounds, each with two barriers",
        f"{scratch_bytes} bytes of scratch for {wanted_bytes}",
        "leave more SMEM free, and reduction_scratch_bytes unset or larger",
        where,
    )


def instead_of_wgmma(
    reason: InsteadOfWgmma, operands: Sequence[Any], where: Callable[[], str | None]
) -> None:
    """Warns of a product by mma.sync that wgmma could compute."""
    shown = " times ".join(f"{x.dtype}{list(x.shape)}" for x in operands)
    warn(
        "a product is multiplied by mma.sync, which wgmma could multiply",
        "each warp loads both operands to registers, and waits for each instruction",
        f"{shown}; {reason.why}",
        reason.hint,
        where,
    )


def _is_internal(view: smem.SmemView | gmem.GmemView) -> bool:
    return isinstance(view, smem.SmemView) and view.internal


def _too_large(view: Any, layout: Placement, where: Callable[[], str | None]) -> None:
    bits = max(dtypes.bits(view.dtype), 8)
    taken = layout.num_registers * layout.vector_length * bits // _REGISTER_BITS
    if taken > _MOST_REGISTERS:
        warn(
            "an array is larger than the registers of a warpgroup",
            f"{taken} registers of each thread, which has {_MOST_REGISTERS}: unless "
            "elements are used one after the other, ptxas spills, which a warning "
            "after compilation then says",
            notes.described(view),
            "load it in parts, or use more warpgroups",
            where,
        )


def _uncoalesced(
    view: gmem.GmemView,
    layout: Placement,
    kind: Kind,
    where: Callable[[], str | None],
) -> None:
    requests = gmem.requests(view, layout)
    if requests is None or requests.wasted < _SCATTERED:
        return
    few = math.prod(view.window.sizes) < _FEW_ELEMENTS
    if few or requests.sectors < _SCATTERED * requests.ideal_sectors:
        return
    warn(
        f"a {kind} of GMEM is not coalesced",
        f"{requests.sectors / requests.ideal_sectors:g} times the bytes: an access of "
        f"a warp takes {requests.sectors / requests.number:g} sectors of 32 bytes, and "
        f"its elements would fit {requests.ideal_sectors / requests.number:g}",
        f"{notes.described(view)} in {describe(layout)}",
        "access adjacent elements along the minor dimension: give it more of the "
        "block, or copy whole rows to SMEM and transpose there",
        where,
    )


def _unaligned(
    view: Any,
    kind: Kind,
    memory: str,
    taken: int,
    aligned: int,
    where: Callable[[], str | None],
) -> None:
    if taken < aligned:
        warn(
            f"a {kind} of {memory} does not start at a known multiple of its width",
            f"{aligned // taken} times as many instructions as an aligned one",
            notes.described(view),
            "start at a multiple; write a dynamic start as a product, or as "
            f"plgpu.multiple_of(start, {aligned})",
            where,
        )


def warn(
    what: str, cost: str, got: str, hint: str, where: Callable[[], str | None]
) -> None:
    """Emits a warning unless it has been shown for this line.

    What has no line is code of this package, which no user can change.
    """
    place = where()
    if place is None:
        return
    text = f"{what} ({place})\n  cost:  {cost}\n  got:   {got}\n  hint:  {hint}"
    show(text, errors.PerformanceWarning, place)


def show(text: str, category: type[Warning], place: str) -> None:
    """Emits a warning about a line, `file:line (name)`, unless it has been shown."""
    file, _, rest = place.partition(":") if "://" not in place else (place, "", "0")
    number = rest.split(" ", 1)[0]
    line = int(number) if number.isdigit() else 0
    warnings.warn_explicit(text, category, file, line, file, _SHOWN)

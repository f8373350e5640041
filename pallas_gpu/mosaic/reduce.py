# SPDX-License-Identifier: Apache-2.0
"""Reductions: within a thread, across the lanes of a warp, across the four warps.

Which of these a reduction needs follows from the layout: registers whose origins differ
along a reduced axis are combined in the thread, thread bits whose column lies in a
reduced axis by a butterfly of shuffles (lanes) or through SMEM (warps).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_gpu import errors
from pallas_gpu.layouts import LinearLayout
from pallas_gpu.layouts.registers.placement import Placement, describe
from pallas_gpu.mosaic import addressing, mbarrier, shuffle
from pallas_gpu.mosaic.elements import dtypes, table
from pallas_gpu.mosaic.elements.convert import convert_value
from pallas_gpu.mosaic.registers import RegisterArray, Splat
from pallas_gpu.mosaic.smem import predicated

Kind = Literal["add", "mul", "max", "min", "and", "or"]

LANE_BITS = 5
THREAD_BITS = 7
WARPS = 4
_BOOL_KINDS = {"max": "or", "min": "and", "add": "or", "mul": "and"}


@dataclasses.dataclass(frozen=True)
class SmemScratch:
    """SMEM that one warpgroup may use while a reduction or a relayout runs.

    Attributes:
      pointer: `!llvm.ptr<3>`, 16-byte aligned.
      size_bytes: how much there is.
    """

    pointer: ir.Value
    size_bytes: int


@dataclasses.dataclass(frozen=True)
class _Steps:
    """What a reduction of a layout consists of.

    Attributes:
      groups: per register of the result the registers it is made of.
      vector_reduced: the elements of a register are combined too.
      lanes: thread bits to combine by shuffles.
      warps: thread bits to combine through SMEM.
      slots: lane bits that tell apart what the lanes of a warp end up with.
      result: the result's layout; None for a scalar.
      length: elements per register of the result.
    """

    groups: tuple[tuple[int, ...], ...]
    vector_reduced: bool
    lanes: tuple[int, ...]
    warps: tuple[int, ...]
    slots: tuple[int, ...]
    result: LinearLayout | None
    length: int


def scratch_bytes(layout: Placement, axes: Sequence[int], dtype: np.dtype) -> int:
    """Bytes of scratch with which `reduce` needs one round; 0 if it needs none."""
    steps = _plan(layout, tuple(axes))
    if not steps.warps:
        return 0
    return len(steps.groups) * _round_bytes(steps, np.dtype(dtype))


def minimal_scratch_bytes(
    layout: Placement, axes: Sequence[int], dtype: np.dtype
) -> int:
    """Bytes of scratch without which `reduce` cannot work; 0 if it needs none."""
    steps = _plan(layout, tuple(axes))
    return _round_bytes(steps, np.dtype(dtype)) if steps.warps else 0


def reduce(
    kind: Kind,
    x: RegisterArray,
    axes: Sequence[int],
    scratch: SmemScratch | None = None,
) -> RegisterArray | Splat:
    """Reduces an array over axes; every thread ends with what its layout says.

    PTX: `shfl.sync.bfly`; across warps `st.shared`, `barrier.sync`, `ld.shared`. All
    threads of the warpgroup issue it. All copies of an element are equal to the bit.

    Args:
      kind: `max` and `min` hand NaN on; `and`, `or` take integers and bools.
      x: in a linear layout; in any layout if all axes are reduced.
      axes: the axes that go away.
      scratch: needed where warps hold different parts; see `scratch_bytes`.

    Returns:
      An array in `x.layout.reduce(axes)`, or a splat of shape () when no axis is left.

    Raises:
      LayoutError: threads hold mixed parts of kept and reduced axes.
      OutOfResources: the scratch is smaller than `minimal_scratch_bytes`.
    """
    steps = _plan(x.layout, tuple(sorted(a % len(x.shape) for a in axes)))
    dtype, values, name = x.dtype, list(x.values), str(kind)
    if dtype == dtypes.BOOL:
        # Neither shuffles nor memory hold single bits.
        dtype, name = dtypes.U8, _BOOL_KINDS.get(name, name)
        values = [convert_value(v, dtypes.BOOL, dtype) for v in values]
    combine = table.lookup(name).emitter(dtype)
    partial = [_fold(combine, [values[r] for r in group]) for group in steps.groups]
    if steps.vector_reduced:
        partial = [_fold_lanes(combine, value) for value in partial]
    for bit in steps.lanes:
        partial = [combine(v, shuffle.exchange(v, dtype, 1 << bit)) for v in partial]
    if steps.warps:
        partial = _across_warps(combine, partial, dtype, steps, scratch)
    partial = [convert_value(v, dtype, x.dtype) for v in partial]
    if steps.result is None:
        return Splat(dtypes.extract(partial[0], 0), x.dtype, ())
    return RegisterArray(tuple(partial), steps.result, x.dtype)


# --- the plan -------------------------------------------------------------------------


@functools.lru_cache(maxsize=512)
def _plan(layout: Placement, axes: tuple[int, ...]) -> _Steps:
    if len(axes) == len(layout.shape):
        return _plan_full(layout)
    if not isinstance(layout, LinearLayout):
        layout = layout.linear()  # raises the error that says why
    kept = [a for a in range(layout.rank) if a not in axes]
    reduced_bits = []
    for bit, column in enumerate(layout.thread_columns):
        in_reduced = any(column[a] for a in axes)
        if in_reduced and any(column[a] for a in kept):
            raise errors.LayoutError(
                "Threads hold mixed parts of kept and reduced axes",
                expected=f"a layout whose threads move along axes {axes} or along the "
                "others, not both",
                got=describe(layout),
                hint="layout_cast the array first",
            )
        if in_reduced:
            reduced_bits.append(bit)
    result = layout.reduce(axes)
    groups: dict[tuple[int, ...], list[int]] = {}
    for register, origin in enumerate(layout.origins):
        groups.setdefault(tuple(origin[a] for a in kept), []).append(register)
    vector_reduced = layout.vector_length > 1 and layout.vector_axis in axes
    slots = [
        bit
        for bit in range(LANE_BITS)
        if any(layout.thread_columns[bit][a] for a in kept)
    ]
    return _Steps(
        groups=tuple(tuple(groups[key]) for key in sorted(groups)),
        vector_reduced=vector_reduced,
        lanes=tuple(b for b in reduced_bits if b < LANE_BITS),
        warps=tuple(b for b in reduced_bits if b >= LANE_BITS),
        slots=tuple(slots),
        result=result,
        length=result.vector_length,
    )


def _plan_full(layout: Placement) -> _Steps:
    copies = layout.replication_bits if isinstance(layout, LinearLayout) else ()
    bits = [b for b in range(THREAD_BITS) if b not in copies]
    return _Steps(
        groups=(tuple(range(layout.num_registers)),),
        vector_reduced=layout.vector_length > 1,
        lanes=tuple(b for b in bits if b < LANE_BITS),
        warps=tuple(b for b in bits if b >= LANE_BITS),
        slots=(),
        result=None,
        length=1,
    )


def _slot_bytes(steps: _Steps, dtype: np.dtype) -> int:
    return steps.length * dtypes.memory_dtype(dtype).itemsize


def _round_bytes(steps: _Steps, dtype: np.dtype) -> int:
    """Scratch for one register of each thread."""
    return WARPS * (1 << len(steps.slots)) * _slot_bytes(steps, dtype)


# --- within a thread and a warp -------------------------------------------------------


def _fold(combine: Callable, values: Sequence[ir.Value]) -> ir.Value:
    """A balanced tree: short chains, and rounding errors that grow with its depth."""
    values = list(values)
    while len(values) > 1:
        pairs = zip(values[::2], values[1::2], strict=False)
        rest = values[-1:] if len(values) % 2 else []
        values = [combine(a, b) for a, b in pairs] + rest
    return values[0]


def _fold_lanes(combine: Callable, value: ir.Value) -> ir.Value:
    lanes = dtypes.length(value) or 1
    return dtypes.splat(
        _fold(combine, [dtypes.extract(value, i) for i in range(lanes)]), 1
    )


# --- across warps ---------------------------------------------------------------------


def _across_warps(
    combine: Callable,
    partial: list[ir.Value],
    dtype: np.dtype,
    steps: _Steps,
    scratch: SmemScratch | None,
) -> list[ir.Value]:
    """Each warp writes its part, then each thread reads those it needs, in one order.

    With scratch for fewer registers than there are, it goes in rounds.
    """
    round_bytes = _round_bytes(steps, dtype)
    available = 0 if scratch is None else scratch.size_bytes
    if scratch is None or available < round_bytes:
        raise errors.OutOfResources(
            "A reduction across warps needs scratch in SMEM",
            resource="SMEM",
            limit_bytes=available,
            used_bytes=round_bytes,
            expected=f"at least {round_bytes} bytes",
            got=f"{available} bytes",
            hint="raise reduction_scratch_bytes",
        )
    per_round = available // round_bytes
    result: list[ir.Value] = []
    for first in range(0, len(partial), per_round):
        chunk = partial[first : first + per_round]
        result += _one_round(combine, chunk, dtype, steps, scratch.pointer)
    return result


def _one_round(
    combine: Callable,
    partial: list[ir.Value],
    dtype: np.dtype,
    steps: _Steps,
    pointer: ir.Value,
) -> list[ir.Value]:
    slot_bytes = _slot_bytes(steps, dtype)
    register_bytes = slot_bytes << len(steps.slots)
    warp_bytes = register_bytes * len(partial)
    columns = [0] * THREAD_BITS
    for i, bit in enumerate(steps.slots):
        columns[bit] = slot_bytes << i
    for i, bit in enumerate(range(LANE_BITS, THREAD_BITS)):
        columns[bit] = warp_bytes << i
    own = addressing.offset_pointer(pointer, addressing.thread_sum(columns))
    idle = [b for b in range(LANE_BITS) if b not in steps.slots]
    # The threads may still read what an earlier round left here.
    mbarrier.warpgroup_barrier()
    with predicated(addressing.thread_bits_clear(idle)):
        for r, value in enumerate(partial):
            llvm.store(value, addressing.offset_pointer(own, r * register_bytes))
    mbarrier.warpgroup_barrier()
    for bit in steps.warps:
        columns[bit] = 0
    base = addressing.offset_pointer(pointer, addressing.thread_sum(columns))
    warps = [0]
    for bit in steps.warps:
        warps += [w + (warp_bytes << (bit - LANE_BITS)) for w in warps]
    result = []
    for r, value in enumerate(partial):
        parts = [
            llvm.load(
                value.type, addressing.offset_pointer(base, w + r * register_bytes)
            )
            for w in warps
        ]
        result.append(_fold(combine, parts))
    return result

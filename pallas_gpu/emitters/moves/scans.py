# SPDX-License-Identifier: Apache-2.0
"""Cumulative operations: within a thread, across the lanes of a warp, across warps.

The emitter of the plans of `layouts/moves/scans.py`. Besides the prefix of each element
it keeps the total of each unit; threads exchange these totals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_gpu.emitters import addressing, mbarrier, padding
from pallas_gpu.emitters.elements import arith, dtypes, table
from pallas_gpu.emitters.elements.identities import identity
from pallas_gpu.emitters.moves import shuffle
from pallas_gpu.emitters.moves.scratch import SmemScratch, require
from pallas_gpu.emitters.registers import RegisterArray
from pallas_gpu.layouts import LinearLayout
from pallas_gpu.layouts.moves.scans import ScanPlan, plan_scan
from pallas_gpu.layouts.registers.linear import LANE_BITS, THREADS

Kind = Literal["add", "mul", "max", "min", "logaddexp"]
# Elements of one line, or totals of its units: scalars in the order of the axis.
_Line = list[ir.Value]


def scan(
    kind: Kind,
    x: RegisterArray,
    axis: int,
    *,
    reverse: bool = False,
    scratch: SmemScratch | None = None,
) -> RegisterArray:
    """Combines each element with all preceding elements along an axis.

    PTX: arithmetic in a thread, `shfl.sync.bfly` across lanes; across warps
    `st.shared`, `barrier.sync`, `ld.shared`. All threads of the warpgroup issue it.

    Args:
      kind: the operation that combines elements.
      x: in a linear layout; each thread column is along the axis or along other axes.
      axis: 0 to rank - 1.
      reverse: combine each element with all following ones.
      scratch: SMEM for totals that cross warps; see `ScanPlan.scratch_bytes`.

    Returns:
      An array in the layout of `x`.

    Raises:
      LayoutError: the layout does not support the scan.
      OutOfResources: warps exchange totals, and the scratch is too small.
    """
    layout = x.layout
    if not isinstance(layout, LinearLayout):
        layout = layout.linear()  # raises an error that states the reason
    plan = plan_scan(layout, axis)
    if reverse:
        # Otherwise padding follows all elements.
        x = padding.filled(x, identity(kind, x.dtype), (axis,))
    combine = table.lookup(kind).emitter(x.dtype)
    order = -1 if reverse else 1
    prefixes = [
        [_element(x.values[register], i) for register, i in line[::order]]
        for line in plan.lines
    ]
    totals = [list(line) for line in prefixes]
    for level in plan.levels:
        if level.units > 1:
            totals = [
                _merge(combine, line, units, level.units)
                for line, units in zip(prefixes, totals, strict=True)
            ]
        if level.bit is not None:
            _merge_threads(combine, prefixes, totals, x, level.bit, reverse, scratch)
    return x.with_values(_registers(x, plan, [line[::order] for line in prefixes]))


def _element(register: ir.Value, i: int) -> ir.Value:
    return dtypes.splat(dtypes.extract(register, i), 1)


def _registers(
    x: RegisterArray, plan: ScanPlan, lines: Sequence[_Line]
) -> list[ir.Value]:
    placed = {
        slot: value
        for line, values in zip(plan.lines, lines, strict=True)
        for slot, value in zip(line, values, strict=True)
    }
    length = dtypes.length(x.values[0]) or 1
    return [
        dtypes.pack([dtypes.extract(placed[r, i], 0) for i in range(length)])
        for r in range(len(x.values))
    ]


def _merge(combine: Callable, prefixes: _Line, totals: _Line, units: int) -> _Line:
    """Merges consecutive units of a thread in place; returns the new totals."""
    held = len(prefixes) // len(totals)
    merged = []
    for first in range(0, len(totals), units):
        running = totals[first]
        for unit in range(first + 1, first + units):
            for i in range(unit * held, (unit + 1) * held):
                prefixes[i] = combine(running, prefixes[i])
            # With one element per unit this is the prefix; CSE removes the duplicate.
            running = combine(running, totals[unit])
        merged.append(running)
    return merged


def _merge_threads(
    combine: Callable,
    prefixes: list[_Line],
    totals: list[_Line],
    x: RegisterArray,
    bit: int,
    reverse: bool,
    scratch: SmemScratch | None,
) -> None:
    """Merges the units of threads that differ in a bit, in place."""
    own = [total for line in totals for total in line]
    if bit < LANE_BITS:
        others = [shuffle.exchange(total, x.dtype, 1 << bit) for total in own]
    else:
        others = _from_other_warp(own, x, bit, scratch)
    second = addressing.thread_bit(bit)
    if reverse:
        second = arith.xori(second, dtypes.constant(True, dtypes.BOOL))
    received = iter(others)
    for line, units in zip(prefixes, totals, strict=True):
        held = len(line) // len(units)
        for unit in range(len(units)):
            other = next(received)
            for i in range(unit * held, (unit + 1) * held):
                line[i] = arith.select(second, combine(other, line[i]), line[i])
            units[unit] = combine(units[unit], other)


def _from_other_warp(
    values: Sequence[ir.Value],
    x: RegisterArray,
    bit: int,
    scratch: SmemScratch | None,
) -> list[ir.Value]:
    """The same values of the warp whose index differs in one bit.

    If the scratch does not hold all values, this takes several rounds.
    """
    itemsize = dtypes.memory_dtype(x.dtype).itemsize
    row_bytes = THREADS * itemsize
    scratch = require(scratch, row_bytes, "a scan across warps")
    columns = [itemsize << b for b in range(7)]
    place = addressing.thread_sum(columns)
    own = addressing.offset_pointer(scratch.pointer, place)
    partner = arith.xori(place, dtypes.constant(itemsize << bit, dtypes.I32))
    other = addressing.offset_pointer(scratch.pointer, partner)
    per_round, result = scratch.size_bytes // row_bytes, []
    for first in range(0, len(values), per_round):
        chunk = values[first : first + per_round]
        # Threads may still be reading what an earlier use stored in the scratch.
        mbarrier.warpgroup_barrier()
        for i, value in enumerate(chunk):
            llvm.store(value, addressing.offset_pointer(own, i * row_bytes))
        mbarrier.warpgroup_barrier()
        result += [
            llvm.load(value.type, addressing.offset_pointer(other, i * row_bytes))
            for i, value in enumerate(chunk)
        ]
    return result

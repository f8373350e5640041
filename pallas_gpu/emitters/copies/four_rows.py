# SPDX-License-Identifier: Apache-2.0
"""TMA copies of four rows that four indices name.

A thread collects four indices from its warp and issues the copies of these rows. Since
sm_100a.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_gpu.emitters import (
    addressing,
    control,
    gmem,
    masking,
    module,
    smem,
    tensor_map,
)
from pallas_gpu.emitters.control import predicated
from pallas_gpu.emitters.copies import instructions
from pallas_gpu.emitters.elements import dtypes, packed
from pallas_gpu.emitters.moves import shuffle
from pallas_gpu.emitters.registers import Iota, RegisterArray
from pallas_gpu.layouts.gmem.four_rows import FourRows, plan_four_rows
from pallas_gpu.layouts.registers.fours import Fours, fours
from pallas_gpu.layouts.registers.linear import LinearLayout

# The first compute capability with these copies (PTX ISA, "cp.async.bulk.tensor").
_SINCE = (10, 0)
# More copies of a group than this are emitted as a loop, for code size.
_MAX_UNROLLED = 8

# Emits a copy: its address in SMEM, and column and rows.
_Copy = Callable[[ir.Value, list[ir.Value]], None]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the threads of a warpgroup copy rows, four at a time.

    Attributes:
      rows: the copies of a group.
      indices: how a thread has the indices of one.
    """

    rows: FourRows
    indices: Fours


def plan(
    all_rows: gmem.GmemView, part: smem.SmemView, index: RegisterArray
) -> Plan | None:
    """Returns the plan; None if the target, the slices or the layout have none."""
    if module.current().spec.arch < _SINCE or all_rows.buffer_index is None:
        return None
    if index.shape[0] != part.shape[0]:
        return None
    bits = dtypes.stored_bits(all_rows.dtype)
    rows = plan_four_rows(all_rows.window, part.layout, part.window, bits)
    indices = fours(index.layout)
    return None if rows is None or indices is None else Plan(rows, indices)


def load(
    chosen: Plan,
    source: gmem.GmemView,
    target: smem.SmemView,
    index: RegisterArray,
    barrier_pointer: ir.Value,
) -> None:
    """Copies rows to SMEM. PTX: `cp.async.bulk.tensor.2d...tile::gather4`.

    All threads of the warpgroup issue it.
    """
    tensor = _descriptor(source, chosen.rows)

    def copy(pointer: ir.Value, coordinates: list[ir.Value]) -> None:
        instructions.load_rows(pointer, tensor, coordinates, barrier_pointer)

    _issue(chosen, source, target, index, copy)


def store(
    chosen: Plan, target: gmem.GmemView, source: smem.SmemView, index: RegisterArray
) -> None:
    """Copies rows to GMEM. PTX: `cp.async.bulk.tensor.2d...tile::scatter4`.

    All threads of the warpgroup issue it.
    """
    tensor = _descriptor(target, chosen.rows)

    def copy(pointer: ir.Value, coordinates: list[ir.Value]) -> None:
        instructions.store_rows(pointer, tensor, coordinates)

    _issue(chosen, target, source, index, copy)


def _descriptor(view: gmem.GmemView, rows: FourRows) -> ir.Value:
    assert view.buffer_index is not None
    item = packed.item_dtype(view.dtype)
    dtype = item if rows.per_unit == 1 else np.dtype(f"uint{rows.unit_bits}")
    return tensor_map.tensor_map_pointer(
        tensor_map.TensorMap(
            buffer_index=view.buffer_index,
            dtype=dtype.name,
            sizes=rows.sizes,
            strides=(rows.sizes[1], 1),
            box=(1, rows.columns),
            swizzle=rows.swizzle,
            **tensor_map.owned_by(view.owner),
        ),
        view.owner,
    )


# --- issuing --------------------------------------------------------------------------


def _issue(
    chosen: Plan,
    all_rows: gmem.GmemView,
    part: smem.SmemView,
    index: RegisterArray,
    copy: _Copy,
) -> None:
    rows, i32 = chosen.rows, module.current().i32
    base = smem.slice_pointer(part)
    first_row, first_column = _origin(all_rows, rows)
    for four, number, present in _groups(chosen.indices, index):
        coordinates = [smem.add_index(row, first_row) for row in four]
        with predicated(present):
            start = addressing.offset_pointer(base, _offset(rows, number))
            for offset, column in _pieces(rows.pieces):
                pointer = addressing.offset_pointer(start, offset)
                at = i32(smem.add_index(first_column, column))
                copy(pointer, [at, *map(i32, coordinates)])


def _groups(
    found: Fours, index: RegisterArray
) -> Iterator[tuple[list[ir.Value], ir.Value, ir.Value | None]]:
    """Four indices, the number of the first, and whether the thread copies the rows."""
    layout = index.layout
    assert isinstance(layout, LinearLayout)
    numbers = Iota(dtypes.I32, index.shape, 0).materialize(layout)
    own = addressing.thread_bits_clear(
        sorted({*layout.replication_bits, *found.lane_bits})
    )
    places = [group[0][:2] for group in found.groups]
    inside = masking.conditions(layout, places, None)
    for group, present in zip(found.groups, inside, strict=True):
        four = []
        for register, element, lanes in group:
            row = dtypes.extract(index.values[register], element)
            four.append(shuffle.from_distance(row, lanes) if lanes else row)
        register, element, _ = group[0]
        number = dtypes.extract(numbers.values[register], element)
        yield four, number, control.both(present, own)


def _offset(rows: FourRows, number: ir.Value) -> ir.Value:
    """The distance of a row from the first one in SMEM, in bytes."""
    kernel = module.current()
    tile, between, within = rows.row_tile
    if tile == 1:
        return arith.muli(number, kernel.i32(between))
    outer = arith.muli(arith.divui(number, kernel.i32(tile)), kernel.i32(between))
    inner = arith.muli(arith.remui(number, kernel.i32(tile)), kernel.i32(within))
    return arith.addi(outer, inner)


def _pieces(
    pieces: Sequence[tuple[int, int]],
) -> Iterator[tuple[int | ir.Value, int | ir.Value]]:
    """The offset in SMEM and the column of each copy of a group."""
    (place, column), *rest = pieces
    step = (rest[0][0] - place, rest[0][1] - column) if rest else (0, 0)
    regular = all(
        piece == (place + i * step[0], column + i * step[1])
        for i, piece in enumerate(pieces)
    )
    if len(pieces) <= _MAX_UNROLLED or not regular:
        yield from pieces
        return
    with control.counting(len(pieces), 1) as counter:
        yield _after(place, counter, step[0]), _after(column, counter, step[1])


def _after(start: int, counter: ir.Value, step: int) -> int | ir.Value:
    return smem.add_index(arith.muli(counter, module.current().i32(step)), start)


def _origin(
    view: gmem.GmemView, rows: FourRows
) -> tuple[int | ir.Value, int | ir.Value]:
    """The row and the column of the map in which the slice starts."""
    window, row_axis = view.window, rows.row_axis
    strides = window.array_strides
    first_row: int | ir.Value = 0
    first_column: int | ir.Value = 0
    for axis, (start, stride) in enumerate(zip(window.starts, strides, strict=True)):
        if axis <= row_axis:
            scaled = _scaled(start, stride // strides[row_axis])
            first_row = smem.add_index(first_row, scaled)
        else:
            first_column = smem.add_index(first_column, _scaled(start, stride))
    if isinstance(first_column, int):
        return first_row, first_column // rows.per_unit
    if rows.per_unit > 1:
        per_unit = module.current().i32(rows.per_unit)
        first_column = arith.divui(first_column, per_unit)
    return first_row, first_column


def _scaled(start: int | ir.Value, factor: int) -> int | ir.Value:
    if isinstance(start, int):
        return start * factor
    return start if factor == 1 else arith.muli(start, module.current().i32(factor))

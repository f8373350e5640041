# SPDX-License-Identifier: Apache-2.0
"""Accesses with an index for each element, of SMEM in any layout and of GMEM."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu import errors
from pallas_gpu.emitters import (
    addressing,
    control,
    gmem,
    masking,
    module,
    smem,
    sub_byte,
)
from pallas_gpu.emitters.control import predicated
from pallas_gpu.emitters.elements import arith, dtypes, predication
from pallas_gpu.emitters.elements.convert import convert_value
from pallas_gpu.emitters.registers import Array, Deferred, Iota, RegisterArray, Splat
from pallas_gpu.layouts import LinearLayout
from pallas_gpu.layouts.edges import Edges, cut
from pallas_gpu.layouts.registers.placement import Placement, describe, uniform_length
from pallas_gpu.layouts.smem.swizzle import NO_SWIZZLE
from pallas_gpu.layouts.window import row_major_strides

View = smem.SmemView | gmem.GmemView
# Offsets up to which i32 arithmetic does not overflow.
_I32_LIMIT = 1 << 31
# The widest ld and st of sm_90 (PTX ISA, ld: .v4 of 32 bits).
_MAX_ACCESS_BYTES = 16
# PTX ISA, swizzling modes: the 128-byte line of an offset, and the chunk in it.
_LINE_SHIFT, _CHUNK_SHIFT = 7, 4


@dataclasses.dataclass(frozen=True)
class Elements:
    """Elements of a view, one for each element of an array in registers.

    Attributes:
      view: the window that the indices refer to.
      view_shape: a shape in which its elements are viewed first, which is adjacent in
        memory; None for its own.
      dtype: of the elements.
      indices: for each axis a scalar, or an array of the result's shape.
      mask: bools; None for all elements.
      adjacent: an axis of the result along which elements are adjacent in memory, and a
        known divisor of the distance of the first of them from the window's start.
      mask_edges: where the mask changes along that axis; None if it may change with
        each element.
      rank: i32, the rank of the block in whose SMEM they are; None: in this block's.
    """

    view: View
    view_shape: tuple[int, ...] | None
    dtype: np.dtype
    indices: tuple[Array, ...]
    mask: Array | None = None
    adjacent: tuple[int, int] | None = None
    mask_edges: Edges | None = None
    rank: ir.Value | None = None

    @property
    def memory_dtype(self) -> np.dtype:
        """The dtype of an element in memory."""
        return dtypes.memory_dtype(self.dtype)


# --- addresses ------------------------------------------------------------------------


def pointers(elements: Elements, layout: Placement | None) -> list[ir.Value]:
    """The address of each element, register by register.

    Of packed elements it is the offset in bits from the array's start.

    Args:
      elements: what is accessed.
      layout: of the result and of all arrays; None for a single element.
    """
    view, bits = elements.view, dtypes.stored_bits(elements.dtype)
    packed = dtypes.is_packed(elements.dtype)
    unit = bits if packed else bits // 8
    if isinstance(view, smem.SmemView) and not view.layout.is_plain:
        if elements.view_shape is not None:
            raise errors.InternalError("a tiled array is reinterpreted")
        base, offset = view.pointer, _tiled_offset(view, unit, packed)
        if packed:
            return _places(elements.indices, layout, offset, lambda place: place)
    else:
        strides, wide = _row_major(elements, unit)
        offset = _strided_offset(strides, unit, wide)
        if packed:
            start = _memory(view).start_bits(view)
            return _places(elements.indices, layout, offset, lambda x: _after(start, x))
        base = _memory(view).slice_pointer(view)
    base = _in_block(elements, base)
    return _places(
        elements.indices,
        layout,
        offset,
        lambda x: addressing.offset_pointer(base, x),
    )


def array_start(elements: Elements) -> ir.Value:
    """The address from which `pointers` counts packed elements."""
    return _in_block(elements, elements.view.pointer)


def _in_block(elements: Elements, pointer: ir.Value) -> ir.Value:
    if elements.rank is None:
        return pointer
    return addressing.map_shared(pointer, elements.rank)


def _memory(view: View) -> Any:
    """The emitters of the memory that a view is in."""
    return smem if isinstance(view, smem.SmemView) else gmem


def _after(start: ir.Value, offset: ir.Value) -> ir.Value:
    return sub_byte.total([start, offset], _element_width(start))


def _row_major(elements: Elements, unit: int) -> tuple[tuple[int, ...], bool]:
    """The stride of each index, and whether offsets in units need i64."""
    window = elements.view.window
    if elements.view_shape is not None:
        strides, sizes = row_major_strides(elements.view_shape), elements.view_shape
    else:
        strides = tuple(window.array_strides[a] for a in window.axes)
        sizes = window.shape
    extent = sum(n * s for n, s in zip(sizes, strides, strict=True))
    wide = max(extent, math.prod(window.array_shape)) * unit
    return strides, wide >= _I32_LIMIT


Offset = Callable[[Sequence[ir.Value]], ir.Value]


def _strided_offset(strides: Sequence[int], itemsize: int, wide: bool) -> Offset:
    """The function from indices, i32 or i64, to an offset in bytes."""
    dtype = dtypes.I64 if wide else dtypes.I32

    def offset(indices: Sequence[ir.Value]) -> ir.Value:
        total = None
        for index, stride in zip(indices, strides, strict=True):
            term = _times(_resized(index, dtype), stride * itemsize, dtype)
            total = term if total is None else arith.addi(total, term)
        return dtypes.constant(0, dtypes.I32) if total is None else total

    return offset


def _tiled_offset(view: smem.SmemView, itemsize: int, in_bits: bool) -> Offset:
    """The same for an array that is tiled or swizzled, from its start."""
    line_shift, chunk_shift = _LINE_SHIFT, _CHUNK_SHIFT
    if in_bits:
        line_shift, chunk_shift = line_shift + 3, chunk_shift + 3
    window = view.window
    parts = list(zip(*(x.tolist() for x in view.layout.axis_strides), strict=True))

    def offset(indices: Sequence[ir.Value]) -> ir.Value:
        like = next((i for i in indices if dtypes.length(i)), None)
        coordinates: list[ir.Value] = [
            _constant_like(s, like) if isinstance(s, int) else _as(s, like)
            for s in window.starts
        ]
        for axis, index in zip(window.axes, indices, strict=True):
            index = _as(_resized(index, dtypes.I32), like)
            coordinates[axis] = arith.addi(coordinates[axis], index)
        total = _constant_like(0, like)
        for coordinate, (tile, between, within) in zip(coordinates, parts, strict=True):
            size = _constant_like(tile, like)
            outer = coordinate if tile == 1 else arith.divui(coordinate, size)
            total = arith.addi(total, _times(outer, between * itemsize, dtypes.I32))
            if tile > 1:
                inner = arith.remui(coordinate, size)
                total = arith.addi(total, _times(inner, within * itemsize, dtypes.I32))
        swizzle = view.layout.swizzle
        if swizzle == NO_SWIZZLE:
            return total
        line = arith.shrui(total, _constant_like(line_shift, like))
        row = arith.andi(line, _constant_like(swizzle // 16 - 1, like))
        return arith.xori(total, arith.shli(row, _constant_like(chunk_shift, like)))

    return offset


def _constant_like(value: int, like: ir.Value | None) -> ir.Value:
    return dtypes.constant(value, dtypes.I32, like)


def _as(value: ir.Value, like: ir.Value | None) -> ir.Value:
    if like is None or dtypes.length(value) is not None:
        return value
    return dtypes.splat(value, dtypes.length(like) or 1)


def _resized(index: ir.Value, dtype: np.dtype) -> ir.Value:
    """A signed index in another width."""
    own = np.dtype(f"int{_element_width(index)}")
    return convert_value(index, own, dtype)


def _element_width(value: ir.Value) -> int:
    type_ = value.type
    if isinstance(type_, ir.VectorType):
        type_ = type_.element_type
    return int(type_.width)


def _times(value: ir.Value, factor: int, dtype: np.dtype) -> ir.Value:
    if factor == 1:
        return value
    return arith.muli(value, dtypes.constant(factor, dtype, value))


def _places(
    indices: Sequence[Array],
    layout: Placement | None,
    offset: Offset,
    place: Callable[[ir.Value], ir.Value],
) -> list[ir.Value]:
    if layout is None:
        return [place(offset([_scalar(index) for index in indices]))]
    columns = [in_registers(index, layout).values for index in indices]
    length = layout.vector_length
    result = []
    for r in range(layout.num_registers):
        offsets = offset([column[r] for column in columns])
        # Without an index that is an array there is one offset for all.
        single = dtypes.length(offsets) is None
        result += [
            place(offsets if single else dtypes.extract(offsets, lane))
            for lane in range(length)
        ]
    return result


def _scalar(index: Array) -> ir.Value:
    assert isinstance(index, Splat)
    return index.value


def in_registers(x: Array, layout: Placement) -> RegisterArray:
    """An array in a layout; a scalar is broadcast."""
    if isinstance(x, Splat):
        x = Splat(x.value, x.dtype, layout.shape)
    if isinstance(x, Deferred):
        return x.materialize(layout)
    if x.layout != layout:
        first, second = describe(layout), describe(x.layout)
        raise errors.LayoutError(
            "Indices, mask and value of an access have different layouts",
            expected=f"equal layouts, e.g. {first} for all of them",
            got=f"{first} and {second}",
            hint=f"load one in the layout of the other, or use layout_cast(x, {first})",
        )
    return x


# --- loads and stores -----------------------------------------------------------------


def _load_packed(
    elements: Elements, layout: Placement | None, rest: list[ir.Value] | None
) -> Array:
    """Loads elements of less than a byte, one by one."""
    dtype, start = elements.dtype, array_start(elements)
    places, wanted = pointers(elements, layout), conditions(elements, layout)
    instead = rest or [dtypes.constant(0, dtype)] * len(places)
    loaded = [
        sub_byte.load(start, place, dtype, condition, other)
        for place, condition, other in zip(places, wanted, instead, strict=True)
    ]
    return array_of(loaded, layout, dtype)


def array_of(
    loaded: Sequence[ir.Value], layout: Placement | None, dtype: np.dtype
) -> Array:
    """The array of a thread's elements in order; a scalar without a layout."""
    if layout is None:
        return Splat(loaded[0], dtype, ())
    length = layout.vector_length
    registers = [loaded[i : i + length] for i in range(0, len(loaded), length)]
    return RegisterArray(tuple(map(dtypes.pack, registers)), layout, dtype)


def load(
    elements: Elements, layout: Placement | None, other: Array | None = None
) -> Array:
    """Loads elements into registers.

    PTX: `ld.shared` or `ld.global` for each element, predicated by the mask; up to 16
    bytes where elements are adjacent. All threads of the warpgroup issue it.

    Args:
      elements: what is loaded.
      layout: of the result; None for a single element.
      other: the result where the mask is False; None for zeros.
    """
    memory, dtype = elements.memory_dtype, elements.dtype
    rest = lanes_of(other, layout)
    if dtypes.is_packed(dtype):
        return _load_packed(elements, layout, rest)
    addresses, wanted = pointers(elements, layout), conditions(elements, layout)
    loaded: list[ir.Value | None] = [None] * len(addresses)
    for first, count, condition in parts(elements, layout, wanted, loads=True):
        places = range(first, first + count)
        # An instruction whose result's register another one loads would wait for it.
        fresh = all(loaded[i] is None for i in places)
        instead = dtypes.splat(dtypes.constant(0, memory), count)
        if rest is not None and fresh:
            instead = convert_value(dtypes.pack(rest[first:][:count]), dtype, memory)
        type_ = dtypes.vector_type(memory, count)
        vector = predication.load(type_, addresses[first], condition, instead)
        vector = convert_value(vector, memory, dtype)
        for i in places:
            value, before = dtypes.extract(vector, i - first), loaded[i]
            known = wanted[i] if before is None else condition
            if not fresh or known != condition:
                if before is None:
                    before = dtypes.constant(0, dtype) if rest is None else rest[i]
                value = arith.select(known, value, before)
            loaded[i] = value
    return array_of([x for x in loaded if x is not None], layout, dtype)


class Part(NamedTuple):
    """Elements that one instruction accesses.

    Attributes:
      first, length: of a thread's elements in order.
      condition: under which it is executed: an i1, None if always.
    """

    first: int
    length: int
    condition: ir.Value | None


def parts(
    elements: Elements,
    layout: Placement | None,
    wanted: Sequence[ir.Value | None],
    most_bytes: int = _MAX_ACCESS_BYTES,
    *,
    loads: bool = False,
) -> list[Part]:
    """What instructions access: each element that is wanted exactly once.

    A vector that the mask may cut is accessed in pieces unless all of it is wanted.

    Args:
      elements, layout: what is accessed.
      wanted: the condition of each element.
      most_bytes: that one instruction accesses.
      loads: of a vector with a wanted element all may be accessed, if they exist.
    """
    width = adjacent_elements(elements, layout, most_bytes)
    pieces, every, some = cut(elements.mask_edges, width)
    result = []
    for first in range(0, len(wanted), width):
        asked = wanted[first : first + width]
        if all(x == asked[0] for x in asked):
            result.append(Part(first, width, asked[0]))
            continue
        if loads and _consists_of_vectors(elements, width):
            any_ = _joined(arith.ori, [asked[i] for i in some])
            result.append(Part(first, width, any_))
            continue
        whole = _joined(arith.andi, [asked[i] for i in every])
        for i, count in pieces:
            condition = asked[i]
            if whole is not None:
                rest = arith.xori(whole, dtypes.constant(True, dtypes.BOOL))
                condition = control.both(condition, rest)
            result.append(Part(first + i, count, condition))
        if whole is not None:
            result.append(Part(first, width, whole))
    return result


def _joined(
    operation: Callable[..., ir.Value], values: Sequence[ir.Value | None]
) -> ir.Value | None:
    distinct = [x for x in dict.fromkeys(values) if x is not None]
    return functools.reduce(operation, distinct) if distinct else None


def _consists_of_vectors(elements: Elements, width: int) -> bool:
    """Whether aligned vectors are within the array if one of their elements is."""
    view = elements.view
    bits = math.prod(view.window.array_shape) * dtypes.stored_bits(view.dtype)
    return bits % (8 * width * elements.memory_dtype.itemsize) == 0


def adjacent_elements(
    elements: Elements, layout: Placement | None, most_bytes: int = _MAX_ACCESS_BYTES
) -> int:
    """How many elements of a register are adjacent and aligned to their size."""
    view, itemsize = elements.view, elements.memory_dtype.itemsize
    if not isinstance(layout, LinearLayout) or elements.adjacent is None:
        return 1
    if dtypes.is_packed(elements.dtype):
        return 1
    axis, divisor = elements.adjacent
    if layout.vector_length == 1 or layout.vector_axis != axis:
        return 1
    start_bytes = view.window.start_multiple * dtypes.memory_dtype(view.dtype).itemsize
    places = [c[axis] for c in (*layout.thread_columns, *layout.origins)]
    limit_bytes = math.gcd(
        start_bytes,
        most_bytes,
        itemsize * math.gcd(divisor, uniform_length(layout), *places),
    )
    if isinstance(view, smem.SmemView) and not view.layout.is_plain:
        limit_bytes = math.gcd(limit_bytes, itemsize * _adjacent_in_tile(view))
    return max(1, limit_bytes // itemsize)


def _adjacent_in_tile(view: smem.SmemView) -> int:
    """Elements along the last axis that are adjacent, from a multiple of their number.

    All for 0. A swizzle moves chunks of 16 bytes, the widest access, as a whole.
    """
    tile, between, within = (x[-1] for x in view.layout.axis_strides)
    if tile > 1:
        return int(tile) if within == 1 else 1
    return 0 if between == 1 else 1


def conditions(elements: Elements, layout: Placement | None) -> list[ir.Value | None]:
    """Under which condition each element is accessed: an i1, None if always."""
    if layout is None:
        return [None if elements.mask is None else _scalar(elements.mask)]
    mask = None if elements.mask is None else in_registers(elements.mask, layout)
    slots = [
        (r, v) for r in range(layout.num_registers) for v in range(layout.vector_length)
    ]
    return masking.conditions(layout, slots, mask)


def store(elements: Elements, layout: Placement | None, value: Array) -> None:
    """Stores elements; one thread stores each replicated element.

    PTX: `st.shared` or `st.global` for each element, predicated by the mask. All
    threads of the warpgroup issue it.

    Args:
      elements: what is stored to.
      layout: of the value, of indices and mask; None for a single element.
      value: of the elements' dtype.
    """
    memory = elements.memory_dtype
    values = lanes_of(value, layout)
    assert values is not None
    addresses, wanted = pointers(elements, layout), conditions(elements, layout)
    accessed = parts(elements, layout, wanted)
    with predicated(issuing_threads(layout)):
        for first, count, condition in accessed:
            place = addresses[first]
            if dtypes.is_packed(elements.dtype):
                start = array_start(elements)
                held = values[first]
                sub_byte.store(start, place, held, elements.dtype, condition)
                continue
            vector = dtypes.pack(values[first : first + count])
            stored = convert_value(vector, elements.dtype, memory)
            predication.store(stored, place, condition)


def issuing_threads(layout: Placement | None) -> ir.Value | None:
    """i1: whether the thread is the first that has its elements; None: each is."""
    if layout is None:
        return module.current().elected
    copies = layout.replication_bits if isinstance(layout, LinearLayout) else ()
    return addressing.thread_bits_clear(copies)


def lanes_of(x: Array | None, layout: Placement | None) -> list[ir.Value] | None:
    """The elements of an array, register by register; None for no array."""
    if x is None:
        return None
    if layout is None:
        return [_scalar(x)]
    return [
        dtypes.extract(register, lane)
        for register in in_registers(x, layout).values
        for lane in range(layout.vector_length)
    ]


# --- parts of arrays ------------------------------------------------------------------


def _elements_of(view: View, shape: tuple[int, ...]) -> Elements:
    """All elements of a view, for an array of its shape."""
    indices = tuple(Iota(dtypes.I32, shape, axis) for axis in range(len(shape)))
    return Elements(view, None, view.dtype, indices)


def load_part(view: View, layout: Placement) -> RegisterArray:
    """Loads a view element by element, e.g. one that cuts through tiles."""
    result = load(_elements_of(view, layout.shape), layout)
    assert isinstance(result, RegisterArray)
    return result


def store_part(view: View, value: RegisterArray) -> None:
    """Stores to a view element by element; see `load_part`."""
    smem.check_stored(view.shape, view.dtype, value)
    store(_elements_of(view, value.shape), value.layout, value)


def load_scalar(view: View) -> ir.Value:
    """Loads one element of an array in any layout into every thread."""
    smem.require_one_element(view.shape)
    return smem.load_element(pointers(_elements_of(view, ()), None)[0], view.dtype)


def store_scalar(view: View, value: ir.Value) -> None:
    """Stores one element of an array in any layout from the elected thread."""
    smem.require_one_element(view.shape)
    smem.store_element(pointers(_elements_of(view, ()), None)[0], value, view.dtype)

# SPDX-License-Identifier: Apache-2.0
"""Single elements of 2 and 4 bits in memory, at any position in a byte.

Where the accesses of a layout fill whole bytes, packed elements are transferred like
any others. Everything else comes here: odd starts and sizes, masks, transposed layouts.
Threads that store to different elements of a byte do not race: each update is atomic
and leaves the other bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_gpu.emitters import addressing, masking
from pallas_gpu.emitters.control import predicated
from pallas_gpu.emitters.elements import dtypes, predication
from pallas_gpu.emitters.registers import Array, RegisterArray
from pallas_gpu.layouts.registers.placement import Placement
from pallas_gpu.layouts.smem.swizzle import NO_SWIZZLE

# An address in bits: of an array's start, the sum of these.
type Offset = int | ir.Value


def is_sub_byte(dtype: np.dtype, elements: int) -> bool:
    """Whether an access of so many elements does not consist of whole bytes."""
    return elements * dtypes.stored_bits(dtype) % 8 != 0


def scaled(index: ir.Value, factor: int) -> ir.Value:
    """An index times a constant, in the index's type."""
    if factor == 1:
        return index
    return arith.muli(index, _constant(factor, index))


def total(terms: Sequence[Offset], bits: int) -> ir.Value:
    """The sum of constants and of indices, as an integer of 32 or 64 bits."""
    type_ = dtypes.I64 if bits == 64 else dtypes.I32
    static = sum(t for t in terms if isinstance(t, int))
    result = dtypes.constant(static, type_)
    for term in terms:
        if isinstance(term, int):
            continue
        if term.type != result.type:
            term = arith.extsi(result.type, term)
        result = arith.addi(result, term)
    return result


def swizzled(offset_bits: ir.Value, swizzle: int) -> ir.Value:
    """The place in a swizzled array of what is at an offset in it."""
    if swizzle == NO_SWIZZLE:
        return offset_bits
    # As `layouts.smem.swizzle_bytes`: bits 7 and up of the byte change bits 4 and up.
    chunk = arith.andi(
        _shifted(offset_bits, 10), _constant(swizzle // 16 - 1, offset_bits)
    )
    return arith.xori(offset_bits, arith.shli(chunk, _constant(7, offset_bits)))


def load(
    pointer: ir.Value,
    offset_bits: ir.Value,
    dtype: np.dtype,
    condition: ir.Value | None = None,
    other: ir.Value | None = None,
) -> ir.Value:
    """One element, as it is in registers. PTX: `ld.u8`, a shift.

    Args:
      pointer: an array's start.
      offset_bits: the element's first bit in the array.
      dtype: of 2 or 4 bits.
      condition: i1; where it is false nothing is accessed. None is true.
      other: the element where it is false, zero by default.
    """
    place = addressing.offset_pointer(pointer, _shifted(offset_bits, 3))
    zero = dtypes.splat(dtypes.constant(0, dtypes.U8), 1)
    byte = predication.load(zero.type, place, condition, zero)
    within = arith.andi(offset_bits, _constant(7, offset_bits))
    item = dtypes.extract(byte, 0)
    element = arith.shrui(item, arith.trunci(item.type, within))
    if condition is None or other is None:
        return element
    return arith.select(condition, element, other)


def store(
    pointer: ir.Value,
    offset_bits: ir.Value,
    value: ir.Value,
    dtype: np.dtype,
    condition: ir.Value | None = None,
) -> None:
    """Stores one element. PTX: `red.relaxed.and.b32`, `red.relaxed.or.b32`.

    Args:
      pointer: an array's start, aligned to 4 bytes; `!llvm.ptr<3>` is in SMEM.
      offset_bits: the element's first bit in the array.
      value: the element, an i8 whose upper bits are undefined.
      dtype: of 2 or 4 bits.
      condition: i1; where it is false nothing is accessed. None is true.
    """
    i32 = ir.IntegerType.get_signless(32)
    word = arith.shli(_shifted(offset_bits, 5), _constant(2, offset_bits))
    place = addressing.offset_pointer(pointer, word)
    within = arith.andi(offset_bits, _constant(31, offset_bits))
    if within.type != i32:
        within = arith.trunci(i32, within)
    ones = dtypes.constant((1 << dtypes.stored_bits(dtype)) - 1, dtypes.I32)
    kept = arith.xori(arith.shli(ones, within), dtypes.constant(-1, dtypes.I32))
    element = arith.shli(arith.andi(arith.extui(i32, value), ones), within)
    _reduce("and", place, kept, condition)
    _reduce("or", place, element, condition)


def _reduce(
    operation: str, pointer: ir.Value, word: ir.Value, condition: ir.Value | None
) -> None:
    guard = "" if condition is None else "@$2 "
    predicate = [] if condition is None else [condition]
    space, letter, pointer = addressing.atomic_space(pointer)
    llvm.inline_asm(
        None,
        [pointer, word, *predicate],
        f"{guard}red.relaxed.{space}.{operation}.b32 [$0], $1;",
        ",".join([letter, "r", *["b"] * len(predicate), "~{memory}"]),
        has_side_effects=True,
    )


def _constant(number: int, like: ir.Value) -> ir.Value:
    wide = str(like.type) == "i64"
    return dtypes.constant(number, dtypes.I64 if wide else dtypes.I32)


def _shifted(value: ir.Value, distance: int) -> ir.Value:
    return arith.shrui(value, _constant(distance, value))


# --- arrays ---------------------------------------------------------------------------


def load_array(
    pointer: ir.Value,
    placement: Placement,
    places: Sequence[ir.Value],
    dtype: np.dtype,
    mask: RegisterArray | None,
    other: Array | None,
) -> RegisterArray:
    """Loads an array element by element.

    Args:
      pointer: the start of the array in memory.
      placement: the layout in registers.
      places: the offset in bits of each element of each register, in order.
      dtype: of 2 or 4 bits.
      mask, other: as for loads of whole bytes.
    """
    slots = _slots(placement)
    wanted = masking.conditions(placement, slots, mask)
    rest = masking.others(other, placement, slots, dtype, dtype)
    elements = [
        load(pointer, place, dtype, condition, dtypes.extract(instead, 0))
        for place, condition, instead in zip(places, wanted, rest, strict=True)
    ]
    length = placement.vector_length
    values = [
        dtypes.pack(elements[i : i + length]) for i in range(0, len(elements), length)
    ]
    return RegisterArray(tuple(values), placement, dtype)


def store_array(
    pointer: ir.Value,
    value: RegisterArray,
    places: Sequence[ir.Value],
    guard: ir.Value | None,
    mask: RegisterArray | None,
) -> None:
    """Stores an array element by element.

    Args:
      pointer: the start of the array in memory.
      value: elements of 2 or 4 bits.
      places: the offset in bits of each element of each register, in order.
      guard: i1, false in threads that have copies only; None is true.
      mask: as for stores of whole bytes.
    """
    slots = _slots(value.layout)
    wanted = masking.conditions(value.layout, slots, mask)
    with predicated(guard):
        for slot, place, condition in zip(slots, places, wanted, strict=True):
            register, element = slot
            held = dtypes.extract(value.values[register], element)
            store(pointer, place, held, value.dtype, condition)


def _slots(placement: Placement) -> list[tuple[int, int]]:
    within = range(placement.vector_length)
    return [(r, v) for r in range(placement.num_registers) for v in within]

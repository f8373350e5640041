# SPDX-License-Identifier: Apache-2.0
"""The instructions that transfer an array between registers and TMEM.

`find_access` names the shape of the instruction; here it is divided into instructions
of a power of two of repetitions, each with the registers that it transfers in order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts.registers.descriptions import WGStridedLayout
from pallas_gpu.layouts.registers.linear import LinearLayout
from pallas_gpu.layouts.tmem.access import TmemAccess, find_access, words
from pallas_gpu.layouts.tmem.layout import TmemLayout

# Registers of one instruction: its operands are consecutive registers, of which ptxas
# finds more easily few than the 128 that an instruction may have.
_MOST_REGISTERS = 32
# Registers of one repetition (`.x1`), and the lane and column that thread 0 transfers
# in each: PTX ISA, tcgen05.ld "Matrix fragments".
_REPETITIONS = {
    "32x32b": ((0, 0),),
    "16x128b": ((0, 0), (8, 0)),
    "16x256b": ((0, 0), (0, 1), (8, 0), (8, 1)),
}
# Columns from one repetition to the next.
_STEPS = {"32x32b": 1, "16x128b": 4, "16x256b": 8}


@dataclasses.dataclass(frozen=True)
class TmemTransfer:
    """One tcgen05.ld or tcgen05.st of a warp.

    Attributes:
      lane: its first lane, from the first of the warp.
      column: its first column, from the first of the array.
      repetitions: the N of `.xN`.
      words: the 32-bit registers, counted over all of the array's, in its order.
    """

    lane: int
    column: int
    repetitions: int
    words: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TmemTransfers:
    """How an array is transferred: the form of the instructions, and all of them."""

    access: TmemAccess
    instructions: tuple[TmemTransfer, ...]


@functools.lru_cache(maxsize=1024)
def plan_transfer(
    registers: LinearLayout | WGStridedLayout, tmem: TmemLayout, bits: int
) -> TmemTransfers:
    """Plans the transfer of an array.

    Args:
      registers: the placement in registers; it has the array's shape.
      bits: width of an element.

    Raises:
      LayoutError: no instruction transfers between the two.
    """
    access = find_access(registers, tmem, bits)
    if access is None:
        raise LayoutError(
            "no instruction transfers between this register layout and TMEM layout",
            expected="a register layout in which tcgen05.ld leaves the array, e.g. "
            "Layout.TCGEN05 for the default layout, Layout.WGMMA for half-lane",
            got=f"{registers} and {tmem}, elements of {bits} bits",
            hint="omit the layout of the load and apply layout_cast to its result",
        )
    assert isinstance(registers, LinearLayout)
    found = words(registers, tmem, bits)
    assert found is not None
    lanes, columns, paired = found
    # The lane and column of thread 0 of warp 0: those of the others follow.
    first = zip(lanes[0, 0].tolist(), columns[0, 0].tolist(), strict=True)
    places = {place: i for i, place in enumerate(first)}
    unit = 2 if paired else 1
    return TmemTransfers(access, tuple(_instructions(access.shape, places, unit)))


def _instructions(
    shape: str, places: dict[tuple[int, int], int], unit: int
) -> Iterator[TmemTransfer]:
    one, step = _REPETITIONS[shape], _STEPS[shape]
    starts = (0,) if shape == "32x32b" else (0, 16)
    columns = sorted({column // step * step for _, column in places})
    for lane in starts:
        for at, count in _powers_of_two(len(columns), _MOST_REGISTERS // len(one)):
            held = [
                places[lane + row, columns[at + i] + column]
                for i in range(count)
                for row, column in one
            ]
            yield TmemTransfer(lane, columns[at] * unit, count, tuple(held))


def _powers_of_two(count: int, most: int) -> Iterator[tuple[int, int]]:
    """Divides a number of repetitions into powers of two: (first, how many)."""
    at = 0
    while at < count:
        size = min(most, 1 << (count - at).bit_length() - 1)
        yield at, size
        at += size

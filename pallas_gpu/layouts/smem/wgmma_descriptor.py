# SPDX-License-Identifier: Apache-2.0
"""The matrix descriptor of wgmma for an operand in shared memory, as integers.

PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate", "Shared Memory
Matrix Layout" and "Matrix Descriptor". Memory tiled (8, `swizzle` bytes) is a grid of
atoms. The axis along the bytes of an atom is the operand's major axis: K, or M (N for
the right operand), called MN here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts.smem.layout import SmemLayout
from pallas_gpu.layouts.smem.swizzle import NO_SWIZZLE
from pallas_gpu.layouts.window import Window

Major = Literal["K", "MN"]
Side = Literal["a", "b"]

# Bytes along K that one instruction reads from each row or column.
K_STEP_BYTES = 32
# Rows of an atom.
ATOM_ROWS = 8
# Only 16-bit operands have the transpose bits (PTX ISA, wgmma.mma_async).
_TRANSPOSABLE_BITS = 16

# Matrix descriptor: bits 0-13 start address, 16-29 leading dimension byte offset,
# 32-45 stride dimension byte offset, 62-63 swizzling mode.
_LEADING_SHIFT, _STRIDE_SHIFT, _SWIZZLE_SHIFT = 16, 32, 62
_SWIZZLE_CODES = {NO_SWIZZLE: 0, 128: 1, 64: 2, 32: 3}
# Addresses and offsets are 18 bits; the descriptor omits the lowest four.
ADDRESS_MASK, ADDRESS_SHIFT = 0x3FFFF, 4


@dataclasses.dataclass(frozen=True)
class WgmmaOperand:
    """A matrix in shared memory as an operand of wgmma instructions.

    Attributes:
      major: the axis along the bytes of an atom.
      swizzle: 32, 64 or 128 bytes, 16 for none.
      itemsize_bits: width of an element.
      mn, k: elements of the matrix along M (or N) and along K.
      mn_atom_bytes: from one atom to the next along MN.
      k_atom_bytes: from one atom to the next along K.
      tile_rows: rows after which the next atom is elsewhere; 0: there is none such.
      tile_rows_bytes: from one tile of so many rows to the next.
    """

    major: Major
    swizzle: int
    itemsize_bits: int
    mn: int
    k: int
    mn_atom_bytes: int
    k_atom_bytes: int
    tile_rows: int = 0
    tile_rows_bytes: int = 0

    @property
    def row_elems(self) -> int:
        """Elements in one row of an atom."""
        return self.swizzle * 8 // self.itemsize_bits

    @property
    def k_step(self) -> int:
        """Elements along K per instruction."""
        return K_STEP_BYTES * 8 // self.itemsize_bits

    @property
    def mn_granule(self) -> int:
        """Elements of an atom along MN: blocks of the matrix start at its multiples."""
        return ATOM_ROWS if self.major == "K" else self.row_elems

    @property
    def mn_run(self) -> int:
        """Elements along MN whose atoms are at equal distances."""
        return self.tile_rows if self.major == "K" and self.tile_rows else self.mn

    @property
    def transposed(self) -> bool:
        """The instruction's transpose bit: true for MN-major operands."""
        return self.major == "MN"

    @property
    def leading_offset_bytes(self) -> int:
        """The leading dimension byte offset; 16 if the hardware ignores it."""
        if self.major == "MN":
            return self.k_atom_bytes if self.swizzle == NO_SWIZZLE else self._mn_stride
        return self.k_atom_bytes if self.swizzle == NO_SWIZZLE else 16

    @property
    def stride_offset_bytes(self) -> int:
        """The stride dimension byte offset."""
        if self.major == "MN":
            return self._mn_stride if self.swizzle == NO_SWIZZLE else self.k_atom_bytes
        return self.mn_atom_bytes

    @property
    def _mn_stride(self) -> int:
        # With a single atom along MN there is no stride.
        return self.mn_atom_bytes if self.mn > self.row_elems else 16

    @property
    def fields(self) -> int:
        """The 64-bit descriptor without its start address."""
        return (
            encode_address(self.leading_offset_bytes) << _LEADING_SHIFT
            | encode_address(self.stride_offset_bytes) << _STRIDE_SHIFT
            | _SWIZZLE_CODES[self.swizzle] << _SWIZZLE_SHIFT
        )

    def offset_bytes(self, mn: int, k: int) -> int:
        """The offset of the block at (mn, k) from the start address.

        Args:
          mn: a multiple of `mn_granule`.
          k: a multiple of `k_step`.

        Raises:
          LayoutError: an instruction cannot start there.
        """
        if mn % self.mn_granule or k % self.k_step:
            raise LayoutError(
                "A wgmma instruction cannot start inside an atom of its operand",
                expected=f"multiples of {self.mn_granule} along M or N, "
                f"of {self.k_step} along K",
                got=(mn, k),
            )
        tile, row = 0, k if self.major == "MN" else mn
        if self.tile_rows:
            tile, row = divmod(row, self.tile_rows)
        within_bytes = tile * self.tile_rows_bytes
        if self.major == "MN":
            atoms = mn // self.row_elems, row // ATOM_ROWS
        else:
            k_bytes = k * self.itemsize_bits // 8
            atoms = row // ATOM_ROWS, k_bytes // self.swizzle
            within_bytes += k_bytes % self.swizzle
        return (
            atoms[0] * self.mn_atom_bytes + atoms[1] * self.k_atom_bytes + within_bytes
        )

    def offset_units(self, mn: int, k: int) -> int:
        """`offset_bytes` in the descriptor's units of 16 bytes."""
        return self.offset_bytes(mn, k) >> ADDRESS_SHIFT


def plan_operand(
    layout: SmemLayout,
    window: Window,
    side: Side,
    *,
    who: str = "wgmma",
    transposable_bits: Sequence[int] = (_TRANSPOSABLE_BITS,),
    high_tiles: bool = False,
) -> WgmmaOperand:
    """Describes a slice of a shared-memory array as an operand of wgmma.

    Args:
      layout: placement of the whole array, tiled (8, elements of the swizzle).
      window: the slice, possibly transposed; starts that are ints are checked.
      side: "a" for the left operand (M, K), "b" for the right one (K, N).
      who: the instruction, for messages; tcgen05.mma reads the same layouts.
      transposable_bits: widths of elements that it reads along M or N.
      high_tiles: whether tiles may have more than 8 rows; see `WgmmaOperand.mn_run`.

    Raises:
      LayoutError: the instruction cannot read the slice.

      >>> tiled = SmemLayout((128, 64), 16, (8, 64), 128)
      >>> plan_operand(tiled, Window.whole((128, 64)), "a").major
      'K'
    """
    name = "left" if side == "a" else "right"
    rank = len(layout.shape)
    if rank < 2 or sorted(window.axes) != [rank - 2, rank - 1]:
        raise LayoutError(
            f"The {name} operand of {who} must be its array's last two axes",
            expected="two axes, all before them indexed by integers",
            got=f"axes {sorted(window.axes)} of {layout.shape}",
        )
    _check_tile(layout, name, who, high_tiles=high_tiles)
    _check_aligned(layout, window, name, who)
    rows, columns = window.sizes[-2:]
    # Outer strides of the last two axes: from one atom to the next.
    tile_rows, row_elems = layout.tile
    column_atom = tile_rows * row_elems * layout.itemsize_bits // 8
    tile_rows_bytes = column_atom * layout.physical_shape[-3]
    row_atom = tile_rows_bytes
    if tile_rows > ATOM_ROWS:
        row_atom = ATOM_ROWS * row_elems * layout.itemsize_bits // 8
    if tile_rows == ATOM_ROWS or layout.physical_shape[-3] == 1:
        tile_rows = tile_rows_bytes = 0
    minor_is_k = (side == "a") == (not window.is_transposed)
    if not minor_is_k and layout.itemsize_bits not in transposable_bits:
        axis = "K, once transposed," if window.is_transposed else "K"
        raise LayoutError(
            f"{who} reads {layout.itemsize_bits}-bit operands only along K",
            expected=f"a {name} operand whose {axis} is the minor axis in memory",
            got=f"an array {layout.shape} whose minor axis is {'MN'[side == 'b']}",
            hint="store the operand transposed and pass a transposed view of it; "
            f"{_widths(transposable_bits)} operands may have either major axis",
        )
    if minor_is_k:
        shape, atoms = (rows, columns), (row_atom, column_atom)
    else:
        shape, atoms = (columns, rows), (column_atom, row_atom)
    operand = WgmmaOperand(
        "K" if minor_is_k else "MN",
        layout.swizzle,
        layout.itemsize_bits,
        *shape,
        *atoms,
        tile_rows,
        tile_rows_bytes,
    )
    if operand.k % operand.k_step:
        raise LayoutError(
            f"K of the {name} operand of {who} is not a multiple of the instruction's",
            expected=f"a multiple of {operand.k_step} elements along K "
            f"({K_STEP_BYTES} bytes)",
            got=operand.k,
        )
    return operand


def encode_address(value_bytes: int) -> int:
    return (value_bytes & ADDRESS_MASK) >> ADDRESS_SHIFT


def _widths(bits: Sequence[int]) -> str:
    return " and ".join(f"{b}-bit" for b in bits)


def _check_tile(layout: SmemLayout, name: str, who: str, *, high_tiles: bool) -> None:
    row_elems = layout.swizzle * 8 // layout.itemsize_bits
    if layout.tile == (ATOM_ROWS, row_elems):
        return
    is_high = high_tiles and len(layout.tile) == 2 and layout.tile[0] % ATOM_ROWS == 0
    if is_high and layout.tile[1] == row_elems:
        return
    raise LayoutError(
        f"The {name} operand of {who} is not tiled for the tensor core",
        expected=f"TilingTransform(({ATOM_ROWS}, {row_elems})) for elements of "
        f"{layout.itemsize_bits} bits and a swizzle of {layout.swizzle} bytes",
        got=f"tiling {layout.tiling}, swizzle {layout.swizzle}",
        hint="give the reference TilingTransform((8, n)) and SwizzleTransform(s), "
        "where n elements occupy s bytes",
    )


def _check_aligned(layout: SmemLayout, window: Window, name: str, who: str) -> None:
    tile, sizes = layout.tile, window.sizes[-2:]
    known = [s for s in window.starts if isinstance(s, int)]
    if any(
        size % t or (isinstance(start, int) and start % t)
        for start, size, t in zip(window.starts[-2:], sizes, tile, strict=True)
    ):
        raise LayoutError(
            f"The {name} operand of {who} must consist of whole tiles",
            expected=f"starts and sizes that are multiples of {tile}",
            got=f"sizes {sizes}, known starts {known}",
        )

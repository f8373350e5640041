# SPDX-License-Identifier: Apache-2.0
"""The register layouts that `tcgen05.ld` and `tcgen05.st` support.

Data does not move between threads: a pair of layouts either matches an instruction or
is not supported.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts.registers.catalogue import Layout
from pallas_gpu.layouts.registers.descriptions import RegisterLayout, WGStridedLayout
from pallas_gpu.layouts.registers.linear import THREADS, WARP_LANES, WARPS, LinearLayout
from pallas_gpu.layouts.registers.placement import Placement, place_registers
from pallas_gpu.layouts.tmem.layout import COLUMN_BITS, LANES, TmemKind, TmemLayout

# PTX ISA, tcgen05.ld and .st: `.pack::16b` and `.unpack::16b` join two columns that
# hold 16 bits each.
_PAIRED_BITS = 16
# Adjacent elements of a row that a thread holds, up to 32 bits, widest first.
_NATIVE_VECTORS = (4, 2)


@dataclasses.dataclass(frozen=True)
class TmemAccess:
    """The instruction that transfers an array.

    Attributes:
      paired: whether a register holds two columns (`.pack::16b`, `.unpack::16b`).
    """

    shape: Literal["32x32b", "16x128b", "16x256b"]
    paired: bool


def transfers(
    registers: LinearLayout | WGStridedLayout, tmem: TmemLayout, bits: int
) -> bool:
    """Whether one instruction, repeated, loads (and stores) an array.

    Args:
      registers: the placement in registers; it has the array's shape.
      bits: width of an element.

      >>> transfers(Layout.WGMMA.to_layout().linear((64, 32)),
      ...           TmemLayout.half_lane(32), 32)
      True
    """
    return find_access(registers, tmem, bits) is not None


@functools.lru_cache(maxsize=4096)
def find_access(
    registers: LinearLayout | WGStridedLayout, tmem: TmemLayout, bits: int
) -> TmemAccess | None:
    """The instruction for a pair of layouts; None if there is none.

    A hardware register has 32 bits, which must be filled. Column and lane of a register
    are the same function of the thread in all warps.
    """
    if not isinstance(registers, LinearLayout) or COLUMN_BITS % bits:
        return None
    # Its tiles only represent the format that tcgen05.cp and tcgen05.mma share.
    if tmem.kind is TmemKind.SPARSE_METADATA:
        return None
    try:
        total = tmem.columns(registers.shape)
    except LayoutError:
        return None
    found = words(registers, tmem, bits)
    if found is None:
        return None
    lanes, columns, paired = found
    all_lanes = lanes + WARP_LANES * np.arange(WARPS)[:, None, None]
    reached = np.unique(all_lanes * total + columns).size
    # A store must write every copy, and each element is in exactly one register.
    if reached != lanes.size or reached != LANES * total // (1 + paired):
        return None
    if (lanes != lanes[0]).any() or (columns != columns[0]).any():
        return None
    return _instruction(lanes[0], columns[0], paired=paired)


def words(
    registers: LinearLayout, tmem: TmemLayout, bits: int
) -> tuple[np.ndarray, np.ndarray, bool] | None:
    """Lane within the warp's 32 and column of each 32-bit register.

    Returns:
      int64 [warps, lanes, registers] twice, and whether a register holds two columns:
      then columns are counted in pairs.
    """
    per_word = COLUMN_BITS // bits
    if registers.vector_length % per_word:
        return None
    rows, cols = np.moveaxis(registers.all_coordinates(), -1, 0)
    places = tmem.places(registers.shape)
    lanes, columns, positions = (part[rows, cols] for part in places)
    warp = np.arange(THREADS) // WARP_LANES
    reachable = lanes // WARP_LANES == warp[:, None, None, None]
    if not reachable.any(axis=-1).all():
        return None
    # The lanes of copies differ by multiples of 32.
    form = WARPS, WARP_LANES, -1, per_word
    lane = (lanes[..., 0] % WARP_LANES).reshape(form)
    column, position = columns.reshape(form), positions.reshape(form)
    one_after_other = np.arange(per_word)
    if (lane != lane[..., :1]).any():
        return None
    if tmem.packing == per_word:
        whole = (column == column[..., :1]) & (position == one_after_other)
        return (lane[..., 0], column[..., 0], False) if whole.all() else None
    if tmem.packing != 1 or bits != _PAIRED_BITS:
        return None
    whole = (column == column[..., :1] + one_after_other) & (column[..., :1] % 2 == 0)
    return (lane[..., 0], column[..., 0] // 2, True) if whole.all() else None


def _instruction(
    lanes: np.ndarray, columns: np.ndarray, *, paired: bool
) -> TmemAccess | None:
    """The shape that assigns lanes and columns [lanes, registers] to a warp's threads.

    PTX ISA, "tcgen05 Data movement", "Matrix fragments". Where two columns are one
    register, the columns given are those pairs. Shapes with 16 lanes occur twice, for
    the two halves of a warp's lanes, each in two groups of 8 rows.
    """
    thread = np.arange(WARP_LANES)[:, None]
    if (lanes == thread).all() and (columns == columns[0]).all():
        return TmemAccess("32x32b", paired)
    if (lanes[0] % 8).any() or (lanes != lanes[0] + thread // 4).any():
        return None
    if (columns == columns[0] + thread % 4).all():
        return TmemAccess("16x128b", paired)
    if (columns == columns[0] + 2 * (thread % 4)).all() and not paired:
        return TmemAccess("16x256b", paired)
    return None


def register_layouts(
    storage: TmemLayout, shape: Sequence[int], bits: int
) -> Iterator[Placement]:
    """Register layouts that transfer with a layout in TMEM, the preferred one first."""
    for make in _register_layouts(storage):
        try:
            placement = place_registers(make(), shape)
        except LayoutError:
            continue
        if transfers(placement, storage, bits):
            yield placement


def _register_layouts(
    storage: TmemLayout,
) -> Iterator[Callable[[], Layout | RegisterLayout]]:
    columns = storage.tile_columns
    match storage.kind:
        case TmemKind.DEFAULT:
            yield lambda: Layout.TCGEN05
            for v in _NATIVE_VECTORS:
                yield lambda v=v: Layout.TCGEN05_TMEM_NATIVE(v)  # type: ignore[misc]
        case TmemKind.HALF_LANE:
            yield lambda: Layout.WGMMA
        case TmemKind.M64_COLLECTIVE:
            yield lambda: Layout.TCGEN05_M64_COLLECTIVE(columns)
            for v in _NATIVE_VECTORS:
                yield lambda v=v: Layout.TCGEN05_M64_COLLECTIVE_NATIVE(  # type: ignore[misc]
                    columns, v
                )
    yield lambda: storage.tiled

# SPDX-License-Identifier: Apache-2.0
"""Register layouts by the names of Mosaic GPU, and their arrays of registers."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_gpu import errors
from pallas_gpu.emitters import registers
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.layouts import (
    Layout,
    LinearLayout,
    TiledLayout,
    WGSplatLayout,
    WGStridedLayout,
)
from pallas_gpu.layouts.registers import catalogue
from pallas_gpu.layouts.registers.placement import Placement, place_registers

WGSplatFragLayout = WGSplatLayout
WGStridedFragLayout = WGStridedLayout
# A linear form is what some operations leave that no description of tiles has.
FragmentedLayout = TiledLayout | WGStridedLayout | WGSplatLayout | LinearLayout

WGMMA_LAYOUT = catalogue.WGMMA
WGMMA_LAYOUT_ACC_32BIT = catalogue.WGMMA_ACC_32BIT
WGMMA_LAYOUT_8BIT = catalogue.WGMMA_8BIT
WGMMA_LAYOUT_UPCAST_2X = catalogue.WGMMA_UPCAST_2X
WGMMA_LAYOUT_UPCAST_4X = catalogue.WGMMA_UPCAST_4X
WGMMA_ROW_LAYOUT = catalogue.WGMMA_ROW
WGMMA_COL_LAYOUT = catalogue.WGMMA_COL
WGMMA_TRANSPOSED_LAYOUT = catalogue.WGMMA_TRANSPOSED
TCGEN05_LAYOUT = catalogue.TCGEN05
TCGEN05_TRANSPOSED_LAYOUT = catalogue.TCGEN05_TRANSPOSED
TCGEN05_ROW_LAYOUT = catalogue.TCGEN05_ROW
TCGEN05_COL_LAYOUT = catalogue.TCGEN05_COL
TMA_INDICES_LAYOUT = catalogue.TMA_INDICES
TMA_INDICES_4_LAYOUT = catalogue.TMA_INDICES_4


def tmem_native_layout(vector_length: int) -> TiledLayout:
    """Returns the layout of one row per thread, as `tcgen05.ld.32x32b` loads it."""
    return catalogue.tcgen05_tmem_native(vector_length)


TMEM_NATIVE_LAYOUT = tmem_native_layout(2)


def resolve(layout: Layout | FragmentedLayout) -> FragmentedLayout:
    """The description that a name of `plgpu.Layout` stands for; else the layout."""
    return layout.to_layout() if isinstance(layout, Layout) else layout


def default_strided(shape: Sequence[int], bits: int) -> WGStridedLayout:
    """The layout of `load_strided`: vectors of at most 64 bits.

    Raises:
      LayoutError: the size is not a multiple of 128.
    """
    size = math.prod(shape)
    widest = min(64 // bits, max(size // 128, 1))
    lengths = [widest >> i for i in range(widest.bit_length())]
    length = next((n for n in lengths if size % (128 * n) == 0), 1)
    return WGStridedLayout(tuple(shape), length)


# --- the array of registers -----------------------------------------------------------


def registers_shape(layout: FragmentedLayout, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the array of registers of an array.

    It is the tiled shape with 1 for the dims of threads and of a register's elements;
    one axis for other layouts, none for a splat.
    """
    match layout:
        case WGSplatLayout():
            return ()
        case TiledLayout():
            grid = layout.tiling.grid(shape)
            return (*grid, *(n for n, _ in _free(layout)))
        case _:
            return (place_registers(layout, shape).num_registers,)


def _free(layout: TiledLayout) -> list[tuple[int, bool]]:
    """For each dim of the tiles the number of registers, and whether it has any."""
    count = len(layout.tiling.dims)
    taken = {d + count for d in layout._partition if isinstance(d, int)}
    return [
        (1 if i in taken else dim.size, i not in taken)
        for i, dim in enumerate(layout.tiling.dims)
    ]


def array_shape(layout: FragmentedLayout, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of an array whose array of registers has a shape.

    Raises:
      LayoutError: no array in the layout has such registers.
    """
    if not isinstance(layout, TiledLayout):
        return layout.shape
    sizes = _free(layout)
    lead = len(shape) - len(sizes)
    tile = layout.base_tile_shape
    if lead < len(tile) or tuple(shape[lead:]) != tuple(n for n, _ in sizes):
        raise errors.LayoutError(
            "The array of registers does not have the shape of the layout's",
            expected=f"a shape that ends with {tuple(n for n, _ in sizes)}",
            got=tuple(shape),
        )
    ones = (1,) * (lead - len(tile))
    return tuple(n * t for n, t in zip(shape[:lead], (*ones, *tile), strict=True))


@functools.lru_cache(maxsize=256)
def register_places(
    layout: FragmentedLayout, shape: tuple[int, ...]
) -> tuple[int, ...]:
    """For each register in the order of the array its index in the placement."""
    if not isinstance(layout, TiledLayout):
        return tuple(range(math.prod(registers_shape(layout, shape))))
    rank, tiling = len(shape), layout.tiling
    grid = tiling.grid(shape)
    steps = (1,) * (rank - tiling.rank) + tiling.tiles[0]
    dims = [(axis, n, s) for axis, (n, s) in enumerate(zip(grid, steps, strict=True))]
    free = zip(tiling.dims, _free(layout), strict=True)
    dims += [(dim.axis + rank, dim.size, dim.stride) for dim, (_, is_) in free if is_]
    origins = [(0,) * rank]
    for axis, size, stride in dims:
        origins = [
            (*o[:axis], o[axis] + i * stride, *o[axis + 1 :])
            for o in origins
            for i in range(size)
        ]
    ranks = {origin: i for i, origin in enumerate(sorted(origins))}
    return tuple(ranks[origin] for origin in origins)


def thread_indices(
    layout: FragmentedLayout, shape: Sequence[int]
) -> Iterator[tuple[ir.Value, ...]]:
    """For each register the coordinates of its first element, of type `index`."""
    placement: Placement = place_registers(layout, shape)
    axes = [
        registers.iota(dtypes.I32, shape, axis).materialize(placement).values
        for axis in range(len(shape))
    ]
    index = ir.IndexType.get()
    for register in register_places(layout, tuple(shape)):
        first = [dtypes.extract(values[register], 0) for values in axes]
        yield tuple(arith.index_cast(index, x) for x in first)


def ndarray(values: Sequence[ir.Value], shape: Sequence[int]) -> np.ndarray:
    """An array of MLIR values."""
    result = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        result[i] = value
    return result.reshape(shape)

# SPDX-License-Identifier: Apache-2.0
"""Loads and stores of arrays in registers, in the memory that a reference is in."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir

from pallas_gpu import errors
from pallas_gpu.emitters import atomics, gmem, indexed, registers, smem
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.gmem import GmemView
from pallas_gpu.emitters.registers import Array, Deferred, RegisterArray
from pallas_gpu.emitters.smem import SmemView
from pallas_gpu.layouts import SmemLayout, TiledLayout
from pallas_gpu.layouts.registers import catalogue
from pallas_gpu.layouts.registers.linear import LinearLayout
from pallas_gpu.layouts.registers.placement import place_registers
from pallas_gpu.layouts.smem.swizzle import NO_SWIZZLE
from pallas_gpu.mosaic import memrefs

View = SmemView | GmemView


def load(view: View, layout, *, optimized: bool) -> RegisterArray:
    """Loads a view in a layout."""
    if isinstance(view, SmemView):
        return smem.load(view, layout, optimized=optimized)
    return gmem.load(view, layout)


def store(view: View, array: Array, *, optimized: bool) -> None:
    """Stores an array to a view."""
    if isinstance(view, SmemView):
        smem.store(view, array, optimized=optimized)
    else:
        gmem.store(view, array)


def update(view: View, array: Array, atomic: str) -> None:
    """Combines the elements of a view with those of an array, each atomically."""
    if isinstance(array, Deferred):
        array = registers.placed(array)
    layout = array.layout
    indices = tuple(
        registers.iota(dtypes.I32, array.shape, axis)
        for axis in range(len(array.shape))
    )
    chosen = indexed.Elements(view, None, array.dtype, indices)
    name = f"atomic_{atomic}"
    atomics.update(chosen, layout, name, [array], False, None, atomics.Order())


def swizzled(view: View, swizzle: int) -> View:
    """A view of an array in SMEM whose rows are swizzled."""
    if swizzle == NO_SWIZZLE:
        return view
    if not isinstance(view, SmemView):
        raise errors.ArgumentError(
            "A reference to GMEM is not swizzled", expected="swizzle=16", got=swizzle
        )
    old = view.layout
    layout = SmemLayout.of(old.shape, old.itemsize_bits, old.tiling, swizzle)
    return dataclasses.replace(view, layout=layout)


def load_tiled(
    ref: ir.Value,
    swizzle: int | None,
    layout: Any,
    optimized: bool,
    tiling_rank: int | None,
    is_signed: bool | None,
) -> RegisterArray:
    """Loads a tiled reference, in whatever order its tiles are stored."""
    found = tiled(ref, swizzle, tiling_rank, is_signed)
    if found.order is None:
        return load(found.view, layout, optimized=optimized)
    stored = found.stored(place_registers(layout, found.shape))
    return found.logical(load(found.view, stored, optimized=optimized))


def store_tiled(
    ref: ir.Value,
    array: Array,
    swizzle: int | None,
    optimized: bool,
    tiling_rank: int | None,
    atomic: str | None,
) -> None:
    """Stores to a tiled reference; see `load_tiled`."""
    signed = dtypes.kind(array.dtype) != "unsigned"
    found = tiled(ref, swizzle, tiling_rank, signed)
    if isinstance(array, Deferred):
        array = registers.placed(array)
    if found.order is not None:
        smem.check_stored(found.shape, found.view.dtype, array)
        split = registers.reshape(array, found.split)
        array = registers.transpose(split, found.order)  # type: ignore[arg-type]
    if atomic is not None:
        update(found.view, array, atomic)
    else:
        store(found.view, array, optimized=optimized)


@dataclasses.dataclass(frozen=True)
class Tiled:
    """A tiled reference.

    Attributes:
      view: of the logical shape, or of the shape in memory.
      shape: the logical shape.
      tile: its tile.
      order: None if `view` has the logical shape; else the axes of `split` in memory.
    """

    view: View
    shape: tuple[int, ...]
    tile: tuple[int, ...]
    order: tuple[int, ...] | None

    @property
    def split(self) -> tuple[int, ...]:
        """The logical shape, each tiled axis as tiles and elements of one."""
        lead = len(self.shape) - len(self.tile)
        pairs = zip(self.shape[lead:], self.tile, strict=True)
        return (*self.shape[:lead], *(x for n, t in pairs for x in (n // t, t)))

    def stored(self, placement) -> LinearLayout:
        """The placement of an array in the shape in memory."""
        assert self.order is not None
        if not isinstance(placement, LinearLayout):
            placement = placement.linear()
        return placement.reshape(self.split).transpose(self.order)

    def logical(self, array: RegisterArray) -> RegisterArray:
        """An array of the shape in memory as one of the logical shape."""
        assert self.order is not None
        inverse = [self.order.index(i) for i in range(len(self.order))]
        split = registers.transpose(array, inverse)
        return registers.reshape(split, self.shape)  # type: ignore[return-value]


def tiled(
    ref: ir.Value,
    swizzle: int | None,
    tiling_rank: int | None,
    is_signed: bool | None,
) -> Tiled:
    """The tiled array that a reference is, in whatever order its tiles are stored."""
    rank = len(ref.type.shape)
    count = memrefs.checked_rank(rank, tiling_rank)
    lead, sizes = rank - 2 * count, tuple(ref.type.shape)
    tile = sizes[rank - count :]
    shape = memrefs.untiled_shape(sizes, count)
    if memrefs.is_smem(ref):
        try:
            view = memrefs.tiled_view_of(ref, swizzle, count, is_signed)
            return Tiled(view, shape, tile, None)
        except errors.LayoutError:
            pass
    plain = swizzled(memrefs.view_of(ref, is_signed), swizzle or NO_SWIZZLE)
    order = [*range(lead), *(lead + 2 * i for i in range(count))]
    order += [lead + 2 * i + 1 for i in range(count)]
    return Tiled(plain, shape, tile, tuple(order))


def copy_layout(shape: Sequence[int], bits: int, swizzle: int) -> TiledLayout:
    """The layout of copies between GMEM and SMEM that is tiled by 8 rows."""
    return catalogue.smem_gmem_copy(tuple(shape), bits, swizzle)

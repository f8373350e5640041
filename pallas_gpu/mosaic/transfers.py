# SPDX-License-Identifier: Apache-2.0
"""Loads and stores of arrays in registers, in the memory that a reference is in."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from jaxlib.mlir import ir

from pallas_gpu import errors
from pallas_gpu.emitters import atomics, gmem, indexed, registers, smem
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.gmem import GmemView
from pallas_gpu.emitters.registers import Array, Deferred, RegisterArray
from pallas_gpu.emitters.smem import SmemView
from pallas_gpu.layouts import SmemLayout
from pallas_gpu.layouts.registers.linear import LinearLayout
from pallas_gpu.layouts.registers.placement import place_registers
from pallas_gpu.layouts.smem.swizzle import NO_SWIZZLE
from pallas_gpu.mosaic.memory import memrefs

View = SmemView | GmemView


def load(view: View, layout, *, optimized: bool) -> RegisterArray:
    """Loads a view in a layout."""
    if isinstance(view, SmemView):
        return smem.load(view, layout, optimized=optimized)
    return gmem.load(view, layout)


def store(
    view: View, array: Array, *, optimized: bool, atomic: str | None = None
) -> None:
    """Stores an array to a view, or combines each element with it atomically."""
    if atomic is not None:
        _update(view, array, atomic)
    elif isinstance(view, SmemView):
        smem.store(view, array, optimized=optimized)
    else:
        gmem.store(view, array)


def _update(view: View, array: Array, atomic: str) -> None:
    """Combines the elements of a view with those of an array, each atomically."""
    if isinstance(array, Deferred):
        array = registers.placed(array)
    shape, name = array.shape, f"atomic_{atomic}"
    indices = tuple(registers.iota(dtypes.I32, shape, a) for a in range(len(shape)))
    chosen = indexed.Elements(view, None, array.dtype, indices)
    atomics.update(chosen, array.layout, name, [array], False, None, atomics.Order())


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


@dataclasses.dataclass(frozen=True)
class Tiled:
    """A tiled reference, in whatever order its tiles are stored.

    Attributes:
      view: of the logical shape, or of the shape in memory.
      shape: the logical shape.
      split: the same, each tiled axis as tiles and elements of one.
      order: None if `view` has the logical shape; else the axes of `split` in memory.
    """

    view: View
    shape: tuple[int, ...]
    split: tuple[int, ...]
    order: tuple[int, ...] | None

    def load(self, layout: Any, *, optimized: bool) -> RegisterArray:
        """Loads the array in a layout."""
        if self.order is None:
            return load(self.view, layout, optimized=optimized)
        placement: Any = place_registers(layout, self.shape)
        if not isinstance(placement, LinearLayout):
            placement = placement.linear()
        stored = placement.reshape(self.split).transpose(self.order)
        inverse = [self.order.index(i) for i in range(len(self.order))]
        array = load(self.view, stored, optimized=optimized)
        split = registers.transpose(array, inverse)
        return registers.reshape(split, self.shape)  # type: ignore[return-value]

    def store(self, array: Array, *, optimized: bool, atomic: str | None) -> None:
        """Stores an array."""
        if isinstance(array, Deferred):
            array = registers.placed(array)
        if self.order is not None:
            smem.check_stored(self.shape, self.view.dtype, array)
            split: Any = registers.reshape(array, self.split)
            array = registers.transpose(split, self.order)
        store(self.view, array, optimized=optimized, atomic=atomic)


def tiled(
    ref: ir.Value, swizzle: int | None, tiling_rank: int | None, is_signed: bool | None
) -> Tiled:
    """The tiled array that a reference is, in whatever order its tiles are stored."""
    sizes, rank = tuple(ref.type.shape), len(ref.type.shape)
    count = memrefs.checked_rank(rank, tiling_rank)
    lead = rank - 2 * count
    pairs = list(zip(sizes[lead : lead + count], sizes[lead + count :], strict=True))
    shape = (*sizes[:lead], *(n * t for n, t in pairs))
    split = (*sizes[:lead], *itertools.chain(*pairs))
    if memrefs.is_smem(ref):
        try:
            view = memrefs.tiled_view_of(ref, swizzle, count, is_signed)
            return Tiled(view, shape, split, None)
        except errors.LayoutError:
            pass
    plain = swizzled(memrefs.view_of(ref, is_signed), swizzle or NO_SWIZZLE)
    order = [*range(lead), *(lead + 2 * i for i in range(count))]
    order += [lead + 2 * i + 1 for i in range(count)]
    return Tiled(plain, shape, split, tuple(order))

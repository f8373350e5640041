# SPDX-License-Identifier: Apache-2.0
"""The placement of an array of a given shape in a layout."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from pallas_gpu.errors import LayoutError, PallasGpuError
from pallas_gpu.layouts.registers.catalogue import Layout, to_layout
from pallas_gpu.layouts.registers.defaults import default_layout
from pallas_gpu.layouts.registers.descriptions import (
    RegisterLayout,
    WGSplatLayout,
    WGStridedLayout,
)
from pallas_gpu.layouts.registers.linear import THREADS, LinearLayout

# Strided only if it is not linear.
Placement = LinearLayout | WGStridedLayout


def place(layout, shape: Sequence[int]) -> Placement | WGSplatLayout:
    """Returns the placement of an array of `shape` in a layout.

    Args:
      layout: a name of the catalogue, a description, or already a placement.
    """
    shape = tuple(shape)
    if isinstance(layout, LinearLayout):
        if layout.shape != shape:
            raise LayoutError(
                "The layout is for a different shape",
                expected=f"shape {shape}",
                got=f"shape {layout.shape}",
            )
        return layout
    return _placed(to_layout(layout), shape)


@functools.lru_cache(maxsize=256)
def _placed(
    description: RegisterLayout, shape: tuple[int, ...]
) -> Placement | WGSplatLayout:
    if isinstance(description, WGSplatLayout):
        return description
    if isinstance(description, WGStridedLayout) and not description.is_linear:
        if description.shape != shape:
            description.linear(shape)  # raises the error about the shape
        return description
    return description.linear(shape)


def place_registers(layout, shape: Sequence[int]) -> Placement:
    """Returns the placement of an array that is not a splat; see `place`.

    Raises:
      LayoutError: the layout is a splat layout.
    """
    placement = place(layout, shape)
    if isinstance(placement, WGSplatLayout):
        raise LayoutError(
            "Only a splat can have a splat layout",
            expected="a layout that distributes the elements",
            got=f"WG_SPLAT for shape {tuple(shape)}",
            hint="cast to another layout",
        )
    return placement


def default_placement(
    shape: Sequence[int], bits: int, threads: int = THREADS
) -> Placement:
    """Returns the layout for untiled memory: row-major, strided over the threads.

    Args:
      shape: shape of the array.
      bits: width of an element; elements of fewer than 8 bits occupy a byte in memory.
      threads: those of a warpgroup, or of a warp; see `default_layout`.
    """
    return _default_placement(tuple(shape), max(bits, 8), threads)


@functools.lru_cache(maxsize=256)
def _default_placement(shape: tuple[int, ...], bits: int, threads: int) -> Placement:
    return place_registers(default_layout(shape, bits, threads), shape)


def is_of_warp(layout: Placement) -> bool:
    """Whether a single warp can have an array in this layout: all in its lanes."""
    return isinstance(layout, LinearLayout) and layout.is_of_warp


def reshape_placement(layout: Placement, shape: Sequence[int]) -> Placement:
    """Returns the placement in another shape that keeps the registers and their order.

    Raises:
      LayoutError: the placement is neither strided nor linear in the new shape.
    """
    shape = tuple(shape)
    if isinstance(layout, LinearLayout):
        try:
            return layout.reshape(shape)
        except LayoutError:
            if not is_strided(layout) or math.prod(shape) != layout.size:
                raise
    # Strided layouts depend only on the row-major index, which a reshape preserves.
    strided = WGStridedLayout(shape, layout.vector_length)
    return place_registers(strided, shape)


def uniform_length(layout: Placement) -> int:
    """Returns the longest part of a register that is padding as a whole or not at all.

    It divides the number of elements in a register.
    """
    if not isinstance(layout, LinearLayout) or not layout.is_padded:
        return layout.vector_length
    axis = layout.vector_axis
    starts = [origin[axis] for origin in layout.origins]
    columns = [column[axis] for column in layout.thread_columns]
    return math.gcd(layout.vector_length, layout.shape[axis], *starts, *columns)


def is_strided(layout: LinearLayout) -> bool:
    """Whether a placement is that of a strided layout."""
    if layout.size % (THREADS * layout.vector_length):
        return False
    strided = WGStridedLayout(layout.shape, layout.vector_length)
    return strided.is_linear and strided.linear() == layout


def name_of(layout: LinearLayout) -> Layout | None:
    """Returns the name in the catalogue of a placement; None if it has none."""
    for name in Layout:
        try:
            if name.to_layout().linear(layout.shape) == layout:
                return name
        except PallasGpuError:
            continue
    return None


@functools.lru_cache(maxsize=256)
def describe(layout: Placement) -> str:
    """Returns a short name of a placement, for messages."""
    if isinstance(layout, WGStridedLayout):
        return f"WG_STRIDED(shape={layout.shape}, vec_size={layout.vec_size})"
    if (name := name_of(layout)) is not None:
        return f"Layout.{name.name}"
    if is_strided(layout):
        return f"Layout.WG_STRIDED({layout.shape}, vec_size={layout.vector_length})"
    return (
        f"a layout of {layout.num_registers} registers with "
        f"{layout.vector_length} elements along axis {layout.vector_axis} and thread "
        f"columns {layout.thread_columns}"
    )

# SPDX-License-Identifier: Apache-2.0
"""Padding of register layouts: which elements of a register lie inside of the array.

The registers of a padded layout hold elements beyond the array's shape. No instruction
may access memory for them, and no reduction may count them.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxlib.mlir import ir

from pallas_gpu.emitters import addressing, module
from pallas_gpu.emitters.elements import arith, dtypes
from pallas_gpu.emitters.registers import RegisterArray
from pallas_gpu.layouts import LinearLayout
from pallas_gpu.layouts.registers.linear import Coordinate
from pallas_gpu.layouts.registers.placement import Placement

# A thread's coordinate along an axis, as columns, and what it must be below.
_Bound = tuple[Coordinate, int]


def is_padded(layout: Placement) -> bool:
    """Whether registers hold elements beyond the array's shape."""
    return isinstance(layout, LinearLayout) and layout.is_padded


def inside(
    layout: Placement, register: int, axes: Sequence[int] | None = None
) -> ir.Value | None:
    """Which elements of a register are elements of the array.

    Args:
      register: its index.
      axes: the axes along which padding counts; all by default.

    Returns:
      i1, or `vector<len x i1>` where registers hold several elements; None if all
      elements of all threads are inside.
    """
    length = layout.vector_length
    places = [inside_from(layout, register, v, axes) for v in range(length)]
    if all(place is None for place in places):
        return None
    if length == 1:
        return places[0]
    if len(set(places)) == 1:
        assert places[0] is not None
        return dtypes.splat(places[0], length)
    yes = dtypes.constant(True, dtypes.BOOL)
    return dtypes.pack([yes if place is None else place for place in places])


def inside_from(
    layout: Placement,
    register: int,
    element: int,
    axes: Sequence[int] | None = None,
) -> ir.Value | None:
    """Whether one element of a register is an element of the array: i1, or None."""
    if not isinstance(layout, LinearLayout):
        return None
    bounds = []
    for axis in layout.padded_axes:
        if axes is not None and axis not in axes:
            continue
        start = layout.origins[register][axis]
        if layout.vector_length > 1 and axis == layout.vector_axis:
            start += element
        columns = tuple(column[axis] for column in layout.thread_columns)
        if start + sum(columns) >= layout.shape[axis]:
            bounds.append((columns, layout.shape[axis] - start))
    return _all_below(tuple(bounds)) if bounds else None


def _all_below(bounds: tuple[_Bound, ...]) -> ir.Value:
    """i1: the thread's coordinates are below their limits."""

    def emit() -> ir.Value:
        result = _below(*bounds[0])
        for bound in bounds[1:]:
            result = arith.andi(result, _below(*bound))
        return result

    return module.current().hoisted(("inside", bounds), emit)


def _below(columns: Coordinate, limit: int) -> ir.Value:
    kernel = module.current()
    if limit <= 0:
        return dtypes.constant(False, dtypes.BOOL)

    def emit() -> ir.Value:
        coordinate = addressing.thread_sum(columns)
        return arith.cmpi(arith.CmpIPredicate.ult, coordinate, kernel.i32(limit))

    return kernel.hoisted(("below", columns, limit), emit)


def filled(
    x: RegisterArray, value: ir.Value, axes: Sequence[int] | None = None
) -> RegisterArray:
    """The array with its padding replaced by a value.

    Args:
      value: an element of its dtype.
      axes: the axes along which padding counts; all by default.
    """
    if not is_padded(x.layout):
        return x
    splat = dtypes.splat(value, x.layout.vector_length)
    values = []
    for register, held in enumerate(x.values):
        within = inside(x.layout, register, axes)
        values.append(held if within is None else arith.select(within, held, splat))
    return x.with_values(values)

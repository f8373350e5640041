# SPDX-License-Identifier: Apache-2.0
"""Loads and stores that some threads skip: of padding, and where a mask is false."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_gpu import errors
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.elements.convert import convert_value
from pallas_gpu.emitters.padding import inside_from
from pallas_gpu.emitters.registers import Array, Deferred, RegisterArray
from pallas_gpu.layouts.registers.placement import (
    Placement,
    describe,
    uniform_length,
)

# A register and the first element in it that an access transfers.
_Slot = tuple[int, int]
_Conditions = list[ir.Value | None]


def check_mask(mask: Array | None, layout: Placement) -> RegisterArray | None:
    """Materializes a mask in the layout of the array that is loaded or stored.

    Raises:
      LayoutError: it has another layout.
      DTypeError: its elements are not bools.
    """
    if mask is None:
        return None
    if mask.dtype != dtypes.BOOL:
        raise errors.DTypeError(
            "A mask consists of bools", expected=dtypes.BOOL, got=mask.dtype
        )
    return _in_layout(mask, layout, "mask")


def _in_layout(x: Array, layout: Placement, what: str) -> RegisterArray:
    if isinstance(x, Deferred):
        return x.materialize(layout)
    if x.layout != layout:
        raise errors.LayoutError(
            f"The {what} of a masked access is in another layout than the array",
            expected=describe(layout),
            got=describe(x.layout),
            hint=f"layout_cast the {what}, or load without a layout",
        )
    return x


def conditions(
    layout: Placement, slots: Sequence[_Slot], mask: RegisterArray | None
) -> _Conditions:
    """Under which conditions a thread may access memory: an i1 each, None if always.

    Conditions that are known to be equal, as those of a vector that a mask has or has
    not as a whole, are one value.

    Args:
      layout: of the array that is loaded or stored.
      slots: what the accesses transfer. With a mask each transfers one element,
        otherwise as many as are inside or outside of the array together.
      mask: in this layout.
    """
    result: _Conditions = []
    known: dict[tuple[ir.Value, ir.Value], ir.Value] = {}
    uniform: dict[ir.Value, ir.Value] = {}
    together = uniform_length(layout)
    for register, element in slots:
        wanted = inside_from(layout, register, element - element % together)
        if mask is not None:
            asked = _asked(mask.values[register], element, uniform)
            if wanted is not None:
                key = wanted, asked
                wanted = known.get(key) or known.setdefault(key, arith.andi(*key))
            else:
                wanted = asked
        result.append(wanted)
    return result


def _asked(held: ir.Value, element: int, uniform: dict[ir.Value, ir.Value]) -> ir.Value:
    """One element of a mask's register; the same value for all of a uniform one."""
    if held in uniform:
        return uniform[held]
    value = dtypes.extract(held, element)
    if dtypes.is_uniform(held):
        uniform[held] = value
    return value


def others(
    other: Array | None,
    layout: Placement,
    slots: Sequence[_Slot],
    dtype: np.dtype,
    memory: np.dtype,
    count: int = 1,
) -> list[ir.Value]:
    """For each access the vector that it returns where it is not executed.

    Args:
      other: an array in the layout, of which accesses transfer single elements; None
        for zeros.
      layout: of the array that is loaded.
      slots: the elements.
      dtype, memory: the elements' types in registers and in memory.
      count: the items in memory of an access.
    """
    if other is None:
        zero = dtypes.splat(dtypes.constant(0, memory), count)
        return [zero] * len(slots)
    if other.dtype != dtype:
        raise errors.DTypeError(
            "The dtypes of `other` and the reference differ",
            expected=dtype,
            got=other.dtype,
            hint="convert it with astype",
        )
    values = _in_layout(other, layout, "`other`").values
    stored = {v: convert_value(v, dtype, memory) for v in dict.fromkeys(values)}
    return [dtypes.splat(dtypes.extract(stored[values[r]], v), 1) for r, v in slots]

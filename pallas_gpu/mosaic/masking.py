# SPDX-License-Identifier: Apache-2.0
"""Loads and stores that some threads skip: of padding, and where a mask is false."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from pallas_gpu import errors
from pallas_gpu.layouts.registers.placement import Placement, describe
from pallas_gpu.mosaic.elements import dtypes
from pallas_gpu.mosaic.elements.convert import convert_value
from pallas_gpu.mosaic.padding import inside_from
from pallas_gpu.mosaic.registers import Array, Deferred, RegisterArray

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

    Args:
      layout: of the array that is loaded or stored.
      slots: what the accesses transfer. With a mask each transfers one element,
        otherwise as many as are inside or outside of the array together.
      mask: in this layout.
    """
    result: _Conditions = []
    for register, element in slots:
        wanted = inside_from(layout, register, element)
        if mask is not None:
            asked = dtypes.extract(mask.values[register], element)
            wanted = asked if wanted is None else arith.andi(wanted, asked)
        result.append(wanted)
    return result


def load(
    type_: ir.Type, dtype: np.dtype, pointer: ir.Value, condition: ir.Value | None
) -> ir.Value:
    """A vector from memory; zeros where a condition does not hold.

    Args:
      type_: the vector's type.
      dtype: the type of its elements.
      pointer: an address that may be read in any case.
      condition: i1, None is true.
    """
    value = llvm.load(type_, pointer)
    if condition is None:
        return value
    return arith.select(condition, value, dtypes.constant(0, dtype, value))


def load_if(
    type_: ir.Type, pointer: ir.Value, condition: ir.Value, other: ir.Value
) -> ir.Value:
    """A vector from memory, or `other` without an access where an i1 is false."""
    branch = scf.IfOp(condition, [type_], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        scf.yield_([llvm.load(type_, pointer)])
    with ir.InsertionPoint(branch.else_block):
        scf.yield_([other])
    return branch.results[0]


def others(
    other: Array | None,
    layout: Placement,
    slots: Sequence[_Slot],
    dtype: np.dtype,
    memory: np.dtype,
) -> list[ir.Value]:
    """For each access what it returns under a false mask: a vector of one element.

    Args:
      other: an array in the layout, or None for zeros.
      layout: of the array that is loaded.
      slots: the elements.
      dtype, memory: the elements' types in registers and in memory.
    """
    if other is None:
        zero = dtypes.splat(dtypes.constant(0, memory), 1)
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


def together(given: _Conditions) -> Iterator[tuple[ir.Value | None, list[int]]]:
    """Each distinct condition, with the indices of the accesses under it."""
    groups: dict[ir.Value | None, list[int]] = {}
    for i, condition in enumerate(given):
        groups.setdefault(condition, []).append(i)
    yield from groups.items()


def both(a: ir.Value | None, b: ir.Value | None) -> ir.Value | None:
    """The conjunction of two conditions, of which None is true."""
    if a is None or b is None:
        return b if a is None else a
    return arith.andi(a, b)

# SPDX-License-Identifier: Apache-2.0
"""Elementwise operations on arrays; `elements/table.py` has their arithmetic."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_gpu import errors
from pallas_gpu.emitters import registers
from pallas_gpu.emitters.elements import dtypes, table
from pallas_gpu.emitters.registers import Array, Broadcast, Mapped, RegisterArray, Splat
from pallas_gpu.layouts.registers.placement import Placement, describe


def apply(
    name: str,
    *operands: Array,
    to: np.dtype | None = None,
    approx_math: bool = False,
    **params,
) -> Array:
    """Applies an operation of the table in `elements/table.py`.

    Register arrays must have equal layouts; deferred operands are materialized in it.
    If all operands are deferred, so is the result.

    Args:
      name: lax's name, e.g. `add`, `exp`, `select_n`, `clamp`, `integer_pow`.
      operands: of equal shapes; scalars (splats of shape ()) match any shape.
      to: dtype of the result, if the operation does not determine it.
      approx_math: allow the hardware's approximations for f32.
      params: the lax parameters that the operation uses, e.g. `y=2`.

    Raises:
      LayoutError: two operands have different layouts.
      DTypeError: the operation does not support the dtype.
    """
    row = table.lookup(name)
    dtype = operands[row.typed_by].dtype
    result = row.result_dtype(dtype, to)
    if row.result == "any" and (same := _retyped(operands[0], result)) is not None:
        return same
    emit = row.emitter(dtype, to=to, approx_math=approx_math, **params)
    return _map(emit, result, operands)


def astype(x: Array, dtype: np.dtype) -> Array:
    """Converts the elements as lax's `convert_element_type`; keeps the layout."""
    return apply("convert_element_type", x, to=np.dtype(dtype))


def _retyped(x: Array, dtype: np.dtype) -> Array | None:
    """The array with another dtype if that needs no instruction, else None."""
    if x.dtype == dtype:
        return x
    if isinstance(x, registers.Iota) and _counts_to(x.dtype, x.shape[x.dimension] - 1):
        return registers.Iota(dtype, x.shape, x.dimension)
    return None


def _counts_to(dtype: np.dtype, last: int) -> bool:
    """Whether a type has all integers from 0 to a last one."""
    if jnp.issubdtype(dtype, jnp.integer):
        return last <= int(ml_dtypes.iinfo(dtype).max)
    if not jnp.issubdtype(dtype, jnp.floating) or dtypes.kind(dtype) == "exponent":
        return False
    limits = ml_dtypes.finfo(dtype)
    return last <= min(2.0 ** (limits.nmant + 1), float(limits.max))


def _map(emit, dtype: np.dtype, operands: tuple[Array, ...]) -> Array:
    operands = _same_shape(operands)
    splats = [x for x in operands if isinstance(x, Splat)]
    if len(splats) == len(operands):
        value = emit(*(x.value for x in splats))
        return Splat(value, dtype, operands[0].shape)
    arrays = [x for x in operands if isinstance(x, RegisterArray)]
    if arrays:
        layout = common_layout(arrays)
        columns = [
            (x if isinstance(x, RegisterArray) else x.materialize(layout)).values
            for x in operands
        ]
        return RegisterArray(registers.map_registers(emit, columns), layout, dtype)
    narrow = _before_broadcast(operands)
    if narrow is not None:
        first = next(x for x in operands if isinstance(x, Broadcast))
        small = _map(emit, dtype, narrow)
        return Broadcast(small, first.shape, first.dims)  # type: ignore[arg-type]
    return Mapped(emit, operands, dtype)  # type: ignore[arg-type]


def _same_shape(operands: tuple[Array, ...]) -> tuple[Array, ...]:
    shapes = {x.shape for x in operands if x.shape != ()}
    if len(shapes) > 1:
        raise errors.ShapeError(
            "Elementwise operands have different shapes",
            expected="equal shapes, or scalars",
            got=[x.shape for x in operands],
        )
    shape = shapes.pop() if shapes else ()
    return tuple(
        x if x.shape == shape else registers.broadcast_in_dim(x, shape, ())
        for x in operands
    )


def common_layout(
    arrays: list[RegisterArray],
    what: str = "Operands of an elementwise operation",
    hint: str = "load one operand in the layout of the other",
) -> Placement:
    """The layout of all arrays."""
    layout = arrays[0].layout
    for other in arrays[1:]:
        if other.layout != layout:
            first, second = map(describe, (layout, other.layout))
            raise errors.LayoutError(
                f"{what} have different layouts",
                expected=f"equal layouts, e.g. {first} for both",
                got=f"{first} and {second}",
                hint=f"{hint}, or use layout_cast(x, {first})",
            )
    return layout


def _before_broadcast(operands: tuple[Array, ...]) -> tuple[Array, ...] | None:
    """The operands before a broadcast that all share: the work is done on them."""
    broadcasts = [x for x in operands if isinstance(x, Broadcast)]
    if not broadcasts:
        return None
    key = (broadcasts[0].operand.layout, broadcasts[0].dims)
    small: list[Array] = []
    for x in operands:
        if isinstance(x, Broadcast) and (x.operand.layout, x.dims) == key:
            small.append(x.operand)
        elif isinstance(x, Splat):
            small.append(Splat(x.value, x.dtype, broadcasts[0].operand.shape))
        else:
            return None
    return tuple(small)


def scalar(value, dtype: np.dtype) -> Splat:
    """A scalar operand: an `ir.Value`, or a Python or numpy number."""
    dtype = np.dtype(dtype)
    if isinstance(value, (int, float, bool, np.generic)):
        value = dtypes.constant(value, dtype)
    return Splat(value, dtype, ())

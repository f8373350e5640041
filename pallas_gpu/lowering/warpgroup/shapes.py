# SPDX-License-Identifier: Apache-2.0
"""lax's operations on shapes, and reductions, on whole arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.lax import shapes as lane_rules
from pallas_gpu.lowering.rules import warpgroup
from pallas_gpu.mosaic import dialect, logical, reduce
from pallas_gpu.mosaic import registers as regs
from pallas_gpu.mosaic.elements import arithmetic, dtypes


def splat(x: Any, shape: tuple[int, ...]) -> vals.Vector:
    """Returns the array whose elements all are a scalar."""
    result = logical.vector_type(x.dtype, shape)
    return vals.Vector(vector.broadcast(result, element(x.value, x.dtype)), x.dtype)


def element(value: ir.Value, dtype: np.dtype) -> ir.Value:
    """Returns a scalar as an array's element: a float8 scalar is a byte otherwise."""
    wanted = logical.element_type(dtype)
    return value if value.type == wanted else arith.bitcast(wanted, value)


def as_vector(x: Any, shape: tuple[int, ...]) -> vals.Vector:
    """Returns an array; a scalar is repeated."""
    return splat(x, shape) if vals.is_scalar(x) else x


def broadcast(x: vals.Vector, shape: tuple[int, ...], dims: Sequence[int]) -> Any:
    """Repeats an array: axis i of it becomes axis `dims[i]`."""
    result = logical.vector_type(x.dtype, shape)
    value = dialect.ops.broadcast_in_dim(result, x.value, list(dims))
    return vals.Vector(value, x.dtype)


def spread(x: Any, shape: tuple[int, ...]) -> Any:
    """Returns an operand of an elementwise operation in the result's shape.

    lax repeats axes of size one by itself. A scalar stays one.
    """
    if vals.is_scalar(x) or x.shape == shape:
        return x
    return broadcast(x, shape, range(len(shape) - len(x.shape), len(shape)))


@warpgroup("broadcast_in_dim")
def _broadcast_in_dim(ctx: RuleContext, x: Any, *dynamic: Any) -> Any:
    lane_rules.refuse_dynamic_shape(dynamic)
    shape = ctx.out_aval.shape
    if not shape:
        return x
    if vals.is_scalar(x):
        return splat(x, shape)
    return broadcast(x, shape, ctx.eqn.params["broadcast_dimensions"])


@warpgroup("iota")
def _iota(ctx: RuleContext, *dynamic: Any) -> Any:
    aval = ctx.out_aval
    dtype = vals.numpy_dtype(aval)
    dimension = ctx.eqn.params["dimension"]
    result = logical.vector_type(dtype, aval.shape)
    return vals.Vector(dialect.ops.broadcasted_iota(result, dimension), dtype)


@warpgroup("reshape")
def _reshape(ctx: RuleContext, x: Any, *dynamic: Any) -> Any:
    lane_rules.refuse_dimensions(ctx)
    return _to_shape(x, ctx.out_aval.shape)


@warpgroup("squeeze")
def _squeeze(ctx: RuleContext, x: Any) -> Any:
    return _to_shape(x, ctx.out_aval.shape)


def _to_shape(x: Any, shape: tuple[int, ...]) -> Any:
    if x.shape == shape:
        return x
    if vals.is_scalar(x):
        return splat(x, shape)
    if not shape:
        return _element(x)
    result = logical.vector_type(x.dtype, shape)
    return vals.Vector(vector.shape_cast(result, x.value), x.dtype)


def _element(x: vals.Vector) -> Any:
    """The element of a splat; no other array of one element has a register for it."""
    value = splat_source(x)
    if value is None:
        raise lane_rules.one_element_error(x.shape)
    return regs.Splat(dtypes.bitcast(value, x.dtype), x.dtype, ())


def splat_source(x: vals.Vector) -> ir.Value | None:
    """Returns the element that an array repeats, None where it is no splat."""
    owner = x.value.owner
    if isinstance(owner, ir.Block) or owner.operation.name != "vector.broadcast":
        return None
    return owner.operation.operands[0]


@warpgroup("transpose")
def _transpose(ctx: RuleContext, x: Any) -> Any:
    permutation = list(ctx.eqn.params["permutation"])
    if vals.is_scalar(x):
        return x
    result = logical.vector_type(x.dtype, ctx.out_aval.shape)
    return vals.Vector(vector.transpose(result, x.value, permutation), x.dtype)


@warpgroup("slice")
def _slice(ctx: RuleContext, x: Any) -> Any:
    return static_slice(x, ctx.eqn.params["start_indices"], ctx.out_aval.shape)


def static_slice(x: vals.Vector, starts: Any, sizes: Any) -> vals.Vector:
    """Returns a slice of an array."""
    result = logical.vector_type(x.dtype, sizes)
    ones = [1] * len(sizes)
    value = vector.extract_strided_slice(
        result, x.value, list(starts), list(sizes), ones
    )
    return vals.Vector(value, x.dtype)


# MLIR's names, which tell the sign of integers.
_COMBINING: dict[tuple[str, str], str] = {
    ("max", "float"): "maximumf",
    ("max", "signed"): "maxsi",
    ("max", "unsigned"): "maxui",
    ("max", "bool"): "or",
    ("min", "float"): "minimumf",
    ("min", "signed"): "minsi",
    ("min", "unsigned"): "minui",
    ("min", "bool"): "and",
}


def _make_reduction(kind: reduce.Kind):
    def rule(ctx: RuleContext, x: Any) -> Any:
        axes = list(ctx.eqn.params["axes"])
        if not axes:
            return x
        dtype = x.dtype
        if dtype != dtypes.BOOL:
            arithmetic.lookup(kind, dtype)  # refuses types that nothing combines
        combining = _COMBINING.get((kind, dtypes.kind(dtype)), kind)
        attribute = ir.Attribute.parse(f"#vector.kind<{combining}>")
        # The op wants a start value; a reduction of ours has none, and ignores it.
        start: Any = vals.constant(0, dtype)
        if ctx.out_aval.shape:
            start = splat(start, ctx.out_aval.shape)
        result = vector.multi_reduction(attribute, x.value, start.value, axes)
        if ctx.out_aval.shape:
            return vals.Vector(result, dtype)
        return regs.Splat(result, dtype, ())

    return rule


for _name, _kind in lane_rules.KINDS.items():
    warpgroup(_name)(_make_reduction(_kind))

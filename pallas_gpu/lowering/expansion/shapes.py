# SPDX-License-Identifier: Apache-2.0
"""Splats, iotas, operations on shapes, reductions."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from pallas_gpu.lowering import scratch
from pallas_gpu.lowering.expansion.expand import Expansion, expands
from pallas_gpu.mosaic import logical, reduce
from pallas_gpu.mosaic import registers as regs
from pallas_gpu.mosaic.elements import dtypes


@expands("vector.broadcast")
def _splat(expansion: Expansion, op: Any) -> None:
    dtype = logical.dtype_of(op.result.type)
    value = dtypes.bitcast(op.operands[0], dtype)
    expansion.set(op.result, regs.splat(value, dtype, op.result.type.shape))
    expansion.dead.append(op.operation)


@expands("mosaic_gpu.broadcasted_iota")
def _iota(expansion: Expansion, op: Any) -> None:
    dtype = logical.dtype_of(op.result.type)
    dimension = ir.IntegerAttr(op.attributes["dimension"]).value
    expansion.set(op.result, regs.iota(dtype, op.result.type.shape, dimension))
    expansion.dead.append(op.operation)


@expands("mosaic_gpu.broadcast_in_dim")
def _broadcast(expansion: Expansion, op: Any) -> None:
    dims = ir.DenseI64ArrayAttr(op.attributes["broadcast_dimensions"])
    shape = tuple(op.result.type.shape)
    array = regs.broadcast_in_dim(expansion.operand(op, 0), shape, tuple(dims))
    expansion.set(op.result, array)
    expansion.dead.append(op.operation)


@expands("vector.shape_cast")
def _reshape(expansion: Expansion, op: Any) -> None:
    shape = tuple(op.result.type.shape)
    expansion.set(op.result, regs.reshape(expansion.operand(op, 0), shape))
    expansion.dead.append(op.operation)


@expands("vector.transpose")
def _transpose(expansion: Expansion, op: Any) -> None:
    permutation = tuple(ir.DenseI64ArrayAttr(op.attributes["permutation"]))
    array = expansion.operand(op, 0)
    if isinstance(array, regs.Splat):
        shape = tuple(op.result.type.shape)
        expansion.set(op.result, regs.splat(array.value, array.dtype, shape))
    else:
        expansion.set(op.result, regs.transpose(expansion.placed(op, 0), permutation))
    expansion.dead.append(op.operation)


@expands("vector.extract_strided_slice")
def _slice(expansion: Expansion, op: Any) -> None:
    starts, sizes = _numbers(op, "offsets"), _numbers(op, "sizes")
    array = expansion.operand(op, 0)
    if not isinstance(array, regs.Splat):
        array = expansion.placed(op, 0)
    expansion.set(op.result, regs.static_slice(array, starts, sizes))
    expansion.dead.append(op.operation)


def _numbers(op: Any, name: str) -> list[int]:
    return [ir.IntegerAttr(x).value for x in ir.ArrayAttr(op.attributes[name])]


@expands("vector.multi_reduction")
def _reduce(expansion: Expansion, op: Any) -> None:
    kind, unsigned = _combining(op)
    axes = tuple(ir.DenseI64ArrayAttr(op.attributes["reduction_dims"]))
    source = expansion.placed(op, 0)
    if unsigned:
        dtype = dtypes.named(f"uint{dtypes.bits(source.dtype)}")
        source = regs.with_sign(source, dtype)
    room = scratch.for_reduction(expansion.kernel, source, axes)
    result = reduce.reduce(kind, source, axes, room)
    if isinstance(op.result.type, ir.VectorType):
        expansion.set(op.result, result)
    else:
        assert isinstance(result, regs.Splat)
        op.result.replace_all_uses_with(result.value)
    expansion.dead.append(op.operation)


# MLIR's names: what combines, and whether it takes integers as unsigned.
_KINDS: dict[str, tuple[reduce.Kind, bool]] = {
    "add": ("add", False),
    "mul": ("mul", False),
    "and": ("and", False),
    "or": ("or", False),
    "maximumf": ("max", False),
    "maxsi": ("max", False),
    "maxui": ("max", True),
    "minimumf": ("min", False),
    "minsi": ("min", False),
    "minui": ("min", True),
}


def _combining(op: Any) -> tuple[reduce.Kind, bool]:
    """Returns the reduction's kind, and whether it takes integers as unsigned."""
    name = str(op.attributes["kind"]).removeprefix("#vector.kind<").removesuffix(">")
    return _KINDS[name]

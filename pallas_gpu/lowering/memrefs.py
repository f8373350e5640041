# SPDX-License-Identifier: Apache-2.0
"""Arrays in memory and parts of them, as memrefs of the warpgroup-level module.

An array is a `slice_smem` in SMEM, a `tmem_alloc` or a `slice_tmem` in TMEM, or a cast
of a pointer in GMEM. A part of it is a subview, followed by a transpose if its axes are
out of order. The type of a subview contains neither which axes were squeezed nor known
multiples of dynamic starts: an attribute does. It also contains static starts of ranges
over the array's edge, which MLIR refuses as static offsets and TMA admits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, builtin, memref

from pallas_gpu import errors, types
from pallas_gpu.layouts.window import Window
from pallas_gpu.mosaic import logical
from pallas_gpu.mosaic.elements import dtypes

# On a subview: its starts, the axes that it keeps, and a known multiple of each start.
_WINDOW = "pallas_gpu.window"
# On a cast of an array to the same bytes in another shape or as another type.
_REINTERPRETED = "pallas_gpu.reinterpreted"


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of an array in memory.

    Attributes:
      base: the result of the operation that declares the array.
      space: memory space:  GMEM, SMEM or TMEM.
      bits: width of an element in memory; a bool takes a byte.
      window: the part; its dynamic starts are i32 values.
      array: what the window is a part of: the array, or the same bytes in another shape
        or as another type.
    """

    base: ir.Value
    space: types.MemorySpace
    bits: int
    window: Window
    array: ir.Value


def subview(array: ir.Value, window: Window) -> ir.Value:
    """Makes a memref of a part of an array.

    Args:
      array: the whole array.
      window: the part; dynamic starts are i32 values.
    """
    mark = ir.ShapedType.get_dynamic_size()
    starts = [x if isinstance(x, int) else mark for x in window.starts]
    over = window.over_the_edge()
    static = [mark if axis in over else start for axis, start in enumerate(starts)]
    values = [
        _index(window.starts[axis])
        for axis, start in enumerate(static)
        if start == mark
    ]
    strides, axes = window.array_strides, sorted(window.axes)
    offset = mark if values else int(math.sumprod(static, strides))
    result = _strided(
        array.type,
        [window.sizes[a] for a in axes],
        [strides[a] for a in axes],
        offset,
    )
    ones = [1] * len(static)
    op = memref.SubViewOp(
        result, array, values, [], [], static, list(window.sizes), ones
    )
    recorded = {
        "starts": starts,
        "axes": axes,
        "multiples": list(window.multiples),
    }
    op.operation.attributes[_WINDOW] = ir.DictAttr.get(
        {name: ir.DenseI64ArrayAttr.get(given) for name, given in recorded.items()}
    )
    return transposed(op.result, window.order) if window.is_transposed else op.result


def reinterpreted(array: ir.Value, shape: Sequence[int], dtype: np.dtype) -> ir.Value:
    """Makes a memref of the bytes of an array in another shape, or as another type."""
    result = ir.MemRefType.get(
        list(shape),
        logical.element_type(dtypes.memory_dtype(dtype)),
        memory_space=array.type.memory_space,
    )
    op = builtin.UnrealizedConversionCastOp([result], [array])
    op.operation.attributes[_REINTERPRETED] = ir.UnitAttr.get()
    return op.result


def transposed(source: ir.Value, permutation: Sequence[int]) -> ir.Value:
    """Makes a memref whose axis i is axis `permutation[i]` of the source."""
    strides, offset = source.type.get_strides_and_offset()
    result = _strided(
        source.type,
        [source.type.shape[p] for p in permutation],
        [strides[p] for p in permutation],
        offset,
    )
    order = ir.AffineMapAttr.get(ir.AffineMap.get_permutation(list(permutation)))
    return memref.TransposeOp(result, source, order).result


def _strided(
    like: Any, shape: Sequence[int], strides: Sequence[int], offset: int
) -> ir.Type:
    layout = ir.StridedLayoutAttr.get(offset, list(strides))
    return ir.MemRefType.get(
        list(shape), like.element_type, layout, memory_space=like.memory_space
    )


def _index(value: int | ir.Value) -> ir.Value:
    if isinstance(value, int):
        value = arith.constant(ir.IntegerType.get_signless(32), value)
    return arith.index_cast(ir.IndexType.get(), value)


# --- resolving memrefs ----------------------------------------------------------------


def resolve(ref: ir.Value) -> Part | None:
    """Returns the part of an array behind a memref; None if it has no such array."""
    owner = ref.owner
    if isinstance(owner, ir.Block):
        return None
    op = owner.operation
    match op.name:
        case "mosaic_gpu.slice_smem":
            return _whole(ref, types.SMEM)
        case "builtin.unrealized_conversion_cast" if logical.BUFFER in op.attributes:
            return _whole(ref, types.GMEM)
        case "builtin.unrealized_conversion_cast" if _REINTERPRETED in op.attributes:
            source = resolve(op.operands[0])
            return source and _reinterpreted(ref, source)
        case "mosaic_gpu.tmem_alloc" | "mosaic_gpu.slice_tmem":
            return _whole(ref, types.TMEM)
        case "mosaic_gpu.with_transforms" | "mosaic_gpu.tmem_layout_cast":
            return resolve(op.operands[0])
        case "memref.subview":
            source = resolve(op.operands[0])
            return source and _moved(source, _subview_window(op, source.window))
        case "memref.transpose":
            source = resolve(op.operands[0])
            results = ir.AffineMapAttr(op.attributes["permutation"]).value.results
            permutation = [ir.AffineDimExpr(r).position for r in results]
            return source and _moved(source, source.window.transpose(permutation))
    return None


def _whole(ref: ir.Value, space: types.MemorySpace) -> Part:
    type_ = ir.MemRefType(ref.type)
    bits = logical.element_bits(type_.element_type)
    bits = 8 if bits == 1 else bits
    return Part(ref, space, bits, Window.whole(type_.shape), ref)


def _reinterpreted(ref: ir.Value, source: Part) -> Part:
    return dataclasses.replace(_whole(ref, source.space), base=source.base)


def _moved(part: Part, window: Window) -> Part:
    return dataclasses.replace(part, window=window)


def _subview_window(op: ir.Operation, source: Window) -> Window:
    if not source.is_whole or _WINDOW not in op.attributes:
        raise errors.InternalError(
            "A subview does not identify its part of an array",
            expected=f"a subview of a whole array, with {_WINDOW}",
            got=str(op),
        )
    mark = ir.ShapedType.get_dynamic_stride_or_offset()
    recorded = ir.DictAttr(op.attributes[_WINDOW])
    offsets = ir.DenseI64ArrayAttr(op.attributes["static_offsets"])
    dynamic = iter(list(op.operands)[1:])
    values = [next(dynamic) if offset == mark else None for offset in offsets]
    starts = [
        _before_cast(value) if start == mark else start
        for start, value in zip(
            ir.DenseI64ArrayAttr(recorded["starts"]), values, strict=True
        )
    ]
    return Window(
        source.array_shape,
        tuple(starts),
        tuple(ir.DenseI64ArrayAttr(op.attributes["static_sizes"])),
        tuple(ir.DenseI64ArrayAttr(recorded["axes"])),
        tuple(ir.DenseI64ArrayAttr(recorded["multiples"])),
    )


def _before_cast(index: ir.Value) -> ir.Value:
    """Returns the i32 start that `subview` converted to an index."""
    return index.owner.operation.operands[0]


def user_transforms(base: ir.Value) -> ir.Operation | None:
    """Returns the `with_transforms` of an array in SMEM, if there is one."""
    for use in base.uses:
        owner = use.owner
        op = owner.operation if hasattr(owner, "operation") else owner
        if op.name == "mosaic_gpu.with_transforms":
            return op
    return None

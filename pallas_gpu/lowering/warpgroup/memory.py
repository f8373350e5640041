# SPDX-License-Identifier: Apache-2.0
"""References as memrefs: whole arrays, and parts of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, builtin, memref

from pallas_gpu import types
from pallas_gpu.layouts.window import Window
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import KernelState, part_window
from pallas_gpu.mosaic import dialect, logical


def gmem_handle(kernel: KernelState, handle: vals.GmemHandle) -> vals.MemrefHandle:
    """Makes a memref of an operand or result of the kernel."""
    cast = builtin.UnrealizedConversionCastOp(
        [logical.gmem_type(handle.dtype, handle.shape)],
        [kernel.builder.buffers[handle.buffer_index]],
    )
    index = ir.IntegerType.get_signless(32)
    cast.attributes[logical.BUFFER] = ir.IntegerAttr.get(index, handle.buffer_index)
    return vals.MemrefHandle(cast.results[0], handle.dtype, handle.lead)


def smem_handle(aval: Any, offset_bytes: int) -> vals.MemrefHandle:
    """Makes a memref of an array at its place in the block's SMEM."""
    dtype = vals.numpy_dtype(aval)
    array = dialect.ops.slice_smem(logical.smem_type(dtype, aval.shape), offset_bytes)
    if aval.transforms:
        layout = types.smem_layout(aval.shape, aval.dtype, aval.transforms)
        given = dialect.transforms_to_attributes(layout.tiling, layout.swizzle)
        array = dialect.ops.with_transforms(array, ir.ArrayAttr.get(given))
    return vals.MemrefHandle(array, dtype)


def part(handle: vals.MemrefHandle, transforms: Any) -> ir.Value:
    """Returns the memref of a part of a reference."""
    window = part_window(handle, transforms)
    if window.is_whole:
        return handle.memref
    result = _subview(handle.memref, window)
    return _transpose(result, window.order) if window.is_transposed else result


def _subview(source: ir.Value, window: Window) -> ir.Value:
    dynamic_mark = ir.ShapedType.get_dynamic_size()
    values = [_index(window.starts[axis]) for axis in window.dynamic]
    static = [x if isinstance(x, int) else dynamic_mark for x in window.starts]
    strides, axes = window.array_strides, sorted(window.axes)
    offset = dynamic_mark if values else int(math.sumprod(static, strides))
    result = _strided(
        source.type,
        [window.sizes[a] for a in axes],
        [strides[a] for a in axes],
        offset,
    )
    ones = [1] * len(static)
    return memref.SubViewOp(
        result, source, values, [], [], static, list(window.sizes), ones
    ).result


def _transpose(source: ir.Value, permutation: Sequence[int]) -> ir.Value:
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


def _index(value: ir.Value) -> ir.Value:
    return arith.index_cast(ir.IndexType.get(), value)

# SPDX-License-Identifier: Apache-2.0
"""References as memrefs: whole arrays, and parts of them."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import builtin

from pallas_gpu import types
from pallas_gpu.lowering import memrefs
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
    """Makes a memref of an array at its offset in the block's SMEM."""
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
    return memrefs.subview(handle.memref, window)

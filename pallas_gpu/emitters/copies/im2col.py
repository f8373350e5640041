# SPDX-License-Identifier: Apache-2.0
"""Copies of one pixel of each of some windows: TMA in im2col mode."""

from __future__ import annotations

from collections.abc import Sequence

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_gpu.emitters import elected, gmem, mbarrier, module, smem, tensor_map, tma
from pallas_gpu.emitters.control import predicated
from pallas_gpu.emitters.copies import instructions
from pallas_gpu.layouts.gmem.im2col import Windows, require_adjacent
from pallas_gpu.layouts.window import row_major_strides


def load(
    windows: Windows,
    source: gmem.GmemView,
    target: smem.SmemView,
    barrier_pointer: ir.Value,
    start: Sequence[ir.Value],
    offsets: Sequence[ir.Value],
    predicate: ir.Value | None = None,
) -> None:
    """Starts a copy of pixels to SMEM.

    PTX: `mbarrier.arrive.expect_tx`, `cp.async.bulk.tensor.im2col`. Since: sm_90. The
    threads of the issuer synchronize, then the elected one issues the copy.

    Args:
      windows: those of the images.
      source: the images.
      target: a row for each window.
      barrier_pointer: `!llvm.ptr<3>`; the copy counts as one arrival.
      start: i32: image, first window, first channel.
      offsets: i32: the pixel in a window.
      predicate: i1, uniform; where it is false nothing is copied.

    Raises:
      LayoutError: the rows are not adjacent in SMEM.
    """
    require_adjacent(target.layout, target.window)
    assert source.buffer_index is not None
    kernel, images = module.current(), source.window.array_shape
    descriptor = tensor_map.tensor_map_pointer(
        tensor_map.TensorMap(
            buffer_index=source.buffer_index,
            dtype=source.dtype.name,
            sizes=images,
            strides=row_major_strides(images),
            box=target.window.sizes[-2:],
            swizzle=target.layout.swizzle,
            corners=windows.corners,
        )
    )
    pointer = smem.slice_pointer(target)
    i16 = ir.IntegerType.get_signless(16)
    narrow = [arith.trunci(i16, offset) for offset in offsets]
    mbarrier.synchronize()
    num_bytes: ir.Value = kernel.i32(tma.transfer_bytes(target))
    if predicate is not None:
        num_bytes = arith.select(predicate, num_bytes, kernel.i32(0))
    with elected.thread() as by:
        mbarrier.emit_arrive_expect_tx(barrier_pointer, num_bytes, by)
        with predicated(predicate):
            instructions.load_im2col(
                pointer, descriptor, start[::-1], barrier_pointer, narrow[::-1], by
            )

# SPDX-License-Identifier: Apache-2.0
"""Elements of an array in registers at positions that are values: by way of SMEM."""

from __future__ import annotations

import dataclasses
import math

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_gpu.layouts.moves.least_scratch import in_rounds
from pallas_gpu.layouts.moves.rearrange import Affine
from pallas_gpu.mosaic import addressing, mbarrier, module
from pallas_gpu.mosaic.elements import dtypes
from pallas_gpu.mosaic.elements.convert import convert_value
from pallas_gpu.mosaic.moves import image
from pallas_gpu.mosaic.moves.scratch import SmemScratch, require
from pallas_gpu.mosaic.padding import inside_from
from pallas_gpu.mosaic.registers import RegisterArray


def gather(
    x: RegisterArray,
    index: RegisterArray,
    other: RegisterArray,
    scratch: SmemScratch | None,
) -> RegisterArray:
    """Returns the elements at positions in the row-major order of an array.

    PTX: `st.shared`, `barrier.sync`, `ld.shared`. All threads of the warpgroup issue
    it.

    Args:
      x: the array, in any layout.
      index: i32: a position for each element of the result.
      other: the elements where the position is outside of the array, in the layout of
        `index`.
      scratch: less than the array means rounds, of which there may be 512.

    Returns:
      An array in the layout of `index`.

    Raises:
      OutOfResources: the scratch is too small.
    """
    held, size = image.in_memory(x), math.prod(x.shape)
    image_bytes = image.size_bytes(size, x.dtype)
    scratch = require(scratch, in_rounds(image_bytes), "a gather")
    where = Affine.row_major(x.shape)
    loads = _Loads(index, scratch.pointer, size, held)
    values = list(image.in_memory(other).values)
    for span in image.spans(image_bytes, scratch.size_bytes):
        # Threads may still be reading what an earlier use stored in the scratch.
        mbarrier.synchronize()
        image.store(held, where, scratch.pointer, span)
        mbarrier.synchronize()
        values = [loads.register(r, value, span) for r, value in enumerate(values)]
    final = tuple(convert_value(value, held.dtype, x.dtype) for value in values)
    return RegisterArray(final, index.layout, x.dtype)


@dataclasses.dataclass(frozen=True)
class _Loads:
    """Loads from the image of `size` elements, at the positions of `index`."""

    index: RegisterArray
    pointer: ir.Value
    size: int
    held: RegisterArray

    def register(self, r: int, before: ir.Value, span: image.Span | None) -> ir.Value:
        """The register with what is loaded in a span, and what it was before."""
        itemsize = self.held.dtype.itemsize
        type_ = dtypes.vector_type(self.held.dtype, 1)
        low, high = 0, self.size
        if span is not None:
            low, high = (bound // itemsize for bound in span)
        result = []
        for i in range(self.index.layout.vector_length):
            position = dtypes.extract(self.index.values[r], i)
            # The positions of padding have no meaning.
            holds = image.both(
                inside_from(self.index.layout, r, i),
                image.within(position, (low, min(high, self.size))),
            )
            place = position_pointer(self.pointer, position, low, itemsize, holds)
            value = dtypes.extract(llvm.load(type_, place), 0)
            result.append(arith.select(holds, value, dtypes.extract(before, i)))
        return dtypes.pack(result)


def position_pointer(
    pointer: ir.Value,
    position: ir.Value,
    low: int,
    itemsize: int,
    holds: ir.Value | None = None,
) -> ir.Value:
    """The address of a position in the image that starts at position `low`.

    Where `holds` does not hold, it is that of the image's first element.
    """
    kernel = module.current()
    if low:
        position = arith.subi(position, kernel.i32(low))
    if holds is not None:
        position = arith.select(holds, position, kernel.i32(0))
    if itemsize > 1:
        position = arith.muli(position, kernel.i32(itemsize))
    return addressing.offset_pointer(pointer, position)

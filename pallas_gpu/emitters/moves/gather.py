# SPDX-License-Identifier: Apache-2.0
"""Elements of an array in registers at positions that are values: by way of SMEM."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_gpu.emitters import addressing, control, mbarrier, module
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.elements.convert import convert_value
from pallas_gpu.emitters.moves import image
from pallas_gpu.emitters.moves.scratch import SmemScratch, require
from pallas_gpu.emitters.padding import inside_from
from pallas_gpu.emitters.registers import RegisterArray
from pallas_gpu.layouts.moves.least_scratch import IMAGE_BYTES
from pallas_gpu.layouts.moves.rearrange import Affine


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
      scratch: less than the array means rounds.

    Returns:
      An array in the layout of `index`.

    Raises:
      OutOfResources: the scratch is too small.
    """
    held, size = image.in_memory(x), math.prod(x.shape)
    scratch = require(scratch, IMAGE_BYTES, "a gather")
    pointer, itemsize = scratch.pointer, held.dtype.itemsize
    where = Affine.row_major(x.shape)
    loads = _Loads(index, pointer, held)

    def move(span: image.Span | None, values: Sequence[ir.Value]) -> list[ir.Value]:
        # Threads may still be reading what an earlier use stored in the scratch.
        mbarrier.synchronize()
        image.store(held, where, pointer, span and span.times(itemsize))
        mbarrier.synchronize()
        part = span or image.Span(0, size)
        return [loads.register(r, value, part) for r, value in enumerate(values)]

    values = image.in_rounds(
        size, scratch.size_bytes // itemsize, image.in_memory(other).values, move
    )
    final = tuple(convert_value(value, held.dtype, x.dtype) for value in values)
    return RegisterArray(final, index.layout, x.dtype)


@dataclasses.dataclass(frozen=True)
class _Loads:
    """Loads from the image, at the positions of `index`."""

    index: RegisterArray
    pointer: ir.Value
    held: RegisterArray

    def register(self, r: int, before: ir.Value, span: image.Span) -> ir.Value:
        """The register with what is loaded from a span of positions, or was before."""
        itemsize = self.held.dtype.itemsize
        type_ = dtypes.vector_type(self.held.dtype, 1)
        result = []
        for i in range(self.index.layout.vector_length):
            position = span.relative(dtypes.extract(self.index.values[r], i))
            # The positions of padding have no meaning.
            inside = inside_from(self.index.layout, r, i)
            holds = control.both(inside, span.holds(position))
            place = position_pointer(self.pointer, position, itemsize, holds)
            value = dtypes.extract(llvm.load(type_, place), 0)
            result.append(arith.select(holds, value, dtypes.extract(before, i)))
        return dtypes.pack(result)


def position_pointer(
    pointer: ir.Value, position: ir.Value, itemsize: int, holds: ir.Value | None = None
) -> ir.Value:
    """The address of a position in the image.

    Where `holds` does not hold, it is that of the image's first element.
    """
    kernel = module.current()
    if holds is not None:
        position = arith.select(holds, position, kernel.i32(0))
    if itemsize > 1:
        position = arith.muli(position, kernel.i32(itemsize))
    return addressing.offset_pointer(pointer, position)

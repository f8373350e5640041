# SPDX-License-Identifier: Apache-2.0
"""Global memory: views of the kernel's buffers, direct loads and stores."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_gpu.layouts import LinearLayout
from pallas_gpu.layouts.gmem.access import GmemAccess, plan_gmem
from pallas_gpu.layouts.registers.placement import (
    Placement,
    default_placement,
    place_registers,
)
from pallas_gpu.layouts.window import Window
from pallas_gpu.mosaic import addressing, smem
from pallas_gpu.mosaic.elements import dtypes
from pallas_gpu.mosaic.elements.convert import convert_value
from pallas_gpu.mosaic.registers import Array, Deferred, RegisterArray
from pallas_gpu.mosaic.smem import (
    add_index,
    check_stored,
    concatenate,
    predicated,
    split,
)


@dataclasses.dataclass(frozen=True)
class GmemView:
    """A slice of a row-major array in global memory.

    Attributes:
      pointer: `!llvm.ptr` or `!llvm.ptr<1>`, start of the whole array, 16-byte aligned.
      buffer_index: the index among the kernel's buffers, for TMA; None for memory that
        is not a kernel buffer.
      dtype: element type.
      window: the slice; its dynamic starts are i32 values.
    """

    pointer: ir.Value
    buffer_index: int | None
    dtype: np.dtype
    window: Window

    @classmethod
    def whole(
        cls,
        pointer: ir.Value,
        buffer_index: int | None,
        shape: Sequence[int],
        dtype: np.dtype,
    ) -> GmemView:
        """Returns the view of a whole array."""
        return cls(pointer, buffer_index, np.dtype(dtype), Window.whole(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a load of the view."""
        return self.window.shape

    def slice(
        self,
        starts: Sequence[int | ir.Value],
        sizes: Sequence[int | None],
        multiples: Sequence[int] | None = None,
    ) -> GmemView:
        """Returns a slice of this view; see `Window.slice`."""
        window = self.window.slice(starts, sizes, multiples, add=add_index)
        return dataclasses.replace(self, window=window)

    def transpose(self, permutation: Sequence[int]) -> GmemView:
        """Returns the view whose axis i is axis `permutation[i]` of this one."""
        return dataclasses.replace(self, window=self.window.transpose(permutation))


def _address(view: GmemView, layout: Placement) -> GmemAccess:
    return plan_gmem(
        layout,
        view.window.strides,
        8 * dtypes.memory_dtype(view.dtype).itemsize,
        view.window.start_multiple,
    )


def slice_pointer(view: GmemView) -> ir.Value:
    """The address of the view's first element."""
    itemsize_bytes = dtypes.memory_dtype(view.dtype).itemsize
    static, pointer = 0, view.pointer
    i64 = ir.IntegerType.get_signless(64)
    for start, stride in zip(
        view.window.starts, view.window.array_strides, strict=True
    ):
        if isinstance(start, int):
            static += start * stride
            continue
        # Arrays may exceed 4 GiB, so the product needs 64 bits.
        wide = arith.extsi(i64, start)
        step = dtypes.constant(stride * itemsize_bytes, dtypes.I64)
        pointer = addressing.offset_pointer(pointer, arith.muli(wide, step))
    return addressing.offset_pointer(pointer, static * itemsize_bytes)


def _pointers(view: GmemView, plan: GmemAccess) -> list[ir.Value]:
    itemsize_bytes = dtypes.memory_dtype(view.dtype).itemsize
    thread = addressing.thread_sum([c * itemsize_bytes for c in plan.columns])
    base = addressing.offset_pointer(slice_pointer(view), thread)
    return [addressing.offset_pointer(base, s * itemsize_bytes) for s in plan.starts]


def load(view: GmemView, layout=None) -> RegisterArray:
    """Loads a view into registers.

    PTX: `ld.global`, up to 16 bytes per thread if the alignment is known. All threads
    of the warpgroup issue it. The load is synchronous.

    Args:
      view: within the bounds of the array.
      layout: the register layout; None selects the strided default.
    """
    if layout is None:
        placement = default_placement(view.shape, dtypes.bits(view.dtype))
    else:
        placement = place_registers(layout, view.shape)
    plan = _address(view, placement)
    memory = dtypes.memory_dtype(view.dtype)
    type_ = dtypes.vector_type(memory, plan.elements_per_access)
    pieces = [llvm.load(type_, pointer) for pointer in _pointers(view, plan)]
    per_register = placement.vector_length // plan.elements_per_access
    values = []
    for i in range(0, len(pieces), per_register):
        value = concatenate(pieces[i : i + per_register])
        values.append(convert_value(value, memory, view.dtype))
    return RegisterArray(tuple(values), placement, view.dtype)


def store(view: GmemView, value: Array) -> None:
    """Stores an array into a view; one thread stores each replicated element.

    PTX: `st.global`, up to 16 bytes per thread if the alignment is known. All threads
    of the warpgroup issue it.

    Args:
      view: within the bounds of the array.
      value: of the view's shape and dtype; a deferred array is materialized in the
        strided default layout.
    """
    check_stored(view.shape, view.dtype, value)
    if isinstance(value, Deferred):
        bits = dtypes.bits(view.dtype)
        value = value.materialize(default_placement(view.shape, bits))
    plan = _address(view, value.layout)
    memory = dtypes.memory_dtype(view.dtype)
    pieces = [
        piece
        for register in value.values
        for piece in split(
            convert_value(register, view.dtype, memory), plan.elements_per_access
        )
    ]
    layout = value.layout
    copies = layout.replication_bits if isinstance(layout, LinearLayout) else ()
    pointers = _pointers(view, plan)
    with predicated(addressing.thread_bits_clear(copies)):
        for pointer, piece in zip(pointers, pieces, strict=True):
            llvm.store(piece, pointer)


def _element_pointer(view: GmemView) -> ir.Value:
    smem.require_one_element(view.shape)
    return slice_pointer(view)


def load_scalar(view: GmemView) -> ir.Value:
    """Loads one element into every thread. PTX: `ld.global`."""
    return smem.load_element(_element_pointer(view), view.dtype)


def store_scalar(view: GmemView, value: ir.Value) -> None:
    """Stores one element from the elected thread. PTX: `st.global`."""
    smem.store_element(_element_pointer(view), value, view.dtype)

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
from pallas_gpu.mosaic import addressing, masking, smem
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


def _address(view: GmemView, layout: Placement, single: bool) -> GmemAccess:
    return plan_gmem(
        layout,
        view.window.strides,
        8 * dtypes.memory_dtype(view.dtype).itemsize,
        view.window.start_multiple,
        single=single,
    )


def access_widths(view: GmemView, layout: Placement) -> tuple[int, int]:
    """Elements of one access, and what they would be from the start of the array."""
    bits = 8 * dtypes.memory_dtype(view.dtype).itemsize
    taken = _address(view, layout, False)
    aligned = plan_gmem(layout, view.window.strides, bits)
    return taken.elements_per_access, aligned.elements_per_access


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


def _pointers(
    view: GmemView, plan: GmemAccess, inside: Sequence[ir.Value | None]
) -> list[ir.Value]:
    """One pointer per access, to the view's start where a condition does not hold."""
    itemsize_bytes = dtypes.memory_dtype(view.dtype).itemsize
    start = slice_pointer(view)
    last = sum(plan.columns) + max(plan.starts, default=0)
    wide = last * itemsize_bytes >= 2**31
    columns = [c * itemsize_bytes for c in plan.columns]
    thread = (addressing.wide_thread_sum if wide else addressing.thread_sum)(columns)
    base = addressing.offset_pointer(start, thread)
    result = []
    for i, offset in enumerate(plan.starts):
        offset_bytes = offset * itemsize_bytes
        condition = inside[i] if inside else None
        if condition is None:
            result.append(addressing.offset_pointer(base, offset_bytes))
        else:
            place = addressing.plus(thread, offset_bytes)
            clamped = addressing.clamped(place, condition)
            result.append(addressing.offset_pointer(start, clamped))
    return result


def _slots(layout: Placement, plan: GmemAccess) -> list[tuple[int, int]]:
    """The register and the first element in it of each access."""
    within = range(0, layout.vector_length, plan.elements_per_access)
    return [(r, v) for r in range(layout.num_registers) for v in within]


def load(
    view: GmemView,
    layout=None,
    *,
    mask: Array | None = None,
    other: Array | None = None,
) -> RegisterArray:
    """Loads a view into registers.

    PTX: `ld.global`, up to 16 bytes per thread if the alignment is known. All threads
    of the warpgroup issue it. The load is synchronous. Padding of the layout is 0.

    Args:
      view: within the bounds of the array, except where the mask is false.
      layout: the register layout; None selects the strided default.
      mask: bools in the layout: elements where it is false are not accessed.
      other: what these elements are in the result; None is 0.
    """
    if layout is None:
        placement = default_placement(view.shape, dtypes.bits(view.dtype))
    else:
        placement = place_registers(layout, view.shape)
    masked = masking.check_mask(mask, placement)
    plan = _address(view, placement, masked is not None)
    memory = dtypes.memory_dtype(view.dtype)
    type_ = dtypes.vector_type(memory, plan.elements_per_access)
    slots = _slots(placement, plan)
    wanted = masking.conditions(placement, slots, masked)
    if masked is None:
        pointers = _pointers(view, plan, wanted)
        pieces = [
            masking.load(type_, memory, pointer, condition)
            for pointer, condition in zip(pointers, wanted, strict=True)
        ]
    else:
        rest = masking.others(other, placement, slots, view.dtype, memory)
        pieces = [
            masking.load_if(type_, *access)
            for access in zip(_pointers(view, plan, ()), wanted, rest, strict=True)
        ]
    per_register = placement.vector_length // plan.elements_per_access
    values = []
    for i in range(0, len(pieces), per_register):
        value = concatenate(pieces[i : i + per_register])
        values.append(convert_value(value, memory, view.dtype))
    return RegisterArray(tuple(values), placement, view.dtype)


def store(view: GmemView, value: Array, *, mask: Array | None = None) -> None:
    """Stores an array into a view; one thread stores each replicated element.

    PTX: `st.global`, up to 16 bytes per thread if the alignment is known. All threads
    of the warpgroup issue it.

    Args:
      view: within the bounds of the array, except where the mask is false.
      value: of the view's shape and dtype; a deferred array is materialized in the
        strided default layout.
      mask: bools in the layout of `value`: elements where it is false are not stored.
    """
    check_stored(view.shape, view.dtype, value)
    if isinstance(value, Deferred):
        bits = dtypes.bits(view.dtype)
        value = value.materialize(default_placement(view.shape, bits))
    layout = value.layout
    masked = masking.check_mask(mask, layout)
    plan = _address(view, layout, masked is not None)
    memory = dtypes.memory_dtype(view.dtype)
    pieces = [
        piece
        for register in value.values
        for piece in split(
            convert_value(register, view.dtype, memory), plan.elements_per_access
        )
    ]
    copies = layout.replication_bits if isinstance(layout, LinearLayout) else ()
    pointers = _pointers(view, plan, ())
    guard = addressing.thread_bits_clear(copies)
    wanted = masking.conditions(layout, _slots(layout, plan), masked)
    for condition, accesses in masking.together(wanted):
        with predicated(masking.both(guard, condition)):
            for access in accesses:
                llvm.store(pieces[access], pointers[access])


def _element_pointer(view: GmemView) -> ir.Value:
    smem.require_one_element(view.shape)
    return slice_pointer(view)


def load_scalar(view: GmemView) -> ir.Value:
    """Loads one element into every thread. PTX: `ld.global`."""
    return smem.load_element(_element_pointer(view), view.dtype)


def store_scalar(view: GmemView, value: ir.Value) -> None:
    """Stores one element from the elected thread. PTX: `st.global`."""
    smem.store_element(_element_pointer(view), value, view.dtype)

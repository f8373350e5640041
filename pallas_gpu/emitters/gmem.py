# SPDX-License-Identifier: Apache-2.0
"""Global memory: views of the kernel's buffers, direct loads and stores."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_gpu.emitters import addressing, masking, module, smem, sub_byte
from pallas_gpu.emitters.control import predicated
from pallas_gpu.emitters.devices import multimem
from pallas_gpu.emitters.devices.peers import ALL, Owner
from pallas_gpu.emitters.elements import dtypes, packed, predication
from pallas_gpu.emitters.registers import (
    Array,
    RegisterArray,
)
from pallas_gpu.emitters.smem import (
    Windowed,
    concatenate,
    split,
)
from pallas_gpu.layouts import LinearLayout
from pallas_gpu.layouts.gmem.access import GmemAccess, plan_gmem
from pallas_gpu.layouts.moves import costs
from pallas_gpu.layouts.registers.placement import Placement
from pallas_gpu.layouts.window import Window


@dataclasses.dataclass(frozen=True)
class GmemView(Windowed):
    """A slice of a row-major array in global memory.

    Attributes:
      pointer: `!llvm.ptr` or `!llvm.ptr<1>`, start of the whole array, 16-byte aligned.
      buffer_index: the index among the kernel's buffers, for TMA; None for memory that
        is not a kernel buffer.
      dtype: element type.
      window: the slice; its dynamic starts are i32 values.
      owner: whose memory `pointer` is in; None: that of the executing device.
    """

    pointer: ir.Value
    buffer_index: int | None
    dtype: np.dtype
    window: Window
    owner: Owner | None = None

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


def _address(view: GmemView, layout: Placement, single: bool) -> GmemAccess:
    return plan_gmem(
        layout,
        view.window.strides,
        dtypes.stored_bits(view.dtype),
        view.window.start_multiple,
        single=single,
    )


def access_widths(view: GmemView, layout: Placement) -> tuple[int, int]:
    """Elements of one access, and what they would be from the start of the array."""
    bits = dtypes.stored_bits(view.dtype)
    taken = _address(view, layout, False)
    aligned = plan_gmem(layout, view.window.strides, bits)
    return taken.elements_per_access, aligned.elements_per_access


def requests(view: GmemView, layout: Placement) -> costs.Requests | None:
    """Returns the requests of an access; None for elements that share a byte."""
    plan, bits = _address(view, layout, False), dtypes.stored_bits(view.dtype)
    if plan.elements_per_access * bits < 8:
        return None
    return costs.gmem_requests(plan, bits)


def slice_pointer(view: GmemView) -> ir.Value:
    """The address of the view's first element, the start of a byte."""
    static, pointer, bits = 0, view.pointer, dtypes.stored_bits(view.dtype)
    for wide, stride in _dynamic_starts(view):
        if wide is None:
            static += stride
            continue
        step = arith.muli(wide, dtypes.constant(stride * max(bits // 8, 1), dtypes.I64))
        if bits < 8:
            step = arith.divsi(step, dtypes.constant(8 // bits, dtypes.I64))
        pointer = addressing.offset_pointer(pointer, step)
    return addressing.offset_pointer(pointer, static * bits // 8)


def _dynamic_starts(view: GmemView) -> Iterator[tuple[ir.Value | None, int]]:
    """Start and stride of each dynamic axis; None and the elements of all others."""
    i64 = ir.IntegerType.get_signless(64)
    static = 0
    for start, stride in zip(
        view.window.starts, view.window.array_strides, strict=True
    ):
        if isinstance(start, int):
            static += start * stride
        else:
            # Arrays may exceed 4 GiB, so the product needs 64 bits.
            yield arith.extsi(i64, start), stride
    yield None, static


def start_bits(view: GmemView) -> ir.Value:
    """The offset in bits of the view's first element from the array's start: i64."""
    return _single_places(view, None)[0]


def _single_places(view: GmemView, plan: GmemAccess | None) -> list[ir.Value]:
    """The offsets in bits from the array's start of single elements.

    Args:
      plan: the accesses; None for the view's first element.
    """
    bits = dtypes.stored_bits(view.dtype)
    start: list[sub_byte.Offset] = [
        stride * bits if wide is None else sub_byte.scaled(wide, stride * bits)
        for wide, stride in _dynamic_starts(view)
    ]
    if plan is None:
        return [sub_byte.total(start, 64)]
    thread = addressing.wide_thread_sum([c * bits for c in plan.columns])
    base = sub_byte.total([*start, thread], 64)
    within = range(plan.elements_per_access)
    return [
        sub_byte.total([base, (s + v) * bits], 64) for s in plan.starts for v in within
    ]


def _pointers(view: GmemView, plan: GmemAccess) -> list[ir.Value]:
    """One pointer per access."""
    bits = dtypes.stored_bits(view.dtype)
    start = slice_pointer(view)
    last = sum(plan.columns) + max(plan.starts, default=0)
    wide = last * bits // 8 >= 2**31
    columns = [c * bits // 8 for c in plan.columns]
    thread = (addressing.wide_thread_sum if wide else addressing.thread_sum)(columns)
    base = addressing.offset_pointer(start, thread)
    return [addressing.offset_pointer(base, s * bits // 8) for s in plan.starts]


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
    reduction: str | None = None,
) -> RegisterArray:
    """Loads a view into registers.

    PTX: `ld.global`, up to 16 bytes per thread if the alignment is known. All threads
    of the warpgroup issue it. The load is synchronous. Padding of the layout is 0.

    Args:
      view: within the bounds of the array, except where the mask is false.
      layout: the register layout; None selects the strided default.
      mask: bools in the layout: elements where it is false are not accessed.
      other: what these elements are in the result; None is 0.
      reduction: by which the elements of all devices are combined, of a view that has
        all of them as owners. PTX: `multimem.ld_reduce`.
    """
    placement = smem.placement_of(view, layout)
    masked = masking.check_mask(mask, placement)
    plan = _address(view, placement, masked is not None)
    if sub_byte.is_sub_byte(view.dtype, plan.elements_per_access):
        places = _single_places(view, plan)
        return sub_byte.load_array(
            view.pointer, placement, places, view.dtype, masked, other
        )
    memory = packed.item_dtype(view.dtype)
    type_ = packed.memory_type(view.dtype, plan.elements_per_access)
    slots = _slots(placement, plan)
    wanted = masking.conditions(placement, slots, masked)
    rest = masking.others(other, placement, slots, view.dtype, memory, type_.shape[0])
    pieces = [
        predication.load(type_, *access)
        if reduction is None
        else multimem.load_reduce(type_, access[0], reduction, view.dtype)
        for access in zip(_pointers(view, plan), wanted, rest, strict=True)
    ]
    per_register = placement.vector_length // plan.elements_per_access
    values = []
    for i in range(0, len(pieces), per_register):
        value = concatenate(pieces[i : i + per_register])
        values.append(packed.from_memory(value, view.dtype))
    return RegisterArray(tuple(values), placement, view.dtype)


def store(view: GmemView, value: Array, *, mask: Array | None = None) -> None:
    """Stores an array into a view; one thread stores each replicated element.

    PTX: `st.global`, `multimem.st` to all devices, up to 16 bytes per thread if the
    alignment is known. All threads of the warpgroup issue it.

    Args:
      view: within the bounds of the array, except where the mask is false.
      value: of the view's shape and dtype; a deferred array is materialized in the
        strided default layout.
      mask: bools in the layout of `value`: elements where it is false are not stored.
    """
    value = smem.in_registers(view, value)
    layout = value.layout
    masked = masking.check_mask(mask, layout)
    plan = _address(view, layout, masked is not None)
    copies = layout.replication_bits if isinstance(layout, LinearLayout) else ()
    if sub_byte.is_sub_byte(view.dtype, plan.elements_per_access):
        places = _single_places(view, plan)
        guard = addressing.thread_bits_clear(copies)
        sub_byte.store_array(view.pointer, value, places, guard, masked)
        return
    length = plan.elements_per_access // packed.elements_per_item(view.dtype)
    pieces = [
        piece
        for register in value.values
        for piece in split(packed.to_memory(register, view.dtype), length)
    ]
    pointers = _pointers(view, plan)
    wanted = masking.conditions(layout, _slots(layout, plan), masked)
    with predicated(addressing.thread_bits_clear(copies)):
        put = multimem.store if view.owner == ALL else predication.store
        for access in zip(pieces, pointers, wanted, strict=True):
            put(*access)


def load_scalar(view: GmemView, reduction: str | None = None) -> ir.Value:
    """Loads one element into every thread. PTX: `ld.global`, `multimem.ld_reduce`."""
    smem.require_one_element(view.shape)
    if reduction is not None:
        type_ = ir.VectorType.get([1], dtypes.mlir_type(view.dtype))
        pointer = slice_pointer(view)
        loaded = multimem.load_reduce(type_, pointer, reduction, view.dtype)
        return dtypes.extract(loaded, 0)
    if dtypes.is_packed(view.dtype):
        return sub_byte.load(view.pointer, start_bits(view), view.dtype)
    return smem.load_element(slice_pointer(view), view.dtype)


def store_scalar(view: GmemView, value: ir.Value) -> None:
    """Stores one element from the elected thread. PTX: `st.global`, `multimem.st`."""
    smem.require_one_element(view.shape)
    if dtypes.is_packed(view.dtype):
        with predicated(module.current().elected):
            sub_byte.store(view.pointer, start_bits(view), value, view.dtype)
        return
    pointer = slice_pointer(view)
    if view.owner == ALL:
        with predicated(module.current().elected):
            multimem.store(dtypes.pack([value]), pointer, None)
        return
    smem.store_element(pointer, value, view.dtype)

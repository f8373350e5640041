# SPDX-License-Identifier: Apache-2.0
"""Global memory: views of the kernel's buffers, direct loads and stores."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_gpu.layouts import LinearLayout
from pallas_gpu.layouts.gmem.access import GmemAccess, plan_gmem
from pallas_gpu.mosaic import addressing, registers, smem
from pallas_gpu.mosaic.elements import dtypes
from pallas_gpu.mosaic.elements.convert import convert_value
from pallas_gpu.mosaic.registers import Array, Deferred, Placement, RegisterArray
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
      buffer_index: which of the kernel's buffers it is; TMA needs to know. None for
        memory that is no kernel buffer.
      array_shape: shape of the whole array.
      dtype: element type.
      starts: first index per axis of the array, an int or an i32.
      sizes: elements per axis of the array; 1 where an integer index stands.
      kept: per axis of the array, False for an integer index (no axis in `shape`).
      order: axis i of the view is the kept axis number `order[i]`: a transposed view.
      divisors: what a dynamic start is known to be a multiple of, per axis.
    """

    pointer: ir.Value
    buffer_index: int | None
    array_shape: tuple[int, ...]
    dtype: np.dtype
    starts: tuple[int | ir.Value, ...]
    sizes: tuple[int, ...]
    kept: tuple[bool, ...]
    order: tuple[int, ...]
    divisors: tuple[int, ...] | None = None

    @classmethod
    def whole(
        cls,
        pointer: ir.Value,
        buffer_index: int | None,
        shape: Sequence[int],
        dtype: np.dtype,
    ) -> GmemView:
        """The view of all of an array."""
        shape = tuple(shape)
        rank = len(shape)
        return cls(
            pointer,
            buffer_index,
            shape,
            np.dtype(dtype),
            (0,) * rank,
            shape,
            (True,) * rank,
            tuple(range(rank)),
        )

    @property
    def kept_axes(self) -> tuple[int, ...]:
        """The array's axes that the view has, in the view's order."""
        axes = [a for a, k in enumerate(self.kept) if k]
        return tuple(axes[i] for i in self.order)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that a load of the view has."""
        return tuple(self.sizes[a] for a in self.kept_axes)

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements between neighbours along each axis of the array."""
        shape = self.array_shape
        return tuple(math.prod(shape[a + 1 :]) for a in range(len(shape)))

    def slice(
        self,
        starts: Sequence[int | ir.Value],
        sizes: Sequence[int | None],
        divisors: Sequence[int] | None = None,
    ) -> GmemView:
        """A slice of this view.

        Args:
          starts: per axis of `shape`, an int or an i32, relative to the view.
          sizes: per axis; None for an integer index, which drops the axis.
          divisors: what each start is known to be a multiple of.
        """
        new_starts, new_sizes = list(self.starts), list(self.sizes)
        new_divisors = list(self.divisors or (1,) * len(self.starts))
        kept = list(self.kept)
        for i, axis in enumerate(self.kept_axes):
            known = 1 if divisors is None else divisors[i]
            start, size = starts[i], sizes[i]
            new_divisors[axis] = math.gcd(
                _multiple_of(self.starts[axis], new_divisors[axis]),
                _multiple_of(start, known),
            )
            new_starts[axis] = add_index(self.starts[axis], start)
            new_sizes[axis] = 1 if size is None else size
            kept[axis] = size is not None
        left = [a for a in self.kept_axes if kept[a]]
        return dataclasses.replace(
            self,
            starts=tuple(new_starts),
            sizes=tuple(new_sizes),
            kept=tuple(kept),
            order=tuple(sorted(left).index(a) for a in left),
            divisors=tuple(new_divisors),
        )

    def transpose(self, permutation: Sequence[int]) -> GmemView:
        """The view whose axis i is this one's axis `permutation[i]`."""
        return dataclasses.replace(
            self, order=tuple(self.order[p] for p in permutation)
        )


def _multiple_of(start: int | ir.Value, known: int) -> int:
    return start if isinstance(start, int) else known


def _address(view: GmemView, layout: Placement) -> GmemAccess:
    return plan_gmem(
        layout,
        [view.strides[a] for a in view.kept_axes],
        8 * dtypes.memory_dtype(view.dtype).itemsize,
        _base_divisor(view),
    )


def _base_divisor(view: GmemView) -> int:
    """What the element offset of the view's start is a multiple of."""
    known = view.divisors or (1,) * len(view.starts)
    result = 0
    for start, divisor, stride in zip(view.starts, known, view.strides, strict=True):
        result = math.gcd(result, _multiple_of(start, divisor) * stride)
    return result


def slice_pointer(view: GmemView) -> ir.Value:
    """The address of the view's first element."""
    itemsize_bytes = dtypes.memory_dtype(view.dtype).itemsize
    static, pointer = 0, view.pointer
    i64 = ir.IntegerType.get_signless(64)
    for start, stride in zip(view.starts, view.strides, strict=True):
        if isinstance(start, int):
            static += start * stride
            continue
        # Arrays may exceed 4 GiB, so that the product needs 64 bits.
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

    PTX: `ld.global`, up to 16 bytes per thread where the alignment is known. All
    threads of the warpgroup issue it; the values are there when it returns.

    Args:
      view: inside of the array.
      layout: the register layout; None takes the strided default.
    """
    if layout is None:
        placement = registers.default_placement(view.shape, view.dtype)
    else:
        placement = registers.place_registers(layout, view.shape)
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
    """Stores an array into a view; of threads with copies one stores.

    PTX: `st.global`, up to 16 bytes per thread where the alignment is known. All
    threads of the warpgroup issue it.

    Args:
      view: inside of the array.
      value: of the view's shape and dtype; a deferred array is made in the strided
        default layout.
    """
    check_stored(view.shape, view.dtype, value)
    if isinstance(value, Deferred):
        value = value.materialize(registers.default_placement(view.shape, view.dtype))
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
    """Loads one element; every thread gets it. PTX: `ld.global`."""
    return smem.load_element(_element_pointer(view), view.dtype)


def store_scalar(view: GmemView, value: ir.Value) -> None:
    """Stores one element by the elected thread. PTX: `st.global`."""
    smem.store_element(_element_pointer(view), value, view.dtype)

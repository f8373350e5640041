# SPDX-License-Identifier: Apache-2.0
"""Shared memory: views of it, and transfers between it and registers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, nvvm

from pallas_gpu import errors
from pallas_gpu.emitters import addressing, masking, module, operations, sub_byte
from pallas_gpu.emitters.control import predicated
from pallas_gpu.emitters.elements import arith, dtypes, packed, predication
from pallas_gpu.emitters.elements.convert import convert_value
from pallas_gpu.emitters.registers import (
    Array,
    Deferred,
    RegisterArray,
    default_placement,
)
from pallas_gpu.layouts import SmemLayout, WGStridedLayout
from pallas_gpu.layouts.registers.placement import Placement, place_registers
from pallas_gpu.layouts.smem.access import plan_access
from pallas_gpu.layouts.smem.access_plan import MAX_WIDTH_BYTES, AccessPlan, Kind
from pallas_gpu.layouts.smem.bit_access import plan_bits
from pallas_gpu.layouts.smem.vector_access import PartialBytesError
from pallas_gpu.layouts.smem.wgmma_descriptor import ADDRESS_MASK, ADDRESS_SHIFT
from pallas_gpu.layouts.smem.window import alignment_bytes
from pallas_gpu.layouts.window import Window


class Windowed:
    """A part of an array in memory: a dataclass with a window.

    Attributes:
      window: the part; its dynamic starts are i32 values.
    """

    window: Window

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a load of the view."""
        return self.window.shape

    def slice(
        self,
        starts: Sequence[int | ir.Value],
        sizes: Sequence[int | None],
        multiples: Sequence[int] | None = None,
    ) -> Self:
        """Returns a slice of this view; see `Window.slice`."""
        window = self.window.slice(starts, sizes, multiples, add=add_index)
        return self._with(window)

    def transpose(self, permutation: Sequence[int]) -> Self:
        """Returns the view whose axis i is axis `permutation[i]` of this one."""
        return self._with(self.window.transpose(permutation))

    def _with(self, window: Window) -> Self:
        return dataclasses.replace(self, window=window)  # type: ignore[type-var]


@dataclasses.dataclass(frozen=True)
class SmemView(Windowed):
    """A slice of an array in shared memory.

    Attributes:
      pointer: `!llvm.ptr<3>`, start of the whole array.
      layout: placement of the whole array.
      dtype: element type.
      window: the slice; its dynamic starts are i32 values.
      internal: whether an operation declares the array, not the author.
    """

    pointer: ir.Value
    layout: SmemLayout
    dtype: np.dtype
    window: Window
    internal: bool = False

    @classmethod
    def whole(cls, pointer: ir.Value, layout: SmemLayout, dtype: np.dtype) -> SmemView:
        """Returns the view of a whole array."""
        return cls(pointer, layout, np.dtype(dtype), Window.whole(layout.shape))


def add_index(a: int | ir.Value, b: int | ir.Value) -> int | ir.Value:
    """The sum of two indices, each an int or an i32."""
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    if isinstance(a, int):
        a, b = b, a
    if isinstance(b, int):
        return a if b == 0 else arith.addi(a, module.current().i32(b))
    return arith.addi(a, b)


# --- addresses ------------------------------------------------------------------------


def slice_pointer(view: SmemView) -> ir.Value:
    """The address of the view's first element, for views of whole tiles and bytes."""
    bits = dtypes.stored_bits(view.dtype)
    pointer, offsets = view.pointer, list(_start_bits(view))
    for offset in offsets[:-1]:
        assert not isinstance(offset, int)
        step = offset if bits >= 8 else arith.shrui(offset, module.current().i32(3))
        pointer = addressing.offset_pointer(pointer, step)
    static = offsets[-1]
    assert isinstance(static, int)
    return addressing.offset_pointer(pointer, static // 8)


def _start_bits(view: SmemView) -> Iterator[sub_byte.Offset]:
    """The offset of the view's first element, in terms whose last is a constant.

    Dynamic terms are bytes, unless the elements are packed; then they are bits, as the
    constant is in any case.
    """
    kernel = module.current()
    bits = dtypes.stored_bits(view.dtype)
    unit = max(bits // 8, 1) if bits >= 8 else bits
    static = 0
    strides = (x.tolist() for x in view.layout.axis_strides)
    for start, tile, between, within in zip(view.window.starts, *strides, strict=True):
        if isinstance(start, int):
            static += (start // tile) * between + (start % tile) * within
            continue
        # Starts are multiples of the tile, so there is no remainder.
        if between % tile == 0:
            index, step = start, between // tile
        else:
            index, step = arith.divui(start, kernel.i32(tile)), between
        yield arith.muli(index, kernel.i32(step * unit))
    yield static * bits


def start_bits(view: SmemView) -> ir.Value:
    """The offset in bits of the view's first element from the array's start: i32."""
    return _single_places(view)[0]


def _single_places(
    view: SmemView, columns: Sequence[int] = (0,) * 7, statics: Sequence[int] = (0,)
) -> list[ir.Value]:
    """Offsets in bits from the array's start, of elements of the view.

    Args:
      columns, statics: offsets from the view's start; see `plan_bits`.
    """
    start = [*_start_bits(view), addressing.thread_sum(columns)]
    base = sub_byte.total(start, 32)
    places = [sub_byte.total([base, static], 32) for static in statics]
    return [sub_byte.swizzled(place, view.layout.swizzle) for place in places]


def _has_partial_bytes(view: SmemView, layout: Placement, masked: bool) -> bool:
    """Whether packed elements have to be accessed one at a time."""
    if not dtypes.is_packed(view.dtype):
        return False
    try:
        _plan(view, layout, "load", False, masked)
    except PartialBytesError:
        return True
    return False


def _array_places(
    view: SmemView, layout: Placement
) -> tuple[list[ir.Value], tuple[int, ...]]:
    """Where each element of each register is, in bits, and the replication bits."""
    moved, order = _memory_order(view, layout)
    columns, statics, copies = plan_bits(moved, view.layout, view.window.sizes)
    ordered = _single_places(view, columns, statics)
    length = layout.vector_length
    places: list[ir.Value] = [None] * len(ordered)  # type: ignore[list-item]
    for i, register in enumerate(order):
        places[register * length : (register + 1) * length] = ordered[
            i * length : (i + 1) * length
        ]
    return places, copies


def _memory_order(view: SmemView, layout: Placement) -> tuple[Placement, list[int]]:
    """The layout with the axes in memory order, and its registers as indices."""
    order = view.window.order
    inverse = [order.index(i) for i in range(len(order))]
    if inverse == sorted(inverse):
        return layout, list(range(layout.num_registers))
    if isinstance(layout, WGStridedLayout):
        layout.linear()  # raises an error that states the reason
        raise AssertionError("a placement is strided only where it is not linear")
    return layout.transpose(inverse), layout.transpose_registers(inverse)


def has_byte_matrices(arch: tuple[int, int]) -> bool:
    """Whether ldmatrix and stmatrix transpose matrices of 8-bit elements.

    PTX ISA, ldmatrix: .m16n16 and .b8 require sm_100a, sm_110a or sm_120a.

    Args:
      arch: compute capability.
    """
    return arch >= (10, 0)


def plan(
    view: SmemView,
    layout: Placement,
    kind: Kind,
    *,
    optimized: bool = False,
    single: bool = False,
    aligned: bool = False,
) -> AccessPlan:
    """Plans a load or store; see `plan_access`.

    Args:
      view: the part of the array.
      layout: of the array in registers.
      kind: "load" or "store".
      optimized: reject accesses with bank conflicts.
      single: access each element separately.
      aligned: as if the part started at a multiple of the widest access.
    """
    ordered, _ = _memory_order(view, layout)
    alignment = MAX_WIDTH_BYTES
    if not aligned:
        alignment = min(alignment_bytes(view.layout, view.window), alignment)
    return plan_access(
        ordered,
        view.layout,
        kind=kind,
        window=view.window.sizes,
        optimized=optimized,
        base_alignment_bytes=alignment,
        single=single,
        byte_matrices=has_byte_matrices(module.current().spec.arch),
    )


def _plan(
    view: SmemView, layout: Placement, kind: Kind, optimized: bool, single: bool
) -> tuple[AccessPlan, list[int]]:
    found = plan(view, layout, kind, optimized=optimized, single=single)
    return found, _memory_order(view, layout)[1]


def _addresses(plan: AccessPlan, base: ir.Value) -> list[ir.Value]:
    """One pointer per instruction."""
    return addressing.thread_pointers(
        base, plan.thread_columns, plan.thread_add, plan.xor, plan.add
    )


def descriptor(view: SmemView, fields: int) -> ir.Value:
    """i64: the matrix descriptor of the view's first element, for the tensor core."""
    kernel = module.current()
    i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
    address = llvm.ptrtoint(i32, slice_pointer(view))
    address = arith.andi(address, kernel.i32(ADDRESS_MASK))
    address = arith.shrui(address, kernel.i32(ADDRESS_SHIFT))
    constant = dtypes.constant(fields, dtypes.U64)
    return arith.ori(arith.extui(i64, address), constant)


# --- loads and stores -----------------------------------------------------------------


def load(
    view: SmemView,
    layout=None,
    *,
    optimized: bool = True,
    mask: Array | None = None,
    other: Array | None = None,
) -> RegisterArray:
    """Loads a view into registers.

    PTX: `ld.shared`, `ldmatrix`. All threads of the warpgroup issue it. The load is
    synchronous; writes to the memory must have completed and be visible. Padding of the
    layout is 0.

    Args:
      view: consists of whole tiles if the array is tiled.
      layout: the register layout; None selects the strided default.
      optimized: reject accesses with bank conflicts.
      mask: bools in the layout: elements where it is false are not accessed.
      other: what these elements are in the result; None is 0.

    Raises:
      LayoutError: the view and the layout are incompatible.
    """
    placement = placement_of(view, layout)
    masked = masking.check_mask(mask, placement)
    if _has_partial_bytes(view, placement, masked is not None):
        places, _ = _array_places(view, placement)
        return sub_byte.load_array(
            view.pointer, placement, places, view.dtype, masked, other
        )
    plan, order = _plan(view, placement, "load", optimized, masked is not None)
    memory = packed.item_dtype(view.dtype)
    type_ = packed.memory_type(view.dtype, plan.elements_per_access)
    base = slice_pointer(view)
    slots = [(order[register], element) for register, element in plan.accesses]
    if plan.method == "matrix":
        words = _load_matrices(plan, base)
    else:
        wanted = masking.conditions(placement, slots, masked)
        rest = masking.others(
            other, placement, slots, view.dtype, memory, type_.shape[0]
        )
        words = [
            predication.load(type_, *access)
            for access in zip(_addresses(plan, base), wanted, rest, strict=True)
        ]
    _exchange(plan, words)
    pieces = _taken_apart(plan, words, type_)
    ordered = _join(plan, pieces, placement.num_registers)
    values: list[ir.Value] = [None] * len(ordered)  # type: ignore[list-item]
    for register, value in zip(order, ordered, strict=True):
        values[register] = packed.from_memory(value, view.dtype)
    return RegisterArray(tuple(values), placement, view.dtype)


def _load_matrices(plan: AccessPlan, base: ir.Value) -> list[ir.Value]:
    """The words of the plan, of 32 bits each."""
    words: list[ir.Value] = [None] * len(plan.words)  # type: ignore[list-item]
    pointers = _addresses(plan, base)
    for pointer, places in zip(pointers, plan.instructions, strict=True):
        loaded = _ldmatrix(pointer, len(places), plan)
        for place, word in zip(places, loaded, strict=True):
            words[place] = word
    return words


def _taken_apart(
    plan: AccessPlan, words: Sequence[ir.Value], type_: ir.VectorType
) -> list[ir.Value]:
    """The accesses that words consist of, each of this type."""
    pieces: list[ir.Value] = [None] * len(plan.accesses)  # type: ignore[list-item]
    length = type_.shape[0]
    for accesses, word in zip(plan.words, words, strict=True):
        whole = ir.VectorType.get([length * len(accesses)], type_.element_type)
        if word.type != whole:
            word = llvm.bitcast(whole, word)
        for access, piece in zip(accesses, split(word, length), strict=True):
            pieces[access] = piece
    return pieces


def store(
    view: SmemView, value: Array, *, optimized: bool = True, mask: Array | None = None
) -> None:
    """Stores an array into a view.

    PTX: `st.shared`, `stmatrix`. All threads of the warpgroup issue it. The data is
    visible to other threads after a barrier, and to asynchronous copies after
    `fence.proxy.async` and a barrier.

    Args:
      view: consists of whole tiles if the array is tiled.
      value: of the view's shape and dtype; a deferred array is materialized in the
        strided default layout.
      optimized: reject accesses with bank conflicts.
      mask: bools in the layout of `value`: elements where it is false are not stored.

    Raises:
      LayoutError: the view and the layout are incompatible.
    """
    array = in_registers(view, value)
    masked = masking.check_mask(mask, array.layout)
    if _has_partial_bytes(view, array.layout, masked is not None):
        places, copies = _array_places(view, array.layout)
        guard = addressing.thread_bits_clear(copies)
        sub_byte.store_array(view.pointer, array, places, guard, masked)
        return
    plan, order = _plan(view, array.layout, "store", optimized, masked is not None)
    stored = [packed.to_memory(v, view.dtype) for v in array.values]
    pieces = _split(plan, [stored[register] for register in order], view.dtype)
    words = [concatenate([pieces[a] for a in word]) for word in plan.words]
    _exchange(plan, words)
    pointers = _addresses(plan, slice_pointer(view))
    guard = addressing.thread_bits_clear(plan.predicate_bits)
    if plan.method == "matrix":
        with predicated(guard):
            for pointer, group in zip(pointers, plan.instructions, strict=True):
                _stmatrix(pointer, [words[i] for i in group], plan)
        return
    slots = [(order[register], element) for register, element in plan.accesses]
    wanted = masking.conditions(array.layout, slots, masked)
    with predicated(guard):
        for access in zip(words, pointers, wanted, strict=True):
            predication.store(*access)


def placement_of(view: Any, layout: Any) -> Placement:
    """A layout for a view of the shape, by default a strided one."""
    if layout is None:
        return default_placement(view.shape, dtypes.bits(view.dtype))
    return place_registers(layout, view.shape)


def in_registers(view: Any, value: Array) -> RegisterArray:
    """A value that is stored to a view, in registers; by default strided."""
    check_stored(view.shape, view.dtype, value)
    if isinstance(value, RegisterArray):
        return value
    assert isinstance(value, Deferred)
    return value.materialize(placement_of(view, None))


def check_stored(shape: tuple[int, ...], dtype: np.dtype, value: Array) -> None:
    """Raises unless a value has the shape and dtype of the view it is stored to."""
    if value.shape != shape:
        raise errors.ShapeError(
            "The shapes of the stored array and the reference differ",
            expected=shape,
            got=value.shape,
        )
    if value.dtype != dtype:
        raise errors.DTypeError(
            "The dtypes of the stored array and the reference differ",
            expected=dtype,
            got=value.dtype,
            hint="convert it with astype",
        )


def _exchange(plan: AccessPlan, words: list[ir.Value]) -> None:
    """Swaps paired words in the threads that accessed them in reverse order."""
    for stagger in plan.staggers:
        swap = addressing.thread_bit(stagger.thread_bit)
        for a, b in stagger.pairs:
            first, second = words[a], words[b]
            words[a] = arith.select(swap, second, first)
            words[b] = arith.select(swap, first, second)


def _join(plan: AccessPlan, pieces: list[ir.Value], count: int) -> list[ir.Value]:
    """The registers, concatenated from the pieces of the accesses."""
    parts: list[list[ir.Value]] = [[] for _ in range(count)]
    for (register, _), piece in zip(plan.accesses, pieces, strict=True):
        parts[register].append(piece)
    return [concatenate(register) for register in parts]


def concatenate(parts: Sequence[ir.Value]) -> ir.Value:
    """The concatenation of vectors, in order."""
    if len(parts) == 1:
        return parts[0]
    return dtypes.pack(
        [dtypes.extract(p, i) for p in parts for i in range(dtypes.length(p) or 0)]
    )


def split(value: ir.Value, length: int) -> list[ir.Value]:
    """A vector split into vectors of `length`, in order."""
    lanes = dtypes.length(value) or 0
    if lanes == length:
        return [value]
    elements = [dtypes.extract(value, i) for i in range(lanes)]
    return [dtypes.pack(elements[i : i + length]) for i in range(0, lanes, length)]


def _split(
    plan: AccessPlan, values: Sequence[ir.Value], dtype: np.dtype
) -> list[ir.Value]:
    length = plan.elements_per_access
    items = length // packed.elements_per_item(dtype)
    parts = {}
    for register, value in enumerate(values):
        for i, piece in enumerate(split(value, items)):
            parts[register, i * length] = piece
    return [parts[access] for access in plan.accesses]


def _matrix_attributes(
    plan: AccessPlan, bytes_shape: str
) -> tuple[ir.Attribute, ir.Attribute, ir.Attribute]:
    """Layout, shape and element type of the plan's matrices.

    Args:
      bytes_shape: the shape of matrices of 8-bit elements.
    """
    layout = nvvm.MMALayout.col if plan.transpose else nvvm.MMALayout.row
    shape, element = "m = 8, n = 8", nvvm.LdStMatrixEltType.B16
    if plan.of_bytes:
        shape, element = bytes_shape, nvvm.LdStMatrixEltType.B8
    return layout, ir.Attribute.parse(f"#nvvm.ld_st_matrix_shape<{shape}>"), element


def _ldmatrix(pointer: ir.Value, count: int, plan: AccessPlan) -> list[ir.Value]:
    """Loads so many words.

    PTX: `ldmatrix.sync.aligned.m8n8.x{1,2,4}{.trans}.shared.b16`, or
    `ldmatrix.sync.aligned.m16n16.x{1,2}.trans.shared.b8`, since sm_100a.
    """
    i32 = ir.IntegerType.get_signless(32)
    if count == 1:
        result = i32
    else:
        fields = ", ".join(["i32"] * count)
        result = ir.Type.parse(f"!llvm.struct<({fields})>")
    kind = _matrix_attributes(plan, "m = 16, n = 16")
    matrices = count // 2 if plan.of_bytes else count
    words = nvvm.ldmatrix(pointer, matrices, *kind, results=[result])
    if count == 1:
        return [words]
    return [llvm.extractvalue(i32, words, [i]) for i in range(count)]


def _stmatrix(pointer: ir.Value, words: list[ir.Value], plan: AccessPlan) -> None:
    """Stores words, of 32 bits each.

    PTX: `stmatrix.sync.aligned.m8n8.x{1,2,4}{.trans}.shared.b16`, since sm_90, or
    `stmatrix.sync.aligned.m16n8.x{1,2,4}.trans.shared.b8`, since sm_100a.
    """
    i32 = ir.IntegerType.get_signless(32)
    whole = [operations.create("llvm.bitcast", i32, [word]) for word in words]
    nvvm.stmatrix(pointer, whole, *_matrix_attributes(plan, "m = 16, n = 8"))


# --- single elements ------------------------------------------------------------------


def require_one_element(shape: tuple[int, ...]) -> None:
    """Raises ShapeError unless a view is a single element."""
    if math.prod(shape) != 1:
        raise errors.ShapeError(
            "A scalar access needs the index of one element",
            expected="an integer index on every axis",
            got=f"a slice of shape {shape}",
        )


def load_element(pointer: ir.Value, dtype: np.dtype) -> ir.Value:
    """Loads one element of shared or global memory into every thread."""
    memory = dtypes.memory_dtype(dtype)
    return convert_value(llvm.load(dtypes.mlir_type(memory), pointer), memory, dtype)


def store_element(pointer: ir.Value, value: ir.Value, dtype: np.dtype) -> None:
    """Stores one element from the elected thread of the warpgroup or warp."""
    stored = convert_value(value, dtype, dtypes.memory_dtype(dtype))
    with predicated(module.current().elected):
        llvm.store(stored, pointer)


def _require_single(view: SmemView) -> None:
    require_one_element(view.shape)
    if view.layout.tile or view.layout.swizzle != 16:
        raise errors.UnsupportedError(
            "Single elements of a tiled or swizzled reference cannot be accessed",
            hint="load a slice of whole tiles, or use an untiled reference",
        )


def load_scalar(view: SmemView) -> ir.Value:
    """Loads one element into every thread. PTX: `ld.shared`."""
    _require_single(view)
    if dtypes.is_packed(view.dtype):
        return sub_byte.load(view.pointer, start_bits(view), view.dtype)
    return load_element(slice_pointer(view), view.dtype)


def store_scalar(view: SmemView, value: ir.Value) -> None:
    """Stores one element from the elected thread. PTX: `st.shared`."""
    _require_single(view)
    if dtypes.is_packed(view.dtype):
        with predicated(module.current().elected):
            sub_byte.store(view.pointer, start_bits(view), value, view.dtype)
        return
    store_element(slice_pointer(view), value, view.dtype)

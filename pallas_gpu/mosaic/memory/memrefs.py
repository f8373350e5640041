# SPDX-License-Identifier: Apache-2.0
"""References as bodies get them: memrefs, and the views of emitters that they are.

A memref of a body is a strided part of an array, at an offset that may be dynamic.
`view_of` follows the operations that made it back to the array, so that emitters know
where in it the part lies: what its address is a multiple of, and the tensor map of a
copy. A tiled array in SMEM is a memref of the shape in memory, (rows, columns, rows of
a tile, columns of a tile), and its swizzle is an argument of what accesses it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, builtin, llvm

from pallas_gpu import errors
from pallas_gpu.emitters import gmem, module, smem
from pallas_gpu.emitters.elements import dtypes, scalars
from pallas_gpu.emitters.gmem import GmemView
from pallas_gpu.emitters.smem import SmemView, add_index
from pallas_gpu.layouts import SmemLayout
from pallas_gpu.layouts.smem.swizzle import NO_SWIZZLE
from pallas_gpu.layouts.window import Window
from pallas_gpu.mosaic import elements
from pallas_gpu.mosaic.memory.memref_shapes import (
    DYNAMIC,
    Index,
    memref_transpose,
    slice_memref,
)
from pallas_gpu.mosaic.scalars import as_i32

# Memory spaces, by the types of pointers to them.
_MEMORY_SPACES = {"!llvm.ptr<3>": elements.WORKGROUP, "!llvm.ptr<7>": "7 : i32"}


def _space_of(type_: ir.MemRefType) -> int:
    """The address space of a memref: 3 is SMEM, 7 the cluster's, 0 GMEM."""
    space = type_.memory_space
    if isinstance(space, ir.IntegerAttr):
        return space.value
    return 3 if str(space) == elements.WORKGROUP else 0


def is_smem(ref: ir.Value) -> bool:
    """Whether a memref is in SMEM, of this block or of another one."""
    return _space_of(ref.type) in (3, 7)


# --- from views to memrefs ------------------------------------------------------------


def memref_of(view: SmemView | GmemView) -> ir.Value:
    """The memref of a view; of a tiled array it has the shape in memory.

    Raises:
      LayoutError: the view cuts through tiles.
    """
    window, shape = view.window, view.window.array_shape
    tile: tuple[int, ...] = ()
    if isinstance(view, SmemView):
        shape, tile = view.layout.physical_shape, view.layout.tile
    space = _MEMORY_SPACES.get(str(view.pointer.type))
    attribute = None if space is None else ir.Attribute.parse(space)
    element = elements.type_of(view.dtype)
    type_ = ir.MemRefType.get(shape, element, memory_space=attribute)
    whole = ptr_as_memref(view.pointer, type_)
    if window.is_whole:
        return whole
    lead = len(window.array_shape) - len(tile)
    starts, sizes = list(window.starts), list(window.sizes)
    for axis, n in enumerate(tile, lead):
        starts[axis], sizes[axis] = _tiles(view, axis, n), sizes[axis] // n
    drops = [not kept for kept in window.kept]
    zeros = [0] * len(tile)
    part = slice_memref(
        whole, [*starts, *zeros], [*sizes, *tile], [*drops, *drops[lead:]]
    )
    order = window.order
    if not window.is_transposed:
        return part
    # The axes of tiles follow the axes that count them.
    outer = len([axis for axis in window.axes if axis < lead])
    tiles = [x - outer for x in order if x >= outer]
    count = len(order)
    return memref_transpose(part, (*order, *(count + x for x in tiles)))


def _tiles(view: SmemView | GmemView, axis: int, tile: int) -> Index:
    """The tile in which a view starts along an axis."""
    start, size = view.window.starts[axis], view.window.sizes[axis]
    whole = size % tile == 0 if axis in view.window.axes else tile == 1
    if whole and isinstance(start, ir.Value):
        count = module.current().i32(tile)
        return start if tile == 1 else arith.divui(start, count)
    if whole and start % tile == 0:
        return start // tile
    raise errors.LayoutError(
        "A part of a tiled SMEM array cuts through its tiles",
        expected=f"whole tiles of {tile} elements along axis {axis}",
        got=f"{size} elements from {start if isinstance(start, int) else 'a value'}",
        hint="give the inline code whole tiles, or the array without transforms",
    )


def ptr_as_memref(ptr: ir.Value, memref_ty: ir.MemRefType) -> ir.Value:
    """Returns the memref of a static type, without an offset, at a pointer."""
    i64 = ir.IntegerType.get_signless(64)
    strides, _ = memref_ty.get_strides_and_offset()
    descriptor = llvm.mlir_undef(_descriptor(ptr.type, len(strides)))
    rows = ([3, memref_ty.shape], [4, strides])
    parts: list[tuple[list[int], Any]] = [([0], ptr), ([1], ptr), ([2], 0)]
    parts += [([at, i], n) for at, numbers in rows for i, n in enumerate(numbers)]
    for position, part in parts:
        if isinstance(part, int):
            part = llvm.mlir_constant(ir.IntegerAttr.get(i64, part))
        descriptor = llvm.insertvalue(descriptor, part, position)
    return builtin.unrealized_conversion_cast([memref_ty], [descriptor])


def _descriptor(pointer: ir.Type, rank: int) -> ir.Type:
    """The struct that a memref is in LLVM: two pointers, offset, shape and strides."""
    fields = f"{str(pointer).removeprefix('!llvm.')}, " * 2 + "i64"
    fields += f", array<{rank} x i64>" * 2 if rank else ""
    return ir.Type.parse(f"!llvm.struct<({fields})>")


# --- from memrefs to views ------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Part:
    """A memref, as a part of the array that it was made from.

    Attributes:
      pointer, extents: start of the array, size and stride of each of its axes.
      terms: what is added to the pointer: an index and its stride in elements.
      shape, strides, type_: of the memref, and of its elements.
    """

    pointer: ir.Value
    extents: tuple[tuple[int, int], ...]
    terms: tuple[tuple[Index, int], ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    type_: ir.Type


def part_of(ref: ir.Value) -> Part:
    """Follows the operations that made a memref back to an array.

    Raises:
      LayoutError: the strides of the memref are dynamic.
    """
    if not isinstance(ref.type, ir.MemRefType):
        raise errors.ArgumentTypeError(
            "Not a reference to memory", expected="a memref", got=str(ref.type)
        )
    shape, strides = tuple(ref.type.shape), _strides(ref.type)
    terms: list[tuple[Index, int]] = []
    root = ref
    while (above := _made_of(root)) is not None:
        if above.name == "memref.subview":
            source = _strides(above.operands[0].type)
            terms += zip(_offsets(above), source, strict=True)
        root = above.operands[0]
    pointer = _pointer(root)
    extents = tuple(zip(root.type.shape, _strides(root.type), strict=True))
    used = tuple((v, s) for v, s in terms if not (isinstance(v, int) and v == 0))
    return Part(pointer, extents, used, shape, strides, ref.type.element_type)


_SHAPES = ("transpose", "expand_shape", "collapse_shape", "cast")
_VIEWS = ("memref.subview", *(f"memref.{name}" for name in _SHAPES))


def _made_of(ref: ir.Value) -> ir.Operation | None:
    """The operation that made a memref from another one with the same array."""
    made = None if isinstance(ref.owner, ir.Block) else ref.owner.operation
    return made if made is not None and made.name in _VIEWS else None


def _strides(type_: ir.MemRefType) -> tuple[int, ...]:
    strides, _ = type_.get_strides_and_offset()
    if DYNAMIC in strides or not type_.has_static_shape:
        raise errors.LayoutError(
            "The shape or the strides of a reference are not constants",
            expected="a memref of static shape and strides",
            got=str(type_),
        )
    return tuple(strides)


def _offsets(subview: ir.Operation) -> Iterator[Index]:
    static = list(ir.DenseI64ArrayAttr(subview.attributes["static_offsets"]))
    dynamic = iter(list(subview.operands)[1:])
    for offset in static:
        yield as_i32(next(dynamic)) if offset == DYNAMIC else offset


def _pointer(root: ir.Value) -> ir.Value:
    """The start of what a memref refers to, which no known operation made."""
    owner = root.owner
    known = not isinstance(owner, ir.Block) and (
        owner.operation.name == "builtin.unrealized_conversion_cast"
    )
    if known:
        value = owner.operation.operands[0]
        if str(value.type).startswith("!llvm.ptr"):
            return value
        while not isinstance(value.owner, ir.Block):
            inserted = value.owner.operation
            if inserted.name != "llvm.insertvalue":
                break
            if list(ir.DenseI64ArrayAttr(inserted.attributes["position"])) == [1]:
                return inserted.operands[1]
            value = inserted.operands[0]
    pointer = module.pointer_type(_space_of(root.type))
    descriptor = _descriptor(pointer, len(root.type.shape))
    unpacked = builtin.unrealized_conversion_cast([descriptor], [root])
    start = llvm.extractvalue(pointer, unpacked, [1])
    _, offset = root.type.get_strides_and_offset()
    if offset == 0:
        return start
    moved = llvm.extractvalue(ir.IntegerType.get_signless(64), unpacked, [2])
    bits = elements.bitwidth(root.type.element_type)
    scaled = arith.muli(moved, dtypes.constant(max(bits, 8), dtypes.I64))
    return llvm.getelementptr(
        pointer, start, [arith.divsi(scaled, dtypes.constant(8, dtypes.I64))],
        [-(2**31)], ir.IntegerType.get_signless(8), None,
    )  # fmt: skip


def view_of(ref: ir.Value, is_signed: bool | None = None) -> SmemView | GmemView:
    """The view of a strided memref; a tiled array has the shape in memory.

    Without `is_signed` integers are signed.

    Raises:
      LayoutError: its dimensions are not those of a part of a row-major array.
    """
    part = part_of(ref)
    dtype, window = elements.dtype_of(part.type_, is_signed), window_of(part)
    if is_smem(ref):
        bits = dtypes.stored_bits(dtype)
        layout = SmemLayout.of(window.array_shape, bits, None, NO_SWIZZLE)
        return SmemView(part.pointer, layout, dtype, window)
    kernel = module.current()
    if part.pointer in kernel.owned:
        return GmemView(
            part.pointer, kernel.owned[part.pointer][0], dtype, window,
            kernel.owned[part.pointer][1],
        )  # fmt: skip
    buffers = kernel.buffers
    index = buffers.index(part.pointer) if part.pointer in buffers else None
    return GmemView(part.pointer, index, dtype, window)


def window_of(part: Part) -> Window:
    """The window of a part, in a row-major array of the shape that its strides give.

    Raises:
      LayoutError: there is none.
    """
    spans = [(s, n) for n, s in zip(part.shape, part.strides, strict=True) if n != 1]
    cuts = {s for s, _ in spans} | {1}
    for stride in [s for _, s in part.terms] + [s for n, s in part.extents if n != 1]:
        if not any(s < stride < s * n for s, n in spans):
            cuts.add(stride)
    order = sorted(cuts - {0}, reverse=True)
    total = max([n * s for n, s in part.extents] + [1])
    sizes = [total, *order]
    pairs = list(itertools.pairwise(sizes))
    overlaps = 0 in cuts or len({s for s, _ in spans}) != len(spans)
    if overlaps or any(outer % inner for outer, inner in pairs):
        raise errors.LayoutError(
            "A reference is not a part of a row-major array",
            expected="strides each of which is a multiple of the next smaller one",
            got=f"shape {part.shape}, strides {part.strides}",
            hint="copy it in parts, or slice the array that it is a part of",
        )
    array = [outer // inner for outer, inner in pairs]
    # Dimensions of one element that lie nowhere in the array are in front of it.
    places, free = [], set(order) - {s for s, _ in spans}
    front = 0
    for n, stride in zip(part.shape, part.strides, strict=True):
        if n == 1 and stride in free:
            free.remove(stride)
        elif n == 1:
            places.append(-1 - front)
            front += 1
            continue
        places.append(order.index(stride))
    axes = [front + p if p >= 0 else -1 - p for p in places]
    wanted: list[int | None] = [None] * (front + len(array))
    for axis, n in zip(axes, part.shape, strict=True):
        wanted[axis] = n
    starts = _starts(part, order, front, array)
    for axis, size in enumerate(wanted[front:]):
        if size is None and array[axis] == 1:
            starts[front + axis] = 0
    return _window((*(1,) * front, *array), starts, wanted, axes)


def _window(
    shape: Sequence[int],
    starts: Sequence[Index],
    sizes: Sequence[int | None],
    axes: Sequence[int],
) -> Window:
    """The part of an array with a size along some axes, which come in an order."""
    multiples = [scalars.divisor(s) for s in starts]
    cut = Window.whole(shape).slice(starts, sizes, multiples, add=add_index)
    return cut.transpose([cut.axes.index(axis) for axis in axes])


def _starts(
    part: Part, order: Sequence[int], front: int, array: Sequence[int]
) -> list[Index]:
    """The first index along each axis of the array."""
    starts: list[Index] = [0] * (front + len(array))
    for value, stride in part.terms:
        axis = next(i for i, s in enumerate(order) if stride % s == 0)
        moved = _scaled(value, stride // order[axis])
        starts[front + axis] = add_index(starts[front + axis], moved)
    return starts


def tiled_view_of(
    ref: ir.Value,
    swizzle: int | None,
    tiling_rank: int | None = None,
    is_signed: bool | None = None,
) -> SmemView:
    """The view of a tiled array in SMEM, with the logical shape.

    The memref is of shape (..., tiles of each axis, sizes of a tile), row-major.
    `tiling_rank` is the number of axes of a tile, by default half of all.

    Raises:
      LayoutError: the tiles are not stored one after the other.
    """
    rank = len(ref.type.shape)
    tiled = checked_rank(rank, tiling_rank)
    plain = view_of(ref, is_signed)
    assert isinstance(plain, SmemView)
    window, lead = plain.window, rank - 2 * tiled
    counts, tile = window.axes[lead : lead + tiled], window.axes[lead + tiled :]
    # The axes of the array in memory: in front, those that count tiles, those of tiles.
    order = sorted(range(tiled), key=lambda i: tile[i])
    memory = [counts[i] for i in order] + [tile[i] for i in order]
    # A single tile along an axis may be one of those that are in front of all others.
    first = min((a for a in memory if window.sizes[a] != 1), default=len(window.sizes))
    front = {a for a in counts if a < first}
    stored = [a for a in memory if a not in front and window.array_shape[a] != 1]
    outer = [a for a in range(len(window.array_shape)) if a not in memory or a in front]
    behind = [a for a in outer if window.array_shape[a] != 1]
    whole = all(window.sizes[a] == window.array_shape[a] for a in tile)
    if stored != sorted(stored) or max(behind, default=-1) > min(stored, default=99):
        whole = False
    if not whole:
        raise errors.LayoutError(
            "The tiles of a reference to SMEM are not stored one after the other",
            expected="shape (..., tiles of each axis, sizes of a tile), row-major",
            got=f"shape {tuple(ref.type.shape)} with strides {_strides(ref.type)}",
        )
    shape, sizes, starts, tiling = [], [], [], []
    for axis, n in ((counts[i], window.sizes[tile[i]]) for i in order):
        tiling.append(n)
        shape.append(n if axis in front else window.array_shape[axis] * n)
        sizes.append(window.sizes[axis] * n)
        starts.append(0 if axis in front else _scaled(window.starts[axis], n))
    layout = SmemLayout.of(
        (*(window.array_shape[a] for a in outer), *shape),
        plain.layout.itemsize_bits,
        tuple(tiling),
        swizzle or NO_SWIZZLE,
    )
    starts = [*(window.starts[a] for a in outer), *starts]
    leading = window.axes[:lead]
    kept = [window.sizes[a] if a in leading else None for a in outer]
    axes = [outer.index(a) for a in leading]
    axes += [len(outer) + order.index(i) for i in range(tiled)]
    part = _window(layout.shape, starts, [*kept, *sizes], axes)
    return SmemView(plain.pointer, layout, plain.dtype, part)


def checked_rank(rank: int, tiling_rank: int | None) -> int:
    """The number of axes of a tile of a reference, by default half of all."""
    tiled = rank // 2 if tiling_rank is None else tiling_rank
    if (tiling_rank is None and rank % 2) or not 1 <= tiled <= rank // 2:
        raise errors.LayoutError(
            "The rank of a tiled reference does not match its tiling",
            expected="as many axes that count tiles as a tile has",
            got=f"rank {rank}, tiling_rank={tiling_rank}",
        )
    return tiled


def _scaled(start: Index, factor: int) -> Index:
    if isinstance(start, int):
        return start * factor
    if factor == 1:
        return start
    return arith.muli(start, module.current().i32(factor))


def memref_ptr(memref_arg: ir.Value) -> ir.Value:
    """Returns the address of a memref's first element, the start of a byte."""
    view: Any = view_of(memref_arg)
    return (smem if isinstance(view, SmemView) else gmem).slice_pointer(view)

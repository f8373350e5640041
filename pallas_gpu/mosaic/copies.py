# SPDX-License-Identifier: Apache-2.0
"""Copies between memrefs of GMEM and SMEM: their slices, transforms and plans.

The memref of SMEM has the shape of the slice after the transforms, row-major. So its
dimensions are steps along those of the array in GMEM, which the planner of tensor
copies takes as they are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_gpu import errors
from pallas_gpu.emitters import module, smem, tma
from pallas_gpu.emitters.copies import bulk
from pallas_gpu.emitters.elements import dtypes, scalars
from pallas_gpu.emitters.gmem import GmemView
from pallas_gpu.emitters.smem import SmemView
from pallas_gpu.layouts import SmemLayout
from pallas_gpu.layouts.gmem.tma_plan import TmaPlan, fitting_dims, plan_dims
from pallas_gpu.layouts.gmem.tma_view import MAX_BOX, PhysicalDim, SlicedArray
from pallas_gpu.layouts.smem.swizzle import NO_SWIZZLE
from pallas_gpu.layouts.window import Window, row_major_strides
from pallas_gpu.mosaic.memory import memrefs
from pallas_gpu.mosaic.memory.memref_shapes import parse_indices
from pallas_gpu.mosaic.scalars import as_i32
from pallas_gpu.mosaic.transforms import MemRefTransform, TileTransform
from pallas_gpu.types import OOBFillMode


@dataclasses.dataclass(frozen=True)
class Slice:
    """The slice of a copy in GMEM, the dims of SMEM, and what makes them of it."""

    view: GmemView
    dims: tuple[PhysicalDim, ...]
    transforms: tuple[MemRefTransform, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in SMEM."""
        return tuple(dim.size for dim in self.dims)

    @property
    def bits(self) -> int:
        """The bits of an element."""
        return dtypes.stored_bits(self.view.dtype)

    @property
    def size_bytes(self) -> int:
        """The size in SMEM."""
        return math.prod(self.shape) * self.bits // 8


def sliced(ref: ir.Value, at: Any, transforms: Any) -> Slice:
    """Returns the slice of a copy; `at` and `transforms` as of `async_copy`."""
    view = _view_in(GmemView, ref, "GMEM")
    # TMA drops, and fills, what is out of bounds.
    starts, sizes, drops = parse_indices(as_tuple(at), view.shape, check_oob=False)
    kept = [None if drop else n for n, drop in zip(sizes, drops, strict=True)]
    return arranged(view, [as_i32(x) for x in starts], kept, as_tuple(transforms))


def _view_in[T: (GmemView, SmemView)](kind: type[T], ref: ir.Value, space: str) -> T:
    view = memrefs.view_of(ref)
    if isinstance(view, kind):
        return view
    raise errors.MemorySpaceError(
        f"A copy has no reference in {space}",
        expected="a reference in GMEM and one in SMEM",
        got=f"{ref.type}",
    )


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Returns a tuple, whose only element may be given by itself."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def arranged(
    view: GmemView,
    starts: Sequence[int | ir.Value],
    sizes: Sequence[int | None],
    transforms: tuple[MemRefTransform, ...],
) -> Slice:
    """Returns a slice of a view, in the arrangement that some transforms give it."""
    kept = [axis for axis, size in enumerate(sizes) if size is not None]
    dims = [PhysicalDim(view.window.axes[a], sizes[a] or 0, 1, 0) for a in kept]
    for transform in transforms:
        dims = transform.transform_dims(dims)
    strides = row_major_strides([d.size for d in dims])
    pairs = zip(dims, strides, strict=True)
    dims = [dataclasses.replace(d, smem_stride=s) for d, s in pairs]
    multiples = [
        _multiple(start, [d.stride for d in dims if d.gmem_dim == view.window.axes[a]])
        for a, start in enumerate(starts)
    ]
    part = view.slice(starts, sizes, multiples)
    return Slice(part, tuple(dims), transforms)


def _multiple(start: int | ir.Value, steps: Sequence[int]) -> int:
    """Returns a divisor of a start; that of a tiled dimension is one of a tile."""
    known = scalars.divisor(start)
    return known if isinstance(start, int) else math.lcm(known, *steps)


# --- the side of SMEM -----------------------------------------------------------------


def target_of(ref: ir.Value, part: Slice) -> SmemView:
    """Returns the view of the memref of SMEM of a copy, contiguous, as the slice."""
    view = _view_in(SmemView, ref, "SMEM")
    if view.dtype != part.view.dtype:
        raise errors.DTypeError(
            "Source and destination of a copy have different element types",
            expected=f"{part.view.dtype} as in GMEM",
            got=f"{view.dtype} in SMEM",
        )
    type_ = ir.MemRefType(ref.type)
    if tuple(type_.shape) != part.shape:
        raise errors.ShapeError(
            "The reference in SMEM has another shape than the slice of GMEM",
            expected=f"{part.shape}, the slice after gmem_transform",
            got=tuple(type_.shape),
        )
    strides, _ = type_.get_strides_and_offset()
    dense = row_major_strides(type_.shape)
    pairs = zip(type_.shape, strides, dense, strict=True)
    if any(size != 1 and stride != other for size, stride, other in pairs):
        raise errors.LayoutError(
            "The reference in SMEM of a copy is not contiguous",
            expected=f"strides {dense} for shape {tuple(type_.shape)}",
            got=f"strides {tuple(strides)}",
            hint="copy it in several pieces, or make that dimension the leading one",
        )
    return view


def logical(target: SmemView, part: Slice, swizzle: int | None) -> SmemView:
    """Returns SMEM as an array of the shape of the slice, for copies by threads.

    Raises:
      UnsupportedError: the transforms are not one tiling.
    """
    shape, tiling = part.view.shape, None
    if part.transforms:
        first = part.transforms[0]
        if len(part.transforms) != 1 or not isinstance(first, TileTransform):
            raise errors.UnsupportedError(
                "These transforms are not supported here",
                expected="gmem_transform=() or a single TileTransform, in copies of "
                "rows by indices and by CP_ASYNC",
                got=part.transforms,
            )
        tiling = first.tiling
    layout = SmemLayout.of(shape, part.bits, tiling, swizzle or NO_SWIZZLE)
    return SmemView.whole(smem.slice_pointer(target), layout, target.dtype)


# --- plans ----------------------------------------------------------------------------


def planned(
    part: Slice,
    target: SmemView,
    swizzle: int | None,
    mode: OOBFillMode | None,
    pieces: int = 1,
    is_shared: bool = False,
) -> TmaPlan | int:
    """Returns the instructions of a copy, or its bytes if it needs no tensor map.

    The number of instructions is a multiple of `pieces`; `is_shared` says that several
    CTAs take part.

    Raises:
      LayoutError: no tensor map describes the copy.
    """
    swizzle = swizzle or NO_SWIZZLE
    plain = swizzle == NO_SWIZZLE and not part.transforms and not is_shared
    if plain:
        line = bulk.size_bytes(part.view, logical(target, part, None), mode)
        if line is not None:
            return line
    plan = _plan(part, swizzle, pieces, mode is OOBFillMode.PROMISE_IN_BOUNDS)
    if plan is None:
        raise _impossible(part, swizzle, pieces)
    return plan


def _plan(part: Slice, swizzle: int, pieces: int, in_bounds: bool) -> TmaPlan | None:
    window: Window = part.view.window
    inside = window.known_inside()
    array = SlicedArray(
        window.array_shape, part.bits, window.squeezed, window.multiples,
        (True,) * len(inside) if in_bounds else inside, window.axes,
    )  # fmt: skip
    dims, last = part.dims, len(window.array_shape) - 1
    if not dims:
        return None
    per_byte = max(1, 8 // part.bits)
    if per_byte > 1:
        halved = _of_bytes(array, dims, per_byte)
        if halved is None:
            return None
        array, dims = halved
    if swizzle != NO_SWIZZLE and dims[-1].size * array.element_bits != 8 * swizzle:
        return None
    fitting = fitting_dims(dims, array.element_bits)
    plan = plan_dims(array, fitting, swizzle, part.size_bytes, pieces)
    if plan is None or per_byte == 1:
        return plan
    of_elements = tuple(d.with_source(last, divided=per_byte) for d in plan.dims)
    return dataclasses.replace(plan, dims=of_elements)


def _of_bytes(
    array: SlicedArray, dims: Sequence[PhysicalDim], per_byte: int
) -> tuple[SlicedArray, tuple[PhysicalDim, ...]] | None:
    """Returns an array of elements that share bytes as one of bytes."""
    last = len(array.shape) - 1
    *outer, inner = dims
    steps = [inner.size, array.shape[-1], array.known[-1]]
    steps += [d.stride for d in outer if d.gmem_dim == last]
    if (inner.gmem_dim, inner.stride) != (last, 1) or any(n % per_byte for n in steps):
        return None
    found = [dataclasses.replace(inner, size=inner.size // per_byte)]
    for d in reversed(outer):
        stride = d.stride // per_byte if d.gmem_dim == last else d.stride
        smem_stride = d.smem_stride // per_byte
        found.insert(0, PhysicalDim(d.gmem_dim, d.size, stride, smem_stride))
    shape, known = ((*x[:-1], x[-1] // per_byte) for x in (array.shape, array.known))
    of_bytes = dataclasses.replace(array, shape=shape, element_bits=8, known=known)
    return of_bytes, tuple(found)


def _impossible(part: Slice, swizzle: int, pieces: int) -> errors.LayoutError:
    shape, bits, whole = part.shape, part.bits, part.view.window.array_shape
    minor = shape[-1:] and shape[-1] * bits / 8
    got = f"{shape} of {bits}-bit elements, from an array of shape {whole}"
    if swizzle != NO_SWIZZLE and minor != swizzle:
        return errors.LayoutError(
            f"A swizzle of {swizzle} bytes and the last dimension in SMEM differ",
            expected=f"{swizzle * 8 // bits} elements ({swizzle} bytes)",
            got=got,
            hint=f"tile with TileTransform((8, {swizzle * 8 // bits}))",
        )
    return errors.LayoutError(
        "no tensor map describes this copy",
        expected="a last dimension in SMEM that is a multiple of 16 bytes and the last "
        f"one in GMEM, strides of 16 bytes, boxes of at most {MAX_BOX} elements a side"
        + (f", {pieces} equal pieces" if pieces > 1 else ""),
        got=got,
        hint="copy fewer dimensions at once, or choose sizes with small factors",
    )


def transfer(
    part: Slice, target: SmemView, found: TmaPlan | int, **options: Any
) -> tma.Transfer:
    """Returns the copy as its instructions need it."""
    base = smem.slice_pointer(target)
    return tma.Transfer.of(part.view, found, base, part.size_bytes, **options)


def part_of(part: Slice, axis: int, index: ir.Value, count: int) -> Slice:
    """Returns one of `count` equal parts of a slice along a dimension of it.

    Squeezed dimensions do not count; `index` is an i32.
    """
    shape = part.view.shape
    if axis >= len(shape) or shape[axis] % count:
        raise errors.LayoutError(
            "A partitioned copy cannot be divided among its CTAs",
            expected=f"a dimension {axis} of the slice, a multiple of {count}",
            got=f"shape {shape}",
        )
    size = shape[axis] // count
    starts: list[int | ir.Value] = [0] * len(shape)
    starts[axis] = arith.muli(index, module.current().i32(size))
    sizes = [size if a == axis else n for a, n in enumerate(shape)]
    return arranged(part.view, starts, sizes, part.transforms)

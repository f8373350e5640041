# SPDX-License-Identifier: Apache-2.0
"""Plans TMA copies between a slice of a GMEM array and a placement in SMEM.

A tensor copy transfers a box of a strided view of the array (the tensor map), which is
dense and row-major in SMEM. Elements outside of the view are read as zero and are not
stored, so a plan is exact at the array's bounds only if the view has the same bounds.
Limits: PTX ISA "cp.async.bulk.tensor", CUDA driver "cuTensorMapEncodeTiled".
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts.gmem.tma_view import (
    INNER_BOX_BYTES,
    PhysicalDim,
    SlicedArray,
    Source,
    ViewDim,
    build_view,
    divisors,
)
from pallas_gpu.layouts.smem.layout import SmemLayout
from pallas_gpu.layouts.smem.swizzle import NO_SWIZZLE, atom_bytes
from pallas_gpu.layouts.smem.window import check_window, match_axes
from pallas_gpu.layouts.window import Window

# Shared-memory addresses of tensor copies are aligned to this (PTX ISA).
SMEM_ALIGNMENT_BYTES = 128


class SmemWindow(NamedTuple):
    """A slice of an array in SMEM: whole tiles; the emitter adds the start."""

    smem: SmemLayout
    window: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TmaInstruction:
    """One tensor copy.

    Attributes:
      smem_offset_bytes: offset of the box in the SMEM array.
      addends: for each dim of the view the offset added to its coordinate.
    """

    smem_offset_bytes: int
    addends: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TmaPlan:
    """A tensor map and the copies that use it.

    Dims are listed outermost first; cuTensorMapEncodeTiled and PTX coordinates have
    them innermost first. The innermost dim has a stride of one element.

    Attributes:
      element_bits: width of an element.
      swizzle: the tensor map's swizzle mode, 16 for none.
      dims: the view: size, stride, box and the sources of the coordinate.
      instructions: the copies, ordered by SMEM offset; equal pieces for several CTAs
        are runs of this list.
      smem_bytes: size of the SMEM array.
    """

    element_bits: int
    swizzle: int
    dims: tuple[ViewDim, ...]
    instructions: tuple[TmaInstruction, ...]
    smem_bytes: int

    @property
    def bounded(self) -> frozenset[int]:
        """The dimensions of the array whose bounds the tensor map has.

        Dimensions that share a dim of the map have none between them.
        """
        sources = [dim.sources for dim in self.dims]
        return frozenset(s[0].gmem_dim for s in sources if len(s) == 1)

    @property
    def box_bytes(self) -> int:
        """Bytes per instruction, those outside of the array included."""
        return math.prod(d.box for d in self.dims) * self.element_bits // 8

    def coordinates(
        self, instruction: TmaInstruction, starts: Sequence[int]
    ) -> tuple[int, ...]:
        """The start of an instruction's box in the view, for given slice starts."""
        return tuple(
            dim.coordinate(starts) + addend
            for dim, addend in zip(self.dims, instruction.addends, strict=True)
        )


def plan_copy(
    gmem_shape: Sequence[int],
    element_bits: int,
    slice_shape: Sequence[int],
    squeezed: Sequence[int],
    smem: SmemLayout,
    *,
    start_multiples: Sequence[int] | None = None,
    inside: Sequence[bool] | None = None,
    pieces: int = 1,
    window: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
) -> TmaPlan:
    """Finds the smallest number of tensor copies that transfer a slice exactly.

    Args:
      gmem_shape: shape of the row-major array in GMEM; its base is 16-byte aligned.
      element_bits: width of an element.
      slice_shape: static size in every dimension, 1 in squeezed ones.
      squeezed: dimensions indexed by an integer, absent from SMEM. Their index must be
        in bounds, and so must the range of a dimension that is not in
        `TmaPlan.bounded`.
      smem: placement of the array in SMEM.
      start_multiples: for each dimension a known divisor of the slice's start, 0 if
        the start is 0; all 1 (nothing known) if None. Tiles in two dimensions need
        fewer copies if starts are multiples of the tile.
      inside: for each dimension whether the slice is known to be in bounds; all False
        if None. Compensates for unknown multiples.
      pieces: the number of instructions must be a multiple of this.
      window: shape of the slice of SMEM, in the array's rank; the whole array if None.
        Its start is a multiple of the tile, and of the swizzle's atom in bytes. Except
        for axes of size 1 it is the slice's shape without the squeezed dimensions.
      axes: the dimensions that are not squeezed, in the order of SMEM; None: that of
        the array.

    Raises:
      LayoutError: the shapes do not match, or no tensor map can describe the copy.

      >>> plan = plan_copy((512, 512), 16, (128, 128), (), smem_tiled_8_64,
      ...                  start_multiples=(128, 128))
      >>> [d.box for d in plan.dims], len(plan.instructions)
      ([16, 2, 8, 64], 1)
    """
    rank = len(gmem_shape)
    array = SlicedArray(
        tuple(gmem_shape),
        element_bits,
        tuple(sorted(squeezed)),
        (1,) * rank if start_multiples is None else tuple(start_multiples),
        (False,) * rank if inside is None else tuple(inside),
        tuple(g for g in range(rank) if g not in squeezed)
        if axes is None
        else tuple(axes),
    )
    target = SmemWindow(smem, smem.shape if window is None else tuple(window))
    if element_bits < 8:
        return _plan_packed(array, tuple(slice_shape), target, pieces)
    return _plan_copy(array, tuple(slice_shape), target, pieces)


def plan_prefetch(window: Window, element_bits: int, pieces: int = 1) -> TmaPlan:
    """Finds the boxes of a prefetch: those of a copy without tiles.

    Args:
      window: the slice of an array in GMEM.
      element_bits: width of an element.
      pieces: the number of instructions is a multiple of this.

    Raises:
      LayoutError: no tensor map can describe the slice.
    """
    return plan_copy(
        window.array_shape,
        element_bits,
        window.sizes,
        window.squeezed,
        SmemLayout(window.shape, element_bits),
        start_multiples=window.multiples,
        inside=window.known_inside(),
        pieces=pieces,
    )


@functools.lru_cache(maxsize=256)
def _plan_packed(
    array: SlicedArray, slice_shape: tuple[int, ...], target: SmemWindow, pieces: int
) -> TmaPlan:
    """Plans a copy of elements that share bytes as one of bytes."""
    per_byte = 8 // array.element_bits
    _match_slice(array, slice_shape, target)
    smem, last = target.smem, len(array.shape) - 1
    minor = (array.shape[-1], slice_shape[-1], target.window[-1], smem.shape[-1])
    tile = smem.tile[-1:] or (per_byte,)
    if array.order[-1:] != (last,) or any(n % per_byte for n in (*minor, *tile)):
        raise _impossible(array, slice_shape, target, pieces)

    def halved(sizes: tuple[int, ...]) -> tuple[int, ...]:
        return (*sizes[:-1], sizes[-1] // per_byte)

    divided, rest = divmod(array.known[-1], per_byte)
    known = (*array.known[:-1], 1 if rest else divided)
    of_bytes = dataclasses.replace(
        array, shape=halved(array.shape), element_bits=8, known=known
    )
    tiling = smem.tiling and halved(smem.tiling)
    layout = SmemLayout(halved(smem.shape), 8, tiling, smem.swizzle)
    window = SmemWindow(layout, halved(target.window))
    try:
        plan = _plan_copy(of_bytes, halved(slice_shape), window, pieces)
    except LayoutError:
        raise _impossible(array, slice_shape, target, pieces) from None
    dims = tuple(dim.with_source(last, divided=per_byte) for dim in plan.dims)
    return dataclasses.replace(plan, dims=dims)


@functools.lru_cache(maxsize=1024)
def _plan_copy(
    array: SlicedArray, slice_shape: tuple[int, ...], target: SmemWindow, pieces: int
) -> TmaPlan:
    axes = _match_slice(array, slice_shape, target)
    plan = _plan_as_it_is(array, target, axes, pieces)
    if plan is None:
        plan = _plan_joined(array, slice_shape, target, pieces)
    if plan is None:
        raise _impossible(array, slice_shape, target, pieces)
    return plan


def _plan_as_it_is(
    array: SlicedArray, target: SmemWindow, axes: dict[int, int], pieces: int
) -> TmaPlan | None:
    """Tries to split the slice of SMEM into equal boxes, fewest first."""
    smem, physical = target.smem, _physical_dims(target, axes)
    return plan_dims(array, physical, smem.swizzle, smem.size_bytes, pieces)


def plan_dims(
    array: SlicedArray,
    physical: Sequence[PhysicalDim],
    swizzle: int,
    smem_bytes: int,
    pieces: int = 1,
) -> TmaPlan | None:
    """Splits an array in SMEM, given by its dims, into equal boxes, fewest first.

    Args:
      array: the array in GMEM and its slice, of elements of at least 8 bits.
      physical: the dims in the order of SMEM.
      swizzle: the swizzle in bytes, 16 for none.
      smem_bytes: the size of the array in SMEM.
      pieces: the number of instructions is a multiple of this.

    Returns:
      The plan; None if no tensor map describes the copy.
    """
    candidates = sorted(
        (math.prod(d.size for d in physical[:cut]) * parts, cut, parts)
        for cut in range(len(physical))
        for parts in divisors(physical[cut].size)
    )
    unit_bits = 8 * max(SMEM_ALIGNMENT_BYTES, atom_bytes(swizzle))
    for count, cut, parts in candidates:
        loops = [*physical[:cut], physical[cut].loop_over(parts)]
        box = [physical[cut].shrunk(parts), *physical[cut + 1 :]]
        aligned = all(
            dim.smem_stride * array.element_bits % unit_bits == 0
            for dim in loops
            if dim.size > 1
        )
        if count % pieces or not _is_dense(box) or not aligned:
            continue
        view = build_view(array, box, loops, swizzle)
        if view is not None:
            steps = _instructions(view, loops, array.element_bits)
            return TmaPlan(array.element_bits, swizzle, view, steps, smem_bytes)
    return None


def _is_dense(box: Sequence[PhysicalDim]) -> bool:
    """Whether the box is contiguous in SMEM, as the hardware requires."""
    expected = 1
    for dim in reversed(box):
        if dim.size > 1 and dim.smem_stride != expected:
            return False
        expected *= dim.size
    return True


def _plan_joined(
    array: SlicedArray, slice_shape: tuple[int, ...], target: SmemWindow, pieces: int
) -> TmaPlan | None:
    """Joins the two minor dimensions if the slice consists of whole rows.

    So rows that are not a multiple of 16 bytes can be copied, several at a time.
    """
    rank = len(array.shape)
    whole = rank > 1 and slice_shape[-1] == array.shape[-1] and array.known[-1] == 0
    smem = target.smem
    partial = target.window != smem.shape or bool(smem.tiling)
    transposed = list(array.order) != sorted(array.order)
    if transposed or partial or not whole or {rank - 1, rank - 2} & set(array.squeezed):
        return None
    row = array.shape[-1]

    def joined(sizes: tuple[int, ...]) -> tuple[int, ...]:
        return (*sizes[:-2], sizes[-2] * sizes[-1])

    flat = SlicedArray(
        joined(array.shape),
        array.element_bits,
        array.squeezed,
        (*array.known[:-2], array.known[-2] * row),
        (*array.inside[:-2], array.inside[-2]),
        array.order[:-1],
    )
    flat_smem = SmemLayout(joined(smem.shape), smem.itemsize_bits)
    try:
        target = SmemWindow(flat_smem, flat_smem.shape)
        plan = _plan_copy(flat, joined(slice_shape), target, pieces)
    except LayoutError:
        return None
    dims = tuple(dim.with_source(rank - 2, times=row) for dim in plan.dims)
    return dataclasses.replace(plan, dims=dims)


def _physical_dims(target: SmemWindow, axes: dict[int, int]) -> list[PhysicalDim]:
    """The dims of the slice of SMEM in memory order, in terms of GMEM dims."""
    tile, between, within = (x.tolist() for x in target.smem.axis_strides)
    size = target.window
    dims = [
        PhysicalDim(g, size[axis] // tile[axis], tile[axis], between[axis])
        for axis, g in axes.items()
    ]
    dims += [PhysicalDim(g, tile[axis], 1, within[axis]) for axis, g in axes.items()]
    return fitting_dims(dims, target.smem.itemsize_bits)


def fitting_dims(dims: Sequence[PhysicalDim], element_bits: int) -> list[PhysicalDim]:
    """Drops dims of size one; splits long ones, for which a view may have two."""
    dims = [d for d in dims if d.size > 1] or dims[-1:]
    minor_chunk = -(-INNER_BOX_BYTES * 8 // element_bits)
    split = [d.split(minor_chunk if d is dims[-1] else 1) for d in dims]
    return list(itertools.chain.from_iterable(split))


def _instructions(
    view: tuple[ViewDim, ...], loops: Sequence[PhysicalDim], element_bits: int
) -> tuple[TmaInstruction, ...]:
    steps = []
    for index in itertools.product(*(range(d.size) for d in loops)):
        moved: dict[int, int] = {}
        elements = 0
        for dim, i in zip(loops, index, strict=True):
            moved[dim.gmem_dim] = moved.get(dim.gmem_dim, 0) + i * dim.stride
            elements += i * dim.smem_stride
        addends = tuple(dim.static_addend(moved) for dim in view)
        steps.append(TmaInstruction(elements * element_bits // 8, addends))
    return tuple(steps)


def _match_slice(
    array: SlicedArray, slice_shape: tuple[int, ...], target: SmemWindow
) -> dict[int, int]:
    """Checks the shapes; returns the GMEM dimension of each SMEM axis that has one."""
    rank, smem = len(array.shape), target.smem
    if not len(slice_shape) == len(array.known) == len(array.inside) == rank:
        raise LayoutError(
            "a copy needs a size for each dimension of the array",
            expected=f"{rank} sizes",
            got=f"sizes {slice_shape}, {array}",
        )
    kept = array.order
    units = all(0 <= g < rank and slice_shape[g] == 1 for g in array.squeezed)
    check_window(smem, target.window)
    axes = match_axes(tuple(slice_shape[g] for g in kept), target.window)
    if axes is None or not units or smem.itemsize_bits != array.element_bits:
        raise LayoutError(
            "the slice of GMEM and the array in SMEM differ",
            expected=f"shape {target.window} of {smem.itemsize_bits} bits",
            got=f"slice {slice_shape} without dimensions {array.squeezed}, "
            f"{array.element_bits} bits",
        )
    if not kept:
        raise LayoutError(
            "a tensor copy moves at least 16 bytes",
            expected="a slice of rank 1 or more",
            got="a single element",
            hint="read it with a plain load",
        )
    return dict(zip(axes, kept, strict=True))


def _impossible(
    array: SlicedArray, slice_shape: tuple[int, ...], target: SmemWindow, pieces: int
) -> LayoutError:
    gmem_shape, element_bits = array.shape, array.element_bits
    smem = target.smem
    row_bits = gmem_shape[-1] * element_bits
    inner_bits = (smem.tile or target.window)[-1] * element_bits
    alignment = max(SMEM_ALIGNMENT_BYTES, atom_bytes(smem.swizzle))
    got = f"slice {slice_shape} of {gmem_shape} with {element_bits}-bit elements"
    if slice_shape[-1] == 1 or inner_bits % (8 * INNER_BOX_BYTES):
        return LayoutError(
            "TMA copies multiples of 16 bytes",
            expected="a minor dimension (of the tile) that is a multiple of 16 bytes",
            got=f"{inner_bits / 8:g} bytes: {got}",
            hint="pad the slice's minor dimension, or load without TMA",
        )
    if len(gmem_shape) > 1 and row_bits % (8 * INNER_BOX_BYTES):
        return LayoutError(
            "TMA cannot address the rows of this array",
            expected="a row stride that is a multiple of 16 bytes",
            got=f"{row_bits / 8:g} bytes: {got}",
            hint="pad the array's minor dimension, or copy it without TMA",
        )
    swizzle = "" if smem.swizzle == NO_SWIZZLE else f", swizzle {smem.swizzle}"
    return LayoutError(
        "no tensor map describes this copy",
        expected="at most 5 dimensions and boxes of at most 256 elements a side, that "
        f"start at multiples of {alignment} bytes in SMEM"
        + (f", in {pieces} equal pieces" if pieces > 1 else ""),
        got=f"{got} into window {target.window} of {smem.shape}, "
        f"tiles {smem.tiling}{swizzle}",
        hint="copy fewer dimensions at once, or choose sizes with small factors",
    )


__all__ = [
    "Source",
    "TmaInstruction",
    "TmaPlan",
    "ViewDim",
    "fitting_dims",
    "plan_copy",
    "plan_dims",
    "plan_prefetch",
]

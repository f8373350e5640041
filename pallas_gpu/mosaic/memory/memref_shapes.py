# SPDX-License-Identifier: Apache-2.0
"""Parts of memrefs, and memrefs of other shapes: no instruction, but an address."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

from pallas_gpu import errors
from pallas_gpu.layouts.reshaped import groups
from pallas_gpu.mosaic.scalars import DynamicSlice

DYNAMIC = ir.ShapedType.get_dynamic_stride_or_offset()
type Index = int | ir.Value


def parse_indices(
    index: Any, shape: Sequence[int], *, check_oob: bool = True
) -> tuple[list[Index], list[int], list[bool]]:
    """Returns start, size, and whether it is squeezed, of each axis.

    An index is an int, a value of type `index`, a slice without a step or a
    `DynamicSlice`; axes behind the indices are whole.

    Raises:
      ArgumentError: there are too many indices, or a slice has a step.
      OutOfBoundsError: with `check_oob` a part is known to be out of bounds.
    """
    given = index if isinstance(index, tuple) else (index,)
    if len(given) > len(shape):
        raise errors.ArgumentError(
            "Too many indices", expected=f"at most {len(shape)}", got=len(given)
        )
    given += (slice(None),) * (len(shape) - len(given))
    found = [_range(x, n) for x, n in zip(given, shape, strict=True)]
    for axis, ((start, size, _), n) in enumerate(zip(found, shape, strict=True)):
        if check_oob and isinstance(start, int) and not 0 <= start <= n - size:
            raise errors.OutOfBoundsError(
                f"An index is out of bounds on axis {axis}",
                expected=f"a part of {tuple(shape)}",
                got=given[axis],
            )
    return [x for x, _, _ in found], [n for _, n, _ in found], [d for _, _, d in found]


def _range(x: Any, n: int) -> tuple[Index, int, bool]:
    if isinstance(x, (ir.Operation, ir.OpView)):
        x = x.result
    match x:
        case DynamicSlice():
            return x.base, x.length, False
        case slice(step=None | 1):
            start, stop = x.start or 0, n if x.stop is None else x.stop
            start, stop = (y + n if y < 0 else y for y in (start, stop))
            return start, stop - start, False
        case int() | np.integer():
            return int(x) + (n if x < 0 else 0), 1, True
        case ir.Value() if isinstance(x.type, ir.IndexType):
            return x, 1, True
    raise errors.ArgumentError(
        "This is not an index of a reference",
        expected="an int, a value of type index, a slice without a step, or ds(...)",
        got=str(x),
    )


def memref_slice(ref: ir.Value, index: Any) -> ir.Value:
    """Returns a part of a memref; see `parse_indices`."""
    return slice_memref(ref, *parse_indices(index, ref.type.shape))


def slice_memref(
    ref: ir.Value,
    starts: Sequence[Index],
    sizes: Sequence[int],
    squeezed: Sequence[bool],
) -> ir.Value:
    """A part of a memref; starts are ints, or values of any integer type."""
    strides, offset = ref.type.get_strides_and_offset()
    indices = [_as_index(x) for x in starts]
    if offset != DYNAMIC and all(isinstance(x, int) for x in indices):
        pairs = zip(indices, strides, strict=True)
        offset += sum(x * s for x, s in pairs)  # type: ignore[operator]
    else:
        offset = DYNAMIC
    kept = [not drop for drop in squeezed]
    left, steps = (list(itertools.compress(x, kept)) for x in (sizes, strides))
    type_ = _strided(ref.type, left, steps, offset)
    ones = [1] * len(indices)
    return memref.subview(ref, indices, list(sizes), ones, result_type=type_)


def _as_index(x: Index) -> Index:
    if isinstance(x, int) or isinstance(x.type, ir.IndexType):
        return x
    return arith.index_cast(ir.IndexType.get(), x)


def _strided(
    like: ir.MemRefType, shape: Sequence[int], strides: Sequence[int], offset: int
) -> ir.MemRefType:
    layout = ir.StridedLayoutAttr.get(offset, list(strides))
    return ir.MemRefType.get(list(shape), like.element_type, layout, like.memory_space)


def memref_transpose(ref: ir.Value, permutation: Sequence[int]) -> ir.Value:
    """Returns the memref whose axis i is axis `permutation[i]` of `ref`."""
    strides, offset = ref.type.get_strides_and_offset()
    shape = ref.type.shape
    sizes, steps = ([x[p] for p in permutation] for x in (shape, strides))
    type_ = _strided(ref.type, sizes, steps, offset)
    order = ir.AffineMap.get_permutation(list(permutation))
    return memref.transpose(type_, ref, order)


def memref_reshape(ref: ir.Value, shape: tuple[int, ...]) -> ir.Value:
    """Returns a memref of the same elements, row-major, in another shape.

    Raises:
      ShapeError: the shapes have different numbers of elements, or axes that are to
        become one are not adjacent in memory.
    """
    before, after = list(ref.type.shape), list(shape)
    if before == after:
        return ref
    if math.prod(before) != math.prod(after) or any(n < 1 for n in after):
        raise errors.ShapeError(
            "A reference cannot be reshaped to another number of elements",
            expected=f"{math.prod(before)} elements, each axis at least 1",
            got=tuple(shape),
        )
    if not after:
        return _reshaped(ref, [], [], [])
    if not before:
        ref, before = _reshaped(ref, [1], [1], []), [1]
    # Each group of axes before becomes one axis, then the group of axes after it.
    axis = len(before)
    for old, new in reversed(_joint(before, after)):
        axis -= len(old)
        if len(old) > 1:
            ref = memref_fold(ref, axis, len(old))
        if len(new) > 1:
            ref = memref_unfold(ref, axis, tuple(after[i] for i in new))
    return ref


def _joint(
    before: Sequence[int], after: Sequence[int]
) -> list[tuple[list[int], list[int]]]:
    """The groups of axes, before and after, that have the same elements."""
    result: list[tuple[list[int], list[int]]] = []
    for old, new in groups(before, after):
        if old:
            result.append((old, new))
        else:
            # Axes of one element at the end belong to the last group.
            result[-1][1].extend(new)
    return result


def memref_fold(ref: ir.Value, dim: int, fold_rank: int) -> ir.Value:
    """Returns the memref in which `fold_rank` axes from `dim` on are one.

    Raises:
      ShapeError: these axes do not exist, or are not adjacent in memory.
    """
    shape = list(ref.type.shape)
    strides, _ = ref.type.get_strides_and_offset()
    end = dim + fold_rank
    if dim < 0 or end > len(shape) or fold_rank < 1:
        raise errors.ShapeError(
            "Axes to fold do not exist",
            expected=f"axes of rank {len(shape)}",
            got=f"{fold_rank} axes from {dim} on",
        )
    inner = [(n, s) for n, s in zip(shape[dim:end], strides[dim:end], strict=True)]
    inner = [(n, s) for n, s in inner if n != 1]
    if any(s != m * t for (_, s), (m, t) in itertools.pairwise(inner)):
        raise errors.ShapeError(
            "Axes to fold are not adjacent in memory",
            expected="each stride the product of the next one and its size",
            got=f"shape {tuple(shape)}, strides {tuple(strides)}",
        )
    shape[dim:end] = [math.prod(shape[dim:end])]
    strides[dim:end] = [inner[-1][1] if inner else strides[end - 1]]
    axes = [[d] for d in range(dim)] + [[*range(dim, end)]]
    axes += [[d] for d in range(end, len(ref.type.shape))]
    return _reshaped(ref, shape, strides, axes)


def memref_unfold(ref: ir.Value, dim: int, factors: Sequence[int | None]) -> ir.Value:
    """Returns the memref in which axis `dim` is several axes.

    One of `factors`, their sizes, may be None: the rest.

    Raises:
      ShapeError: the product of the factors is not the size of the axis.
    """
    shape = list(ref.type.shape)
    strides, _ = ref.type.get_strides_and_offset()
    known = math.prod(f for f in factors if f is not None)
    unknown = sum(f is None for f in factors)
    rest, left = divmod(shape[dim], known) if known else (0, 1)
    if left or unknown > 1 or (not unknown and rest != 1):
        raise errors.ShapeError(
            "An axis cannot be unfolded by these factors",
            expected=f"a product of {shape[dim]}, at most one None",
            got=tuple(factors),
        )
    sizes = [rest if f is None else f for f in factors]
    steps = [strides[dim] * math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    count, rank = len(sizes), len(shape)
    axes = [[d] for d in range(dim)] + [[*range(dim, dim + count)]]
    axes += [[d + count - 1] for d in range(dim + 1, rank)]
    shape[dim : dim + 1], strides[dim : dim + 1] = sizes, steps
    return _reshaped(ref, shape, strides, axes)


def memref_unsqueeze(ref: ir.Value, dim: int) -> ir.Value:
    """Returns the memref with a new axis of one element in front of axis `dim`."""
    rank = len(ref.type.shape)
    if dim == rank:
        return memref_unfold(ref, dim - 1, (None, 1))
    return memref_unfold(ref, dim, (1, None))


def _reshaped(
    ref: ir.Value,
    shape: Sequence[int],
    strides: Sequence[int],
    axes: Sequence[Sequence[int]],
) -> ir.Value:
    """A memref of another rank; `axes` are groups of those of the larger rank."""
    type_, space = ref.type, ref.type.memory_space
    is_plain = not isinstance(type_.layout, ir.StridedLayoutAttr)
    if is_plain or type_.layout == ir.Attribute.parse("strided<[1]>"):
        # MLIR infers a contiguous type, and takes no other.
        result = ir.MemRefType.get([*shape], type_.element_type, memory_space=space)
    else:
        _, offset = type_.get_strides_and_offset()
        result = _strided(type_, shape, strides, offset)
    if len(shape) < len(type_.shape):
        return memref.collapse_shape(result, ref, axes)
    return memref.expand_shape(result, ref, axes, [], [*shape])

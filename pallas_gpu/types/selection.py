# SPDX-License-Identifier: Apache-2.0
"""The elements that steps on a reference select, each by its index on every axis.

A chain of slices of stride 1, integers and transposes is a window (`steps.py`). Any
other chain, and every access with a mask, is a window and one index for each axis of
it: a number, a scalar, or an array with an index for each element of the result.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gpu import _jax, errors
from pallas_gpu.layouts.reshaped import groups
from pallas_gpu.layouts.window import Window, added, is_contiguous, row_major_strides
from pallas_gpu.types import indexing
from pallas_gpu.types.steps import is_window, position_of_arrays, resolve, typed

# Indices that are known are arrays of a kernel by selections of numbers, one for each
# index that does not continue an arithmetic progression.
_MOST_KNOWN = 64
_VIEWS = _jax.ReshapeTransform | _jax.BitcastTransform


@dataclasses.dataclass(frozen=True)
class Axis:
    """Indices along an axis of the result: a start, and steps of a stride.

    Attributes:
      number: the axis.
      stride: an integer.
      start: an integer or a scalar.
    """

    number: int
    stride: int = 1
    start: Any = 0


@dataclasses.dataclass(frozen=True)
class LookedUp:
    """Indices from an array, which are the same along the other axes of the result.

    Attributes:
      values: the array.
      dims: for each of its axes that of the result, in order.
    """

    values: Any
    dims: tuple[int, ...]


# A number, a scalar or an array of the result's shape, or one of the above.
Index = Any


@dataclasses.dataclass(frozen=True)
class Selection:
    """Elements of a reference.

    Attributes:
      window: the steps that select a window of the reference.
      view_shape: shape of the window's elements, in row-major order, that the indices
        refer to; None for the window's own.
      indices: for each axis of that a number, a scalar, or an array of `shape`.
      shape: of the result.
      dtype: of the result; if its width is not the reference's, the window is viewed as
        an array of it.
      adjacent: an axis of the result along which elements are adjacent in memory, and a
        known divisor of the distance from the start of the window to the first of
        them, in elements of a row-major array; None where no axis is known to be.
    """

    window: tuple[Any, ...]
    view_shape: tuple[int, ...] | None
    indices: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: Any
    adjacent: tuple[int, int] | None


def select(
    shape: Sequence[int],
    dtype: Any,
    steps: Sequence[Any],
    *,
    row_major: bool,
    masked: bool,
) -> Selection:
    """Returns the elements that steps select.

    Args:
      shape, dtype: of the reference.
      steps: as recorded on it.
      row_major: whether the elements are in memory in row-major order.
      masked: whether elements outside of the reference may be named.

    Raises:
      UnsupportedError: steps that have no indices, such as a part of what an index
        array selects.
      OutOfBoundsError: without a mask, a static index out of bounds.
    """
    left = list(steps)
    window = Window.whole(shape)
    prefix: list[Any] = []
    while left and is_window(left[0]):
        after = resolve(window, (left[0],))
        inside = resolve(window.shape, (left[0],)).known_inside()
        known = all(isinstance(start, int) for start in after.starts) and all(inside)
        if masked and not (known and not after.over_the_edge()):
            break
        prefix.append(left.pop(0))
        window = after
    # Steps that only reinterpret elements that are adjacent.
    views: list[Any] = []
    adjacent = is_contiguous(window.array_shape, window.sizes)
    if row_major and adjacent and not window.is_transposed:
        while left and isinstance(left[0], _VIEWS):
            views.append(left.pop(0))
    base, dtype = typed(views, window.shape, dtype)
    kinds = [(base, jnp.dtype(dtype))]
    for step in left:
        _refuse_other_width(step, kinds[-1][1])
        after_shape, dtype = typed((step,), *kinds[-1])
        kinds.append((after_shape, jnp.dtype(dtype)))
    final = kinds[-1][0]
    indices: list[Index] = [Axis(axis) for axis in range(len(final))]
    for step, before, after in reversed(
        list(zip(left, kinds, kinds[1:], strict=False))
    ):
        indices = _before(step, indices, before[0], after[0], final)
    if not masked:
        _require_inside(indices, base, final)
    strides = row_major_strides(base) if views else window.strides
    return Selection(
        tuple(prefix),
        base if views else None,
        tuple(_array(index, final) for index in indices),
        final,
        kinds[-1][1],
        _adjacent(strides, indices),
    )


def _require_inside(
    indices: Sequence[Index], base: tuple[int, ...], final: tuple[int, ...]
) -> None:
    """Refuses static indices out of bounds; the emulator checks the others."""
    for dim, (index, n) in enumerate(zip(indices, base, strict=True)):
        match index:
            case int():
                first = last = index
            case Axis() if isinstance(index.start, int):
                first = index.start
                last = first + index.stride * (final[index.number] - 1)
            case _:
                continue
        if first < 0 or last >= n:
            raise errors.OutOfBoundsError(
                "an access outside the reference",
                expected=f"0 to {n - 1} in dimension {dim} of shape {base}",
                got=f"indices {first} to {last}",
                hint="check the index, or mask the elements outside: "
                "plgpu.load(ref, index, mask=...), "
                "plgpu.store(ref, index, x, mask=...)",
            )


def _adjacent(
    strides: Sequence[int], indices: Sequence[Index]
) -> tuple[int, int] | None:
    """Returns the axis along which elements are adjacent, see `Selection`."""
    places = [i for i, stride in enumerate(strides) if stride == 1]
    line = indices[places[-1]] if places else None
    if not isinstance(line, Axis) or line.stride != 1:
        return None
    divisor = line.start if isinstance(line.start, int) else 1
    for place, (index, stride) in enumerate(zip(indices, strides, strict=True)):
        if place == places[-1]:
            continue
        match index:
            case int():
                divisor = math.gcd(divisor, index * stride)
            case Axis() if index.number != line.number:
                start = index.start if isinstance(index.start, int) else 1
                divisor = math.gcd(divisor, index.stride * stride, start * stride)
            case LookedUp() if line.number not in index.dims:
                divisor = math.gcd(divisor, stride)
            case _ if not isinstance(index, (Axis, LookedUp)) and not index.shape:
                divisor = math.gcd(divisor, stride)
            case _:
                return None
    return line.number, divisor


def _refuse_other_width(step: Any, dtype: Any) -> None:
    if not isinstance(step, _jax.BitcastTransform):
        return
    if jnp.dtype(step.dtype).itemsize != jnp.dtype(dtype).itemsize:
        raise errors.UnsupportedError(
            "bitcast of a reference to elements of another width",
            expected="elements that are adjacent in memory: all of a reference without "
            "transforms, or a contiguous slice",
            got=f"{jnp.dtype(dtype).name} to {jnp.dtype(step.dtype).name}, in another "
            "order or tiled",
            hint="bitcast the reference first, then index: ref.bitcast(dtype).at[...]",
        )


# --- from the indices after a step to those before it ---------------------------------


def _before(
    step: Any,
    indices: list[Index],
    before: tuple[int, ...],
    after: tuple[int, ...],
    final: tuple[int, ...],
) -> list[Index]:
    match step:
        case _jax.TransposeTransform():
            return [indices[step.permutation.index(a)] for a in range(len(before))]
        case _jax.ReshapeTransform():
            return _before_reshape(indices, before, after, final)
        case _jax.BitcastTransform():
            return indices
        case _jax.NDIndexer():
            return _before_index(step, indices, final)
        case _:
            resolve(before, (step,))  # raises
            raise AssertionError(step)


def _before_index(
    step: _jax.NDIndexer, indices: list[Index], final: tuple[int, ...]
) -> list[Index]:
    at, rank = position_of_arrays(step), len(step.int_indexer_shape)
    arrays, slices = indices[at : at + rank], [*indices[:at], *indices[at + rank :]]
    rest = iter(slices)
    result: list[Index] = []
    for entry in step.indices:
        if isinstance(entry, _jax.Slice):
            scaled = _times(next(rest), int(entry.stride or 1), final)
            result.append(
                _plus(scaled, _number(0 if entry.start is None else entry.start), final)
            )
        elif indexing.is_array_index(entry):
            result.append(_looked_up(entry, arrays, final))
        else:
            result.append(_number(entry))
    return result


def _number(index: Any) -> Any:
    return index if _jax.is_tracer(index) else int(index)


def _looked_up(
    entry: Any, arrays: Sequence[Index], final: tuple[int, ...]
) -> LookedUp | jax.Array | int:
    """Returns an index array with its axes where those of the result are."""
    values = _known(entry) if isinstance(entry, np.ndarray) else entry
    if isinstance(values, int):
        return values
    dims: list[int] = []
    kept: list[int] = []
    for axis, index in enumerate(arrays):
        n = values.shape[axis]
        if _is_position(index) and final[index.number] == n:
            dims.append(index.number)
            kept.append(axis)
        elif n != 1:
            raise errors.UnsupportedError(
                "a part of what an index array selects",
                expected="index arrays as the last step, or transposed",
                got=f"a slice of a view with indices of shape {values.shape}",
                hint="slice the index array: ref[index[0:8]]",
            )
    values = jax.lax.reshape(values, tuple(values.shape[a] for a in kept))
    order = sorted(range(len(dims)), key=dims.__getitem__)
    if order != list(range(len(dims))):
        values = jax.lax.transpose(values, order)
    values = _as_index(values)
    if not dims:
        return values
    return LookedUp(values, tuple(sorted(dims)))


def _is_position(index: Index) -> bool:
    """Whether the indices along an axis of the result are 0, 1, 2 and so on."""
    return (
        isinstance(index, Axis)
        and index.stride == 1
        and isinstance(index.start, int)
        and index.start == 0
    )


def _known(indices: np.ndarray) -> Any:
    """Returns indices that are known as a value that a kernel can compute."""
    flat = indices.reshape(-1)
    if (flat == flat[0]).all():
        return int(flat[0])
    # Pieces that are arithmetic progressions: first position, value there, step.
    pieces: list[tuple[int, int, int]] = []
    i = 0
    while i < flat.size:
        step = int(flat[i + 1] - flat[i]) if i + 1 < flat.size else 0
        end = i + 1
        while end < flat.size and flat[end] - flat[end - 1] == step:
            end += 1
        pieces.append((i, int(flat[i]), step))
        i = end
    if len(pieces) > _MOST_KNOWN:
        raise errors.UnsupportedError(
            "a reference is indexed with a large array that is known",
            expected=f"at most {_MOST_KNOWN} arithmetic progressions in it",
            got=f"{flat.size} indices, in {len(pieces)} progressions",
            hint="pass the indices as an argument of the kernel: x_ref[index_ref[...]]",
        )
    position = _positions(indices.shape)
    result = None
    for first, value, step in pieces:
        line = position * np.int32(step) + np.int32(value - step * first)
        result = line if result is None else jnp.where(position < first, result, line)
    return result


def _positions(shape: tuple[int, ...]) -> jax.Array:
    """The position of each element of an array in row-major order."""
    terms = [
        jax.lax.broadcasted_iota(jnp.int32, shape, axis) * np.int32(stride)
        for axis, stride in enumerate(row_major_strides(shape))
        if shape[axis] > 1
    ]
    return functools.reduce(jax.lax.add, terms)


def _before_reshape(
    indices: list[Index],
    before: tuple[int, ...],
    after: tuple[int, ...],
    final: tuple[int, ...],
) -> list[Index]:
    """Splits and merges axes only where the two shapes require it."""
    result: list[Index] = []
    for old, new in groups(before, after):
        if len(old) == len(new) == 1:
            result.append(indices[new[0]])
            continue
        sizes = [after[axis] for axis in new]
        _require_32_bits(math.prod(sizes), before, after)
        flat: Index = 0
        for axis, stride in zip(new, row_major_strides(sizes), strict=True):
            flat = _plus(flat, _times(indices[axis], stride, final), final)
        total = math.prod(before[axis] for axis in old)
        for axis, stride in zip(
            old, row_major_strides([before[a] for a in old]), strict=True
        ):
            part = _divided(flat, stride, final)
            n = before[axis]
            # The first axis of more than one element needs no remainder.
            result.append(part if n * stride == total else _rest(part, n, final))
    return result


def _require_32_bits(
    elements: int, before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    if elements >= 1 << 31:
        raise errors.UnsupportedError(
            "reshape of a large part of a reference that is not contiguous",
            expected="less than 2**31 elements in the dimensions that change",
            got=f"{before} to {after}",
            hint="reshape the reference itself, then index",
        )


# --- arithmetic on indices ------------------------------------------------------------


def _array(index: Index, shape: tuple[int, ...]) -> Any:
    """Returns an index as a number, a scalar, or an array of a shape."""
    if isinstance(index, LookedUp):
        return jax.lax.broadcast_in_dim(index.values, shape, index.dims)
    if not isinstance(index, Axis):
        return index
    line = jax.lax.broadcasted_iota(jnp.int32, shape, index.number)
    if index.stride != 1:
        line = jax.lax.mul(*_pair(line, index.stride, shape))
    if isinstance(index.start, int) and index.start == 0:
        return line
    return jax.lax.add(*_pair(line, index.start, shape))


def _as_index(value: Any) -> Any:
    """Returns indices of any integer type as signed ones of 32 or 64 bits."""
    dtype = jnp.dtype(value.dtype)
    wide = dtype.itemsize == 8 or (dtype == jnp.uint32 and jax.config.jax_enable_x64)
    return jax.lax.convert_element_type(value, jnp.int64 if wide else jnp.int32)


def _pair(a: Index, b: Index, final: tuple[int, ...]) -> tuple[Any, Any]:
    a, b = (_array(x, final) for x in (a, b))
    traced = [_as_index(x) for x in (a, b) if not isinstance(x, int)]
    dtype = max((x.dtype for x in traced), key=lambda t: jnp.dtype(t).itemsize)
    shape = final if any(x.shape for x in traced) else ()

    def same(x: Any) -> Any:
        if isinstance(x, int):
            return jax.lax.full(shape, x, dtype)
        x = jax.lax.convert_element_type(x, dtype)
        return x if x.shape == shape else jax.lax.broadcast(x, shape)

    return same(a), same(b)


def _plus(a: Index, b: Index, final: tuple[int, ...]) -> Index:
    def add(a: Index, b: Index) -> Index:
        if isinstance(a, Axis) and _is_scalar(b):
            return dataclasses.replace(a, start=_plus(a.start, b, ()))
        if isinstance(b, Axis) and _is_scalar(a):
            return dataclasses.replace(b, start=_plus(b.start, a, ()))
        return jax.lax.add(*_pair(a, b, final))

    return added(a, b, add)


def _is_scalar(index: Index) -> bool:
    return not isinstance(index, (Axis, LookedUp)) and np.ndim(index) == 0


def _times(a: Index, factor: int, final: tuple[int, ...]) -> Index:
    if isinstance(a, int):
        return a * factor
    if isinstance(a, Axis):
        return Axis(a.number, a.stride * factor, _times(a.start, factor, ()))
    return a if factor == 1 else jax.lax.mul(*_pair(a, factor, final))


def _divided(a: Index, by: int, final: tuple[int, ...]) -> Index:
    if isinstance(a, int):
        return a // by
    return a if by == 1 else jax.lax.div(*_pair(a, by, final))


def _rest(a: Index, by: int, final: tuple[int, ...]) -> Index:
    if isinstance(a, int):
        return a % by
    return 0 if by == 1 else jax.lax.rem(*_pair(a, by, final))

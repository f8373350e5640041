# SPDX-License-Identifier: Apache-2.0
"""Index expressions of references, checked when they are traced.

Integers, scalars, slices, `ds(start, size, stride)` and arrays of integers select a
part of a reference, as in NumPy. A static integer has to be in bounds; a static range
may extend past the edge, because a TMA copy clips it (the check pass refuses it in
reads and writes). Products take integers and ranges of stride 1; copies take reshapes
and bitcasts, too, and arrays of indices of rows (`primitives/copies/views.py`); reads
and writes take everything (`selection.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gpu import _jax, errors, expect
from pallas_gpu.types import values
from pallas_gpu.types.steps import STATIC_SIZE_HINT

# What `ds` makes: a start, a size and a stride.
Slice = _jax.Slice

_NO_SIZE: Any = object()


def _start(value: Any, what: str) -> Any:
    return None if value is None else values.index(value, what)


def _size(value: Any, what: str) -> Any:
    if _jax.is_tracer(value):
        return values.index(value, what)
    return expect.integer()(value, what)


@expect.arguments(start=_start, size=_size, stride=expect.optional(expect.integer(1)))
def ds(start: Any, size: Any = _NO_SIZE, stride: int | None = None) -> Any:
    """Selects a range of a dimension in an index expression.

    PTX: none, it is part of an address. Since: sm_90.

    Args:
      start: first index: a Python integer, or an integer scalar.
      size: number of elements: a Python integer; in the index map of a `BoundedSlice`
        also an integer scalar. Without it, `ds(n)` is `:n`.
      stride: distance of the elements, 1 or more; copies support 1 alone.

    Returns:
      An index, for `ref[...]` and `ref.at[...]`.

    Raises:
      ArgumentTypeError: the start or the size is not an integer.
      UnsupportedError: a reference is indexed with a size that is not static.

    Example:
      >>> x_ref[plgpu.ds(i * 64, 64)]
    """
    if size is not _NO_SIZE:
        return _jax.Slice(0 if start is None else start, size, stride or 1)
    if start is None:
        return slice(None, None, stride)
    return _jax.Slice(0, _size(start, "ds: size"), stride or 1)


def steps(index: Any, shape: Sequence[int]) -> tuple[Any, ...]:
    """Returns an index expression as steps in the form that JAX records.

    Args:
      index: the index expression.
      shape: shape of the reference or view.

    Raises:
      OutOfBoundsError: a static index out of bounds, or too many indices.
      UnsupportedError: a negative stride, a size that is not static, an array of bools.
      ArgumentTypeError: an invalid index.
    """
    entries = _padded(index if isinstance(index, tuple) else (index,), tuple(shape))
    without = tuple(entry for entry in entries if entry is not None)
    step = indexer(without, shape)
    if len(without) == len(entries):
        return (step,)
    return (step, _jax.ReshapeTransform(_with_new_axes(entries, step)))


def indexer(index: Any, shape: Sequence[int]) -> _jax.NDIndexer:
    """Returns an index expression without new axes in the form that JAX records.

    Raises:
      Errors of `steps`.
    """
    shape = tuple(shape)
    entries = _padded(index if isinstance(index, tuple) else (index,), shape)
    indices = [_entry(entry, dim, shape) for dim, entry in enumerate(entries)]
    return _jax.indexer(*_broadcast(indices), shape)


def is_array_index(entry: Any) -> bool:
    """True for an array among the indices of a step."""
    return not isinstance(entry, (_jax.Slice, int)) and np.ndim(entry) > 0


def _with_new_axes(entries: tuple[Any, ...], step: _jax.NDIndexer) -> tuple[int, ...]:
    if step.int_indexer_shape:
        raise errors.UnsupportedError(
            "a reference is indexed with arrays and new axes",
            expected="new axes beside integers and slices",
            got="None (jnp.newaxis) and an array",
            hint="add the axis to the value: ref[index][:, None]",
        )
    indices = iter(step.indices)
    one = _jax.Slice(0, 1, 1)
    ranges = (one if entry is None else next(indices) for entry in entries)
    return tuple(index.size for index in ranges if isinstance(index, _jax.Slice))


def _broadcast(indices: list[Any]) -> tuple[list[Any], tuple[int, ...]]:
    """Broadcasts index arrays to one shape; returns it too."""
    arrays = [i for i in indices if is_array_index(i)]
    if not arrays:
        return indices, ()
    try:
        shape = np.broadcast_shapes(*(np.shape(i) for i in arrays))
    except ValueError:
        raise errors.ShapeError(
            "index arrays of different shapes",
            expected="shapes that broadcast to one",
            got=", ".join(str(np.shape(i)) for i in arrays),
            hint="add axes of size 1: ref[rows[:, None], columns[None]]",
        ) from None
    if 0 in shape:
        raise errors.ShapeError(
            "an index array is empty",
            expected="one index or more",
            got=f"indices of shape {shape}",
            hint="omit the access: shapes are known when the kernel is traced",
        )
    return [_broadcast_one(i, shape) for i in indices], shape


def _broadcast_one(index: Any, shape: tuple[int, ...]) -> Any:
    if not is_array_index(index) or np.shape(index) == shape:
        return index
    if _jax.is_tracer(index):
        return jnp.broadcast_to(index, shape)
    return np.broadcast_to(index, shape)


def _padded(entries: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Returns an index with one entry for each dimension, and new axes among them."""
    dots = [i for i, entry in enumerate(entries) if entry is ...]
    given = sum(entry is not None and entry is not ... for entry in entries)
    if given > len(shape) or len(dots) > 1:
        raise errors.OutOfBoundsError(
            "a reference has fewer dimensions than the index",
            expected=f"at most {len(shape)} indices for shape {shape}, and one `...`",
            got=f"{given} indices and {len(dots)} `...`",
            hint="remove the extra indices"
            if shape
            else "remove the index; an array of one is declared with a shape, "
            "plgpu.Barrier(num_barriers=1)",
        )
    at = dots[0] if dots else len(entries)
    filler = (slice(None),) * (len(shape) - given)
    return (*entries[:at], *filler, *entries[at + 1 :])


def _entry(entry: Any, dim: int, shape: tuple[int, ...]) -> Any:
    n = shape[dim]
    if isinstance(entry, slice):
        return _from_slice(entry, n)
    if isinstance(entry, _jax.Slice):
        return _from_ds(entry)
    if _jax.is_tracer(entry):
        return _traced(entry)
    if isinstance(entry, list) or _is_array(entry):
        return _constant_array(entry, dim, shape)
    position = expect.index(entry)
    if position is None:
        _refuse(entry)
    if not -n <= position < n:
        raise _out_of_bounds(f"index {position}", dim, shape)
    return position % n


def _out_of_bounds(got: str, dim: int, shape: Sequence[int]) -> errors.OutOfBoundsError:
    n = shape[dim]
    return errors.OutOfBoundsError(
        "an index is out of bounds",
        expected=f"{-n} to {n - 1} in dimension {dim} of shape {tuple(shape)}",
        got=got,
        hint="check the index, or the shape the reference was declared with",
    )


def _is_array(entry: Any) -> bool:
    return isinstance(entry, (np.ndarray, jax.Array)) and entry.ndim > 0


def _constant_array(entry: Any, dim: int, shape: tuple[int, ...]) -> np.ndarray:
    """Returns an array of indices that is known, each of them 0 or more."""
    try:
        array = np.asarray(entry)
    except ValueError:
        _refuse(entry)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        _refuse(entry)
    n, array = shape[dim], _wide(array)
    outside = array[(array < -n) | (array >= n)]
    if outside.size:
        raise _out_of_bounds(f"index {outside[0]} in an array", dim, shape)
    return np.where(array < 0, array + n, array)


def _wide(array: np.ndarray) -> np.ndarray:
    """Indices as int64; those that it does not hold are out of any bounds."""
    if array.dtype == np.uint64:
        array = np.minimum(array, np.uint64(np.iinfo(np.int64).max))
    return array.astype(np.int64)


def _refuse(entry: Any) -> NoReturn:
    if _is_array(entry) and entry.dtype == np.bool_:
        raise errors.UnsupportedError(
            "a reference is indexed with an array of bools",
            expected="integers, slices and arrays of integers",
            got=f"a mask of shape {np.shape(entry)}",
            hint="the number of elements has to be static: "
            "plgpu.load(ref, mask=mask, other=0), plgpu.store(ref, (), x, mask=mask)",
        )
    raise errors.ArgumentTypeError(
        "invalid index of a reference",
        expected="integers, scalars and arrays of integers, slices, and "
        "plgpu.ds(start, size)",
        got=expect.shown(entry),
        hint="convert it to integers first; plgpu.store takes the index before the "
        "value: plgpu.store(ref, index, x)"
        if _is_array(entry) and entry.shape
        else "convert it to an integer first",
    )


def _traced(entry: Any) -> Any:
    if isinstance(entry.aval, _jax.AbstractRef):
        raise errors.UnsupportedError(
            "a reference is indexed with a reference",
            expected="integers, scalars and slices",
            got=f"a reference of shape {tuple(entry.shape)}",
            hint="read the index from it first: ref[index_ref[i]]",
        )
    if not jnp.issubdtype(entry.dtype, jnp.integer):
        _refuse(entry)
    return entry


def _scalar(entry: Any) -> Any:
    if _traced(entry).shape:
        _refuse(entry)
    return entry


def _from_slice(entry: slice, n: int) -> Any:
    bounds = (entry.start, entry.stop)
    if all(b is None for b in (*bounds, entry.step)) and n > 0:
        return _jax.Slice(0, n, 1)
    if any(_jax.is_tracer(b) for b in bounds):
        _refuse_dynamic_size(f"a slice with bounds {entry.start}:{entry.stop}")
    for bound in (*bounds, entry.step):
        if bound is not None and expect.index(bound) is None:
            _refuse(bound)
    stride = _stride(entry.step)
    start, stop, _ = entry.indices(n)
    if stop <= start and n > 0:
        raise errors.ShapeError(
            "a slice of a reference is empty",
            expected=f"a range within 0 to {n}",
            got=f"{entry.start}:{entry.stop}",
            hint="check the bounds of the slice; a reference to a block has its shape",
        )
    size = -(-(stop - start) // stride)
    return _jax.Slice(start, size, stride if size > 1 else 1)


def _from_ds(entry: Any) -> Any:
    stride = _stride(entry.stride)
    size = expect.index(entry.size)
    if size is None:
        _refuse_dynamic_size(expect.shown(entry.size))
    if size < 1:
        raise errors.ShapeError(
            "a slice of a reference is empty",
            expected="a size of 1 or more",
            got=f"ds(start, {size})",
            hint="omit the access where the size is 0: sizes are known when the "
            "kernel is traced",
        )
    if _jax.is_tracer(entry.start):
        return _jax.Slice(_scalar(entry.start), size, stride)
    start = expect.index(entry.start)
    if start is None:
        _refuse(entry.start)
    return _jax.Slice(start, size, stride)


def _stride(given: Any) -> int:
    stride = 1 if given is None else expect.index(given)
    if stride is None:
        _refuse(given)
    if stride < 1:
        raise errors.UnsupportedError(
            "a slice of a reference has a stride that is not positive",
            expected="a stride of 1 or more",
            got=f"stride {stride}",
            hint="index with an array: ref[n - 1 - jnp.arange(n)]",
        )
    return stride


def _refuse_dynamic_size(got: str) -> NoReturn:
    raise errors.UnsupportedError(
        "a slice of a reference has a size that is not static",
        expected="a size that is a Python integer",
        got=got,
        hint=STATIC_SIZE_HINT,
    )

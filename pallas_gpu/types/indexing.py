# SPDX-License-Identifier: Apache-2.0
"""Index expressions of references, checked when they are traced.

Integers, scalars, unit-stride slices and `ds(start, size)` select a part of a
reference. A static integer has to be in bounds; a static range may extend past the
edge, because a TMA copy clips it (the check pass refuses it in reads and writes).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import jax.numpy as jnp

from pallas_gpu import _jax, errors, expect
from pallas_gpu.types import values

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
      stride: distance of the elements; references support 1 alone.

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


def indexer(index: Any, shape: Sequence[int]) -> _jax.NDIndexer:
    """Returns an index expression in the form that JAX records.

    Args:
      index: the index expression.
      shape: shape of the reference or view.

    Raises:
      OutOfBoundsError: a static integer out of bounds, or too many indices.
      UnsupportedError: an array, a stride, a size that is not static, a new axis.
      ArgumentTypeError: an invalid index.
    """
    shape = tuple(shape)
    entries = _padded(index if isinstance(index, tuple) else (index,), shape)
    indices = [_entry(entry, dim, shape) for dim, entry in enumerate(entries)]
    return _jax.indexer(indices, shape)


def selected(step: _jax.NDIndexer) -> tuple[int, ...]:
    """Returns the shape of what an index expression of `indexer` selects."""
    return tuple(i.size for i in step.indices if isinstance(i, _jax.Slice))


def _padded(entries: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[Any, ...]:
    if any(entry is None for entry in entries):
        raise errors.UnsupportedError(
            "a reference is indexed with a new axis",
            expected="integers, scalars and slices",
            got="None (jnp.newaxis)",
            hint="load the value and add the axis to it: ref[...][:, None]",
            where=_jax.where_now(),
        )
    dots = [i for i, entry in enumerate(entries) if entry is ...]
    given = len(entries) - len(dots)
    if given > len(shape) or len(dots) > 1:
        raise errors.OutOfBoundsError(
            "a reference has fewer dimensions than the index",
            expected=f"at most {len(shape)} indices for shape {shape}, and one `...`",
            got=f"{given} indices and {len(dots)} `...`",
            hint="remove the extra indices",
            where=_jax.where_now(),
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
        return _scalar(entry)
    position = expect.index(entry)
    if position is None:
        _refuse(entry)
    if not -n <= position < n:
        raise errors.OutOfBoundsError(
            "an index is out of bounds",
            expected=f"{-n} to {n - 1} in dimension {dim} of shape {shape}",
            got=f"index {position}",
            hint="check the index, or the shape the reference was declared with",
            where=_jax.where_now(),
        )
    return position % n


def _refuse(entry: Any) -> NoReturn:
    shape = getattr(entry, "shape", ())
    if isinstance(entry, list) or (isinstance(shape, tuple) and shape):
        raise errors.UnsupportedError(
            "a reference is indexed with an array",
            expected="integers, scalars and slices",
            got=f"an index of shape {shape}" if shape else expect.shown(entry),
            hint="read one row at a time: `x_ref[index_ref[i]]` in a loop",
            where=_jax.where_now(),
        )
    raise errors.ArgumentTypeError(
        "invalid index of a reference",
        expected="integers, integer scalars, slices and plgpu.ds(start, size)",
        got=expect.shown(entry),
        hint="convert it to an integer first",
        where=_jax.where_now(),
    )


def _scalar(entry: Any) -> Any:
    if isinstance(entry.aval, _jax.AbstractRef):
        raise errors.UnsupportedError(
            "a reference is indexed with a reference",
            expected="integers, scalars and slices",
            got=f"a reference of shape {tuple(entry.shape)}",
            hint="read the index from it first: ref[index_ref[i]]",
            where=_jax.where_now(),
        )
    if entry.shape != () or not jnp.issubdtype(entry.dtype, jnp.integer):
        _refuse(entry)
    return entry


def _from_slice(entry: slice, n: int) -> Any:
    bounds = (entry.start, entry.stop)
    if any(_jax.is_tracer(b) for b in bounds):
        _refuse_dynamic_size(f"a slice with bounds {entry.start}:{entry.stop}")
    for bound in (*bounds, entry.step):
        if bound is not None and expect.index(bound) is None:
            _refuse(bound)
    if entry.step is not None and expect.index(entry.step) != 1:
        _refuse_stride(entry.step)
    start, stop, _ = entry.indices(n)
    if stop <= start and n > 0:
        raise errors.ShapeError(
            "a slice of a reference is empty",
            expected=f"a range within 0 to {n}",
            got=f"{entry.start}:{entry.stop}",
            hint="check the bounds of the slice",
            where=_jax.where_now(),
        )
    return _jax.Slice(start, stop - start, 1)


def _from_ds(entry: Any) -> Any:
    if expect.index(entry.stride) != 1:
        _refuse_stride(entry.stride)
    size = expect.index(entry.size)
    if size is None:
        _refuse_dynamic_size(f"a size of type {type(entry.size).__name__}")
    if size < 1:
        raise errors.ShapeError(
            "a slice of a reference is empty",
            expected="a size of 1 or more",
            got=f"ds(start, {size})",
            hint="omit the access where the size is 0: sizes are known when the "
            "kernel is traced",
            where=_jax.where_now(),
        )
    if _jax.is_tracer(entry.start):
        return _jax.Slice(_scalar(entry.start), size, 1)
    start = expect.index(entry.start)
    if start is None:
        _refuse(entry.start)
    return _jax.Slice(start, size, 1)


def _refuse_stride(stride: Any) -> NoReturn:
    raise errors.UnsupportedError(
        "a slice of a reference has a stride",
        expected="stride 1",
        got=f"stride {stride}",
        hint="load the whole range, or index in a loop",
        where=_jax.where_now(),
    )


def _refuse_dynamic_size(got: str) -> NoReturn:
    raise errors.UnsupportedError(
        "a slice of a reference has a size that is not static",
        expected="a size that is a Python integer",
        got=got,
        hint="loop over parts of a constant size: `plgpu.loop(0, n)` and "
        "`plgpu.ds(8 * i, 8)`",
        where=_jax.where_now(),
    )

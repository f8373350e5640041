# SPDX-License-Identifier: Apache-2.0
"""Copies of blocks by threads, between GMEM and a buffer in SMEM, where TMA cannot."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_gpu import _jax, types
from pallas_gpu.layouts.window import is_contiguous
from pallas_gpu.pipeline.blocks import Stream
from pallas_gpu.primitives import registers
from pallas_gpu.types.elements import stored_bits


def fetch(stream: Stream, indices: Sequence[Any]) -> None:
    """Copies a block from GMEM, by threads; elements outside of the array are 0."""

    def whole() -> None:
        view, held = _in_lines(stream, stream.window(indices))
        held[...] = registers.load(view)

    def part() -> None:
        view, mask = stream.window(indices), _mask(stream, indices)
        stream.held[...] = registers.load(view, mask=mask)

    stream.at_index_map(lambda: _whole_or_part(stream, indices, whole, part))


def flush(stream: Stream, indices: Sequence[Any]) -> None:
    """Copies a block to GMEM, by threads; what is outside is not stored."""

    def whole() -> None:
        view, held = _in_lines(stream, stream.window(indices))
        view[...] = held[...]

    def part() -> None:
        view, mask = stream.window(indices), _mask(stream, indices)
        registers.store(view, (), stream.held[...], mask=mask)

    stream.at_index_map(lambda: _whole_or_part(stream, indices, whole, part))


def _whole_or_part(
    stream: Stream,
    indices: Sequence[Any],
    whole: Callable[[], None],
    part: Callable[[], None],
) -> None:
    """Calls the function for a block inside of the array, or for any block.

    The second is a copy of single elements under a mask. A branch to the first
    pays if that has wider accesses.
    """
    inside = _is_inside(stream, indices)
    if isinstance(inside, bool):
        (whole if inside else part)()
        return
    if not _is_wide(stream, indices):
        part()
        return
    with _jax.trace_without_ref_rules():
        lax.cond(inside, whole, part)


def _is_inside(stream: Stream, indices: Sequence[Any]) -> Any:
    """Returns whether no element of a block is outside of the array: a bool."""
    result: Any = True
    for _, start, n, size, anywhere in _bounded(stream, indices):
        if size > n:
            return False
        result = (start <= n - size) & result
        if anywhere:
            result = (start >= 0) & result
    return result


def _bounded(
    stream: Stream, indices: Sequence[Any]
) -> Iterator[tuple[int, Any, int, int, bool]]:
    """Yields the dimensions of the array in which a block may exceed it.

    For each of them the block's axis, the block's start, the sizes of the array and
    of the block, and whether blocks may start before the array.
    """
    rank, axis = len(stream.sizes), -1
    entries = stream.spec.block_shape or (None,) * rank
    for start, n, size, gone, entry in zip(
        stream.starts(indices),
        stream.ref.shape,
        stream.sizes,
        stream.spec.squeezed(rank),
        entries,
        strict=True,
    ):
        axis += not gone
        anywhere = isinstance(entry, types.Element | types.BoundedSlice)
        if not gone and (anywhere or size != n):
            yield axis, start, n, size, anywhere


def _in_lines(stream: Stream, view: types.RefView) -> tuple[Any, Any]:
    """Returns a block in GMEM and its buffer, both with one axis if possible.

    What is adjacent in memory has wider accesses than rows of odd sizes.
    """
    if len(stream.block_shape) > 1 and _is_line(stream, view):
        return view.reshape(-1), stream.held.reshape(-1)
    return view, stream.held


def _is_line(stream: Stream, view: types.RefView) -> bool:
    """Whether a block is adjacent in memory, in GMEM and in its buffer."""
    window = types.resolve(tuple(types.base_aval(view).shape), view.transforms)
    narrow = stored_bits(stream.ref.dtype) < 8
    if stream.spec.transforms or narrow or window.is_transposed:
        return False
    return is_contiguous(window.array_shape, window.sizes)


def _is_wide(stream: Stream, indices: Sequence[Any]) -> bool:
    """Whether a copy of a whole block has accesses to several elements."""
    entries = stream.spec.block_shape or ()
    if any(isinstance(x, types.Element | types.BoundedSlice) for x in entries):
        return False  # it may start anywhere
    if _is_line(stream, stream.window(indices)):
        return math.prod(stream.sizes) % 2 == 0
    return math.gcd(stream.ref.shape[-1], stream.sizes[-1]) > 1


def _mask(stream: Stream, indices: Sequence[Any]) -> Any:
    """Returns which elements of a block are inside of the array, as bools."""
    result = jnp.ones(stream.block_shape, bool)
    for axis, start, n, _, _ in _bounded(stream, indices):
        places = lax.broadcasted_iota(jnp.int32, stream.block_shape, axis)
        places = places + jnp.int32(start)
        result = result & (places >= 0) & (places < n)
    return result

# SPDX-License-Identifier: Apache-2.0
"""Copies of blocks by threads, between GMEM and a buffer in SMEM, where TMA cannot."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_gpu import _jax, types
from pallas_gpu.entry import control
from pallas_gpu.layouts.window import is_contiguous
from pallas_gpu.pipeline.blocks import Stream
from pallas_gpu.primitives import registers, tma
from pallas_gpu.types.elements import stored_bits

# A buffer in SMEM for a block of each of some arrays.
Held = Mapping[Stream, Any]


def fetch(held: Held, streams: Sequence[Stream], indices: Sequence[Any]) -> None:
    """Copies blocks of inputs at a position from GMEM, and publishes them.

    Elements outside of the array are 0.
    """
    inputs = [stream for stream in streams if stream in held]
    for stream in inputs:
        _copy(stream, held[stream], indices, store=False)
    if inputs:
        tma.commit_smem()


def flush(
    held: Held,
    streams: Sequence[Stream],
    indices: Sequence[Any],
    completes: Callable[[Stream], Any],
) -> None:
    """Stores the blocks of outputs that a step completes; not what is outside.

    The buffer of a block is written by all steps that have it, and may be written by
    the last of them only.

    Args:
      held: the buffers.
      streams: the outputs.
      indices: the position of the step.
      completes: whether the step is the last one that has a stream's block.
    """
    for stream in streams:
        if stream in held:
            store = functools.partial(_copy, stream, held[stream], indices, store=True)
            control.when(completes(stream))(store)


def _copy(stream: Stream, buffer: Any, indices: Sequence[Any], *, store: bool) -> None:
    def whole() -> None:
        view, lines = _in_lines(stream, buffer, stream.window(indices))
        if store:
            view[...] = lines[...]
        else:
            lines[...] = registers.load(view)

    def part() -> None:
        view, mask = stream.window(indices), _mask(stream, indices)
        if store:
            registers.store(view, (), buffer[...], mask=mask)
        else:
            buffer[...] = registers.load(view, mask=mask)

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


def _in_lines(stream: Stream, buffer: Any, view: types.RefView) -> tuple[Any, Any]:
    """Returns a block in GMEM and its buffer, both with one axis if possible.

    What is adjacent in memory has wider accesses than rows of odd sizes.
    """
    if len(stream.block_shape) > 1 and _is_line(stream, view):
        return view.reshape(-1), buffer.reshape(-1)
    return view, buffer


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

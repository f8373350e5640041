# SPDX-License-Identifier: Apache-2.0
"""Windows of images: views of GMEM that TMA copies pixel by pixel (im2col mode)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from pallas_gpu import _jax, arch, errors, expect, types
from pallas_gpu.layouts.gmem.im2col import (
    MAX_CHANNELS,
    MAX_PIXELS,
    Windows,
    require_adjacent,
)
from pallas_gpu.layouts.gmem.line import UNIT_BYTES
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives._engines import Side
from pallas_gpu.primitives.copies import views

__all__ = ["im2col_ref"]

copy_im2col_p = registry.define(
    "copy_im2col",
    "im2col",
    reads=("src",),
    writes=("dst", "barrier"),
    asynchronous=True,
    releases=True,
    feature=arch.Feature.TMA,
)

_WHO = "copy_gmem_to_smem of im2col_ref"


def _pairs(value: Any, what: str) -> tuple[tuple[int, ...], ...]:
    """Accepts a sequence of pairs of sizes."""
    pairs: Any = value if expect.is_sequence(value) else [None]
    if not all(expect.is_sequence(pair) and len(pair) == 2 for pair in pairs):
        raise expect.wrong_type(
            what, "a sequence of pairs", "two sizes for each dimension", value,
            "padding=((1, 1), (1, 1))",
        )  # fmt: skip
    return tuple(tuple(_SIZES(pair, what)) for pair in pairs)


_SIZES = expect.integers(0)


@expect.arguments(window_shape=_SIZES, padding=expect.optional(_pairs))
def im2col_ref(
    ref: types.Ref,
    *,
    window_shape: Sequence[int],
    padding: Sequence[tuple[int, int]] | None = None,
) -> types.Ref:
    """Returns all windows of images in GMEM, as a view that `copy_gmem_to_smem` takes.

    Of images (N, *sizes, C) it has the shape (windows, *window_shape, C), where an
    image has `sizes[i] + sum(padding[i]) - window_shape[i] + 1` windows along each
    dimension. `view.at[rows, *offsets, channels]` is one pixel of each of some windows:
    rows and channels are ranges, offsets are scalars in the window.

    PTX: cp.async.bulk.tensor.im2col, of the copy. Since: sm_90.

    Issued by a warpgroup, or a warp, as the copy, which completes as any other one. The
    destination has two dimensions, a row for each window; of a tiled one all channels
    lie in one tile. Windows and channels behind the last ones are zeros.

    Args:
      ref: all of an array in GMEM, or a reshape of it, of 3 to 5 dimensions, of
        elements of 8 bits or more; C and the channels of a copy are multiples of 16
        bytes. A copy has at most 1024 windows and 256 channels.
      window_shape: sizes of a window.
      padding: zeros before and after each dimension of an image; None: none.

    Raises:
      MemorySpaceError: the reference is not in GMEM.
      ArgumentError: windows that do not fit the images, or no tensor map.
      UnsupportedError: a part of an array.

    Example:
      >>> view = plgpu.im2col_ref(x_gmem, window_shape=(3, 3))
      >>> part = view.at[plgpu.ds(128 * i, 128), dy, dx, plgpu.ds(0, 64)]
      >>> plgpu.copy_gmem_to_smem(part, x_smem, barrier)
    """
    who = "im2col_ref"
    ops.require_space(ref, types.GMEM, who, "the reference")
    ref = views.plain(ref, who)
    images = ops.operand(ref)
    if not all(isinstance(x, types.Reinterpreted) for x in images.transforms):
        raise errors.UnsupportedError(
            f"{who}: the windows of a part of an array",
            expected="all of an array, which may be reshaped",
            got=types.describe(ref),
            hint="take the part of the view: im2col_ref(x, ...).at[rows, 0, 0, :]",
        )
    pairs: Any = ((0, 0),) * len(window_shape) if padding is None else padding
    windows = Windows(tuple(window_shape), tuple(pairs))
    windows.of(tuple(ref.shape))
    bits = types.itemsize_bits(ref.dtype)
    if bits < 8 or ref.shape[-1] * bits // 8 % UNIT_BYTES:
        raise errors.ArgumentError(
            f"{who}: no tensor map describes these channels",
            expected=f"elements of 8 bits or more, in multiples of {UNIT_BYTES} bytes",
            got=types.describe(ref),
            hint="pad the channels with zeros",
        )
    base = types.as_view(images.whole)
    steps = (*base.transforms, *images.transforms, types.Im2ColStep(windows))
    return types.RefView(base.ref, steps)


def split(ref: Any) -> tuple[types.RefView, Windows, tuple[Any, ...]] | None:
    """Returns the images, the windows of them, and the steps that select some.

    None for a reference that is not a part of windows.
    """
    steps = ref.transforms if isinstance(ref, _jax.TransformedRef) else ()
    for i, step in enumerate(steps):
        if isinstance(step, types.Im2ColStep):
            return types.RefView(ref.ref, steps[:i]), step.windows, steps[i + 1 :]
    return None


def require_alone(has_others: bool) -> None:
    """Raises UnsupportedError for an option that these copies do not have."""
    if has_others:
        raise errors.UnsupportedError(
            f"{_WHO}: there is no such copy",
            expected="a barrier; no collective_axes, leader_tracked, oob_mode, "
            "cache_hint and implementation",
            got="one of them, or no barrier",
            hint="pass a barrier, and leave the others out",
        )


def load(
    src: types.RefView,
    windows: Windows,
    steps: tuple[Any, ...],
    dst: types.Ref,
    barrier: Any,
    predicate: Any,
) -> None:
    """Starts a copy of one pixel of each of some windows.

    Args:
      src: the images.
      windows: those of the images.
      steps: which of the windows.
      dst: a row for each window.
      barrier: the operand of a barrier.
      predicate: scalar bool or None.
    """
    images = tuple(src.shape)
    window = types.resolve(windows.of(images), steps)
    rank = len(images)
    row, *offsets, channel = window.starts
    _require_pixels(window, dst)
    for offset, n in zip(offsets, windows.shape, strict=True):
        _require_within(offset, n, "an offset in the window")
    _require_within(row, None, "the first window")
    _require_within(channel, None, "the first channel")
    itemsize = types.itemsize_bits(dst.dtype) // 8
    if isinstance(channel, int) and channel * itemsize % UNIT_BYTES:
        raise _unaligned(channel, itemsize)
    dst = views.plain(dst, _WHO)
    base = types.base_aval(dst)
    if base.transforms:
        side = Side.of(dst)
        require_adjacent(side.layout, side.window)
    start = [_number(row)]
    counts, (low, _) = windows.counts(images), windows.corners
    for count, first in zip(reversed(counts), reversed(low), strict=True):
        flat = start.pop(0)
        start = [_over(flat, count), _plus(_rest(flat, count), first), *start]
    assert len(start) == rank - 1
    operands = {
        "src": src,
        "dst": dst,
        "barrier": barrier,
        "predicate": predicate,
        "start": [*map(_scalar, start), _scalar(_number(channel))],
        "offsets": [_scalar(_number(offset)) for offset in offsets],
    }
    ops.bind(copy_im2col_p, operands, windows=windows)


def _require_pixels(window: Any, dst: Any) -> None:
    """Raises ShapeError unless a part is one pixel of each of some windows."""
    rank, (rows, channels) = len(window.sizes), (window.sizes[0], window.sizes[-1])
    itemsize = types.itemsize_bits(dst.dtype) / 8
    fits = rows <= MAX_PIXELS and channels <= MAX_CHANNELS
    fits &= channels * itemsize % UNIT_BYTES == 0
    if window.axes == (0, rank - 1) and fits:
        return
    raise errors.ShapeError(
        f"{_WHO}: the source is not a pixel of each of some windows",
        expected=f"a range of at most {MAX_PIXELS} windows, a scalar for each of the "
        f"{rank - 2} dimensions of a window, and a range of at most {MAX_CHANNELS} "
        f"channels, a multiple of {UNIT_BYTES} bytes",
        got=f"sizes {window.sizes} along dimensions {window.axes} of "
        f"{window.array_shape}",
        hint="write view.at[plgpu.ds(row, rows), dy, dx, plgpu.ds(0, channels)]",
    )


def _require_within(start: Any, end: int | None, what: str) -> None:
    if isinstance(start, int) and not 0 <= start < (start + 1 if end is None else end):
        raise errors.OutOfBoundsError(
            f"{_WHO}: {what} is out of bounds",
            expected="0 or more" if end is None else f"0 to {end - 1}",
            got=start,
            hint="check the index",
        )


def _unaligned(channel: int, itemsize: int) -> errors.LayoutError:
    return errors.LayoutError(
        f"{_WHO}: the first channel is not at a multiple of {UNIT_BYTES} bytes",
        expected=f"a multiple of {UNIT_BYTES // itemsize}",
        got=channel,
        hint="copy whole groups of channels",
    )


# --- scalars, known or not ------------------------------------------------------------


def _number(start: Any) -> Any:
    """Returns a start as an integer, or as an int32 scalar."""
    if isinstance(start, int):
        return start
    terms = [
        lax.convert_element_type(x, np.int32) if _jax.is_tracer(x) else int(x)
        for x in start.terms
    ]
    return dataclasses.replace(start, terms=tuple(terms)).total(_plus)


def _over(x: Any, n: int) -> Any:
    return x // n if isinstance(x, int) else lax.div(x, np.int32(n))


def _rest(x: Any, n: int) -> Any:
    return x % n if isinstance(x, int) else lax.rem(x, np.int32(n))


def _plus(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    return lax.add(_scalar(a), _scalar(b))


def _scalar(x: Any) -> Any:
    return np.int32(x) if isinstance(x, int) else x

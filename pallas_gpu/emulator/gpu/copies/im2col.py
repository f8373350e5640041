# SPDX-License-Identifier: Apache-2.0
"""Copies of one pixel of each of some windows, as TMA makes them (im2col mode)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pallas_gpu import errors
from pallas_gpu.emulator.engine.memory import Region
from pallas_gpu.emulator.engine.operations.elements import known
from pallas_gpu.emulator.engine.poison import Poisoned
from pallas_gpu.emulator.gpu import cluster, tma
from pallas_gpu.emulator.gpu.machine.cta import Warpgroup
from pallas_gpu.emulator.gpu.mbarrier import Barrier, barrier_of, skipped
from pallas_gpu.layouts.gmem.im2col import Windows
from pallas_gpu.layouts.gmem.line import UNIT_BYTES
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.copies import im2col as primitives


@dataclasses.dataclass(slots=True)
class Load:
    """Pixels on their way to SMEM.

    Attributes:
      src, dst: the images, and a row for each pixel.
      places: for each dimension of the images the index of each element.
      inside: which elements the images have.
      barrier: on which they complete.
    """

    src: Region
    dst: Region
    places: tuple[np.ndarray, ...]
    inside: np.ndarray
    barrier: Barrier
    location: Any

    def advance(self) -> bool:
        """Brings all of them."""
        images = tma.arriving(self.src, self.src.shape, None, self.location)
        held = images.value if isinstance(images, Poisoned) else images
        value: Any = np.where(self.inside, held[self.places], np.zeros((), held.dtype))
        if isinstance(images, Poisoned):
            mask = self.inside & images.mask[self.places]
            if mask.any():
                value = Poisoned(value, mask, images.origin)
        self.dst.store(value)
        self.barrier.complete_bytes(tma.size_bytes(self.dst))
        return True


@registry.register(primitives.copy_im2col_p, registry.RuleKind.EMULATE)
def _copy_im2col(
    wg: Warpgroup, operands: dict[str, Any], windows: Windows, **_: Any
) -> None:
    barrier = barrier_of(operands["barrier"])
    if skipped(operands):
        barrier.arrive(wg.release(), wg.location)
        return
    src, dst = operands["src"], operands["dst"]
    dst.require_inside("the destination of a copy")
    dst.memory.require_aligned(dst.window, "the destination of a copy")
    start = [int(known(x)) for x in operands["start"]]
    offsets = [int(known(x)) for x in operands["offsets"]]
    _require_start(windows, start, offsets, src)
    places, inside = _pixels(windows, src.shape, start, offsets, dst.shape)
    by = (barrier.actor, barrier.phase + 1)
    to_smem = f"the copy from {src.memory.name}"
    wg.access(dst, writes=True, what=to_smem, by=by, hint=cluster.WAIT)
    read = _around(src, places, inside)
    if read is not None:
        what = f"the copy to {dst.memory.name}"
        wg.access(read, writes=False, what=what, by=by, hint=cluster.WAIT)
    barrier.arrive(wg.release(), wg.location, tma.size_bytes(dst))
    load = Load(src, dst, places, inside, barrier, wg.location)
    wg.group.in_flight.submit(load)


def _require_start(
    windows: Windows, start: list[int], offsets: list[int], src: Region
) -> None:
    outside = any(
        not 0 <= offset < n for offset, n in zip(offsets, windows.shape, strict=True)
    )
    low, _ = windows.corners
    first = [a - b for a, b in zip(start[1:-1], low, strict=True)]
    if outside or min(start[0], start[-1], *first) < 0:
        raise errors.OutOfBoundsError(
            f"windows of {src.memory.name} are copied from out of bounds",
            expected=f"a window and a channel of 0 or more, offsets in {windows.shape}",
            got=f"offsets {tuple(offsets)}, image {start[0]}, channel {start[-1]}",
            hint="check the indices",
        )
    if start[-1] * src.dtype.itemsize % UNIT_BYTES:
        raise errors.OutOfBoundsError(
            f"windows of {src.memory.name} are copied from a channel inside a unit",
            expected=f"a multiple of {UNIT_BYTES // src.dtype.itemsize}",
            got=start[-1],
            hint="copy whole groups of channels",
        )


def _pixels(
    windows: Windows,
    images: tuple[int, ...],
    start: list[int],
    offsets: list[int],
    shape: tuple[int, ...],
) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """The indices of a copy's elements in each dimension, and which there are."""
    rows, channels = shape
    counts, (low, _) = windows.counts(images), windows.corners
    first = [n - a for n, a in zip(start[1:-1], low, strict=True)]
    flat = np.ravel_multi_index((0, *first), (1, *counts)) + np.arange(rows)
    image, flat = np.divmod(flat, np.prod(counts))
    found = np.unravel_index(flat, counts)
    pixels = [a + b + offset for a, b, offset in zip(found, low, offsets, strict=True)]
    every = start[-1] + np.arange(channels)
    indices = [x[:, None] for x in (start[0] + image, *pixels)] + [every[None, :]]
    indices = [np.broadcast_to(x, shape) for x in indices]
    inside = np.ones(shape, bool)
    for index, n in zip(indices, images, strict=True):
        inside &= (index >= 0) & (index < n)
    return tuple(np.where(inside, x, 0) for x in indices), inside


def _around(
    src: Region, places: tuple[np.ndarray, ...], inside: np.ndarray
) -> Region | None:
    """The part of the images that the elements of a copy span."""
    if not inside.any():
        return None
    low = [int(x[inside].min()) for x in places]
    high = [int(x[inside].max()) for x in places]
    sizes = [b - a + 1 for a, b in zip(low, high, strict=True)]
    return Region(src.memory, src.window.slice(low, sizes))

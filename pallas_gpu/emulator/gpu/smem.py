# SPDX-License-Identifier: Apache-2.0
"""Shared memory: tiles, and the alignment of copies."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pallas_gpu import errors
from pallas_gpu.emulator.engine.memory import Memory
from pallas_gpu.layouts.gmem.tma_plan import SMEM_ALIGNMENT_BYTES
from pallas_gpu.layouts.window import Window


class SharedArray(Memory):
    """An array in SMEM.

    Attributes:
      tile: size of a tile on each axis.
      place: (visit of a scope, position in it), which identifies the same array in
        other CTAs of the cluster.
    """

    __slots__ = ("_tiled", "place", "tile")

    def __init__(
        self,
        name: str,
        data: np.ndarray,
        written: np.ndarray | None,
        place: Any = None,
        tiling: tuple[int, ...] | None = None,
    ):
        super().__init__(name, data, written)
        self.place = place
        self._tiled = tiling is not None
        tiling = tiling or ()
        self.tile = (1,) * (data.ndim - len(tiling)) + tuple(tiling)

    def mark_written(self, key: tuple[Any, ...], value: Any = True) -> None:
        """Records that elements have a value; a full mask is dropped."""
        if self.written is None:
            return
        self.written[key] = value
        if self.written.all():
            self.written = None

    def unmark_written(self, key: tuple[Any, ...], value: Any) -> None:
        """Records that elements have no value."""
        if self.written is None:
            self.written = np.ones(self.shape, np.bool_)
        self.written[key] &= ~value

    def require_addressable(self, window: Window, verb: str) -> None:
        """Raises LayoutError unless the window consists of whole tiles.

        An address is computed from the start of a tile: a start inside one, known only
        at run time, would silently address other elements on a GPU.
        """
        if not self._tiled or math.prod(window.sizes) <= 1:
            return
        if all(s % t == 0 for s, t in zip(window.starts, self.tile, strict=True)):
            return
        raise errors.LayoutError(
            f"{self.name} is {verb} from inside a tile",
            expected=f"starts that are multiples of {self.tile}, the tiling",
            got=f"starts {window.starts}",
            hint="index whole tiles, or declare the array with smaller tiles",
        )

    def require_aligned(self, window: Window, what: str) -> None:
        """Raises unless the window starts where a tensor copy may start in SMEM.

        A dynamic start would otherwise be a misaligned address.
        """
        index = 0
        for start, size, n in zip(window.starts, self.tile, self.shape, strict=True):
            index = index * (n // size) + start // size
        offset = index * math.prod(self.tile) * self.data.dtype.itemsize
        if offset % SMEM_ALIGNMENT_BYTES == 0:
            return
        raise errors.LayoutError(
            f"{what} does not start where TMA can address SMEM",
            expected=f"a multiple of {SMEM_ALIGNMENT_BYTES} bytes from the start of "
            f"{self.name}",
            got=f"{offset} bytes, the element {tuple(window.starts)}",
            hint="place each part in a separate row of as many bytes",
        )

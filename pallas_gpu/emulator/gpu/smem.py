# SPDX-License-Identifier: Apache-2.0
"""Shared memory: tiles, alignment, and the fence before asynchronous readers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pallas_gpu import errors
from pallas_gpu.emulator.engine import ordering
from pallas_gpu.emulator.engine.memory import Memory, Region
from pallas_gpu.layouts.gmem.tma_plan import SMEM_ALIGNMENT_BYTES
from pallas_gpu.layouts.window import Window


class SharedArray(Memory):
    """An array in SMEM.

    Attributes:
      tile: size of a tile on each axis.
      place: (visit of a scope, position in it), which identifies the same array in
        other CTAs of the cluster.
      unfenced: writes by threads that no `commit_smem` has followed:
        (thread's actor, box) -> (line, thread's label).
    """

    __slots__ = ("_tiled", "place", "tile", "unfenced")

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
        self.unfenced: dict[tuple[int, ordering.Box], tuple[str | None, str]] = {}

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

    def stored(self, region: Region, actor: int, who: str, where: str | None) -> None:
        """Records a write that needs a fence before asynchronous work reads it."""
        self.unfenced[actor, region.box()] = (where, who)

    def fence(self, actors: set[int]) -> None:
        """Makes writes of threads visible to asynchronous work."""
        for key in [key for key in self.unfenced if key[0] in actors]:
            del self.unfenced[key]

    def forget_unfenced(self, box: ordering.Box) -> None:
        """Forgets writes that are overwritten."""
        for key in [key for key in self.unfenced if ordering.overlap(key[1], box)]:
            del self.unfenced[key]

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

    def require_fenced(self, window: Window, reader: str) -> None:
        """Raises RaceError when threads wrote a part and no fence has followed.

        Args:
          window: the part.
          reader: the asynchronous work that is about to read, for the message.
        """
        if not self.unfenced:
            return
        box = window.box()
        for (_, written), (where, who) in self.unfenced.items():
            if ordering.overlap(written, box):
                raise errors.RaceError(
                    f"{reader} reads {self.name}, written at {where} and not fenced",
                    expected="commit_smem() by the writing warpgroup between the write "
                    f"and {reader}",
                    got=f"{who} wrote elements {ordering.box_text(written)} without "
                    "one",
                    hint="call commit_smem()",
                )

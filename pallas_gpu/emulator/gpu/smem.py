# SPDX-License-Identifier: Apache-2.0
"""Shared memory: tiles, and the alignment of copies."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import numpy as np

from pallas_gpu import errors, types
from pallas_gpu.emulator.engine.execution import report
from pallas_gpu.emulator.engine.memory import Memory
from pallas_gpu.emulator.engine.reinterpreted import ReinterpretedArray
from pallas_gpu.layouts import SmemLayout
from pallas_gpu.layouts.smem.window import is_addressable, require_copy_start
from pallas_gpu.layouts.window import Window


class SharedArray(Memory):
    """An array in SMEM.

    Attributes:
      layout: how it is stored, as declared.
      tile: size of a tile on each axis.
      owner: the CTA.
      place: (visit of a scope, position in it), which identifies the same array in
        other CTAs of the cluster.
    """

    __slots__ = (
        "_addressable",
        "_aligned",
        "layout",
        "owner",
        "place",
        "tile",
    )

    def __init__(
        self,
        name: str,
        data: np.ndarray,
        written: np.ndarray | None,
        place: Any,
        layout: SmemLayout,
        owner: Any,
    ):
        super().__init__(name, data, written)
        self.admits_poison = True
        self._describe(place, layout, owner)

    def _describe(self, place: Any, layout: SmemLayout, owner: Any) -> None:
        self.owner = owner
        self.place = place
        self.layout = layout
        # Starts that have passed these checks, which take time.
        self._addressable: set[tuple[int, ...]] = set()
        self._aligned: set[tuple[int, ...]] = set()
        self.tile = (1,) * (len(layout.shape) - len(layout.tile)) + layout.tile

    @property
    def identity(self) -> Hashable:
        return self.owner.name, self.place

    def mark_written(self, key: tuple[Any, ...], value: Any = True) -> None:
        """Records that elements have a value; a full mask is dropped."""
        if self.written is None:
            return
        self.written[key] = value
        if self.written.all():
            self.written = None

    def reinterpreted(self, shape: tuple[int, ...], dtype: Any) -> Memory:
        """Returns the array in another shape, or as another type if one is given."""
        return ReinterpretedShared(self, shape, dtype)

    def require_addressable(self, window: Window, verb: str) -> None:
        """Raises LayoutError unless the window starts with a tile.

        An address is computed from the start of a tile: a start inside one, known only
        at run time, would silently address other elements on a GPU.
        """
        if self.layout.is_plain or window.starts in self._addressable:
            return
        if math.prod(window.sizes) <= 1:
            return
        if is_addressable(self.layout, window.starts):
            self._addressable.add(window.starts)
            return
        error = errors.LayoutError(
            f"{self.name} is {verb} from inside a tile",
            expected=f"starts that are multiples of {self.tile}, the tiling, and of "
            f"the {self.layout.swizzle}-byte swizzle's pattern",
            got=f"starts {window.starts}",
            hint="index whole tiles, or declare the array with smaller tiles",
        )
        report(error.about(buffer=self.name))

    def require_aligned(self, window: Window, what: str) -> None:
        """Raises unless the window starts where a tensor copy may start in SMEM.

        A dynamic start would otherwise be a misaligned address.
        """
        if window.starts not in self._aligned:
            require_copy_start(self.layout, window, what)
            self._aligned.add(window.starts)


class ReinterpretedShared(ReinterpretedArray, SharedArray):
    """An array in SMEM in another shape or as another type."""

    def __init__(self, base: SharedArray, shape: tuple[int, ...], dtype: Any):
        ReinterpretedArray.__init__(self, base, shape, dtype)
        own = base.layout.itemsize_bits
        bits = own if dtype is None else types.itemsize_bits(dtype)
        self._describe(base.place, base.layout.reinterpreted(shape, bits), base.owner)

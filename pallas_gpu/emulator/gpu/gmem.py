# SPDX-License-Identifier: Apache-2.0
"""Global memory: arrays that all CTAs of a device share."""

from __future__ import annotations

from typing import Any

from pallas_gpu.emulator.engine.memory import Memory
from pallas_gpu.emulator.engine.ordering import Fence, Viewer


class GlobalArray(Memory):
    """An array in GMEM, as accessed by one cluster.

    The views of all clusters share elements, mask and history.
    """

    __slots__ = ()

    fence = Fence.GMEM

    def at(self, index: tuple[int, ...]) -> GlobalArray:
        """Returns the part at leading indices, as a view with its own history.

        Different indices are different memory, and a launch uses no other parts.
        """
        if not index:
            return self
        # The ellipsis keeps a view also where all axes are indexed.
        key: Any = (*index, ...)
        written = None if self.written is None else self.written[key]
        return GlobalArray(self.name, self.data[key], written, self.read_only)

    def seen_by(self, viewer: Viewer) -> GlobalArray:
        """Returns the array as accessed by a cluster."""
        if self.read_only:
            return self
        view = GlobalArray(self.name, self.data, self.written)
        view.history, view.viewer = self.history, viewer
        return view

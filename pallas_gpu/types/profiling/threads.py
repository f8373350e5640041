# SPDX-License-Identifier: Apache-2.0
"""Groups of threads, as bodies of the Mosaic level name them."""

from __future__ import annotations

import enum


class ThreadSubset(enum.IntEnum):
    """Threads of a block, of which one is chosen, or that meet."""

    WARP = enum.auto()
    WARPGROUP = enum.auto()
    BLOCK = enum.auto()

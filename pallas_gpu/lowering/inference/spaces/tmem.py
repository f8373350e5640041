# SPDX-License-Identifier: Apache-2.0
"""The layout of an array in TMEM, which its declaration gives, and what its uses need.

The check pass has compared the layout with what instructions support.
"""

from __future__ import annotations

from pallas_gpu import errors
from pallas_gpu.layouts import TmemLayout, transfers
from pallas_gpu.layouts.registers.placement import Placement
from pallas_gpu.lowering.inference.network import Array, Use


def storages(array: Array) -> list[TmemLayout]:
    """The one layout of an array."""
    return [array.base.given]


def refusal(use: Use, storage: TmemLayout) -> errors.LayoutError | None:
    """The error for a use of a part that may start inside a tile, or None."""
    tile, known = storage.base_tile_shape[1], use.part.window.multiples[1]
    if known % tile == 0:
        return None
    return errors.LayoutError(
        f"a part of an array in TMEM may start inside a tile of {tile} columns",
        expected=f"a start known to be a multiple of {tile}, in {storage}",
        got=f"a column known to be a multiple of {known}",
        hint="write the start as a product with the columns of a tile, or promise it "
        "with plgpu.multiple_of",
    )


# --- loads and stores -----------------------------------------------------------------


def carries(use: Use, storage: TmemLayout, placement: Placement) -> bool:
    """Whether an instruction transfers the part between registers and its array."""
    return transfers(placement, storage, use.part.bits)

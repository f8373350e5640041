# SPDX-License-Identifier: Apache-2.0
"""Windows of images: their shape, their number, and what TMA can address of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from pallas_gpu.errors import ArgumentError, LayoutError
from pallas_gpu.layouts.smem.layout import SmemLayout
from pallas_gpu.layouts.smem.window import contiguous_layout
from pallas_gpu.layouts.window import Window

# PTX ISA, "im2col mode": pixels of a column, channels of a pixel.
MAX_PIXELS = 1024
MAX_CHANNELS = 256
# The offsets in a window, and the corners of the box of windows, share 16 bits.
_OFFSET_BITS = 16


@dataclasses.dataclass(frozen=True)
class Windows:
    """All windows of images (N, *sizes, C), padded with zeros.

    Args:
      shape: of a window.
      padding: zeros before and after each dimension.

    Raises:
      ArgumentError: windows that a tensor map does not describe.

      >>> Windows((3, 3), ((1, 1), (1, 1))).of((2, 8, 8, 64))
      (128, 3, 3, 64)
    """

    shape: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        rank = len(self.shape)
        if not 1 <= rank <= 3 or len(self.padding) != rank:
            raise ArgumentError(
                "im2col_ref: windows of this rank do not exist",
                expected="1 to 3 dimensions, and a pair of paddings for each",
                got=f"window_shape={self.shape}, padding={self.padding}",
                hint="reshape the images, or drop a dimension",
            )
        most = 1 << _OFFSET_BITS // rank
        for axis, (n, (low, high)) in enumerate(
            zip(self.shape, self.padding, strict=True)
        ):
            least_high = max(0, n - 1 - most // 2)
            fits = 1 <= n <= most and 0 <= low <= most // 2
            if not fits or not least_high <= high <= n - 2 + most // 2:
                raise ArgumentError(
                    f"im2col_ref: no tensor map describes dimension {axis} of the "
                    "windows",
                    expected=f"a window of 1 to {most}, padding of 0 to {most // 2} "
                    f"before and {least_high} to {n - 2 + most // 2} after it",
                    got=f"a window of {n}, padding {(low, high)}",
                    hint="pad the images themselves, or use smaller windows",
                )

    @property
    def corners(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Where the first window starts, and the last one from the image's end."""
        low = tuple(-low for low, _ in self.padding)
        pairs = zip(self.shape, self.padding, strict=True)
        return low, tuple(high - n + 1 for n, (_, high) in pairs)

    def counts(self, images: Sequence[int]) -> tuple[int, ...]:
        """Windows of an image along each dimension.

        Raises:
          ArgumentError: there are none.
        """
        if len(images) != len(self.shape) + 2:
            raise ArgumentError(
                "im2col_ref: the array does not consist of such images",
                expected=f"{len(self.shape) + 2} dimensions: (N, *sizes, C)",
                got=f"shape {tuple(images)}",
                hint="give window_shape an entry for each dimension of an image",
            )
        low, high = self.corners
        found = tuple(
            n + b - a for n, a, b in zip(images[1:-1], low, high, strict=True)
        )
        if min(found) < 1:
            raise ArgumentError(
                "im2col_ref: an image has no window",
                expected="windows that fit into the padded image",
                got=f"windows {self.shape} of images {tuple(images[1:-1])}, padding "
                f"{self.padding}",
                hint="pad the images more, or use smaller windows",
            )
        return found

    def of(self, images: Sequence[int]) -> tuple[int, ...]:
        """Shape of the array of all windows."""
        count = images[0] * math.prod(self.counts(images))
        return (count, *self.shape, images[-1])


def require_adjacent(layout: SmemLayout, window: Window) -> None:
    """Raises LayoutError unless TMA writes pixels to a part of SMEM, row after row."""
    found = contiguous_layout(layout, window)
    rows, channels = window.sizes[-2:]
    tile = found.tile
    if tile and (len(tile) != 2 or tile[1] != channels) and rows > 1:
        raise LayoutError(
            "the pixels of a column are not adjacent in SMEM",
            expected=f"no tiling, or tiles of {channels} columns: all channels of a "
            "pixel in a tile",
            got=layout.description,
            hint="copy the channels of one tile at a time, to an array of its own",
        )

# SPDX-License-Identifier: Apache-2.0
"""The least scratch of operations that exchange data between warps in any layout."""

from __future__ import annotations

import math

# Rounds that an operation may take, each of which is emitted: with 64 bytes those of an
# array of 32 KiB. Code of more takes tens of seconds to emit, and ptxas far longer.
MOST_ROUNDS = 512
# A scatter takes rounds of its updates in each round of the array; they are short.
_MOST_SCATTER_ROUNDS = 2 * MOST_ROUNDS

# An image of data on its way, which is a multiple of this: one round moves as much.
IMAGE_BYTES = 16
# A scatter has a queue beside the image: 16 updates of a byte, with their positions.
SCATTER_BYTES = 96


def in_rounds(data_bytes: int) -> int:
    """The least scratch for data that goes through it in rounds."""
    granules = -(-data_bytes // (MOST_ROUNDS * IMAGE_BYTES))
    return max(granules, 1) * IMAGE_BYTES


def of_scatter(image_bytes: int, queue_bytes: int) -> int:
    """The least scratch of a scatter, a quarter of it for the queue of updates."""
    square = image_bytes * queue_bytes * 16 // (3 * _MOST_SCATTER_ROUNDS)
    granules = -(-math.isqrt(square) // IMAGE_BYTES)
    return max(SCATTER_BYTES, granules * IMAGE_BYTES)

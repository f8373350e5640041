# SPDX-License-Identifier: Apache-2.0
"""The least scratch of operations that exchange data between warps in any layout."""

from __future__ import annotations

# An image of data on its way, which is a multiple of this: one round moves as much.
IMAGE_BYTES = 16
# A scatter has a queue beside the image: 16 updates of a byte, with their positions.
SCATTER_BYTES = 96

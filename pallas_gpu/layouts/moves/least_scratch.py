# SPDX-License-Identifier: Apache-2.0
"""The least scratch of operations that exchange data between warps in any layout."""

from __future__ import annotations

# Rounds of an exchange between two layouts, each of which is emitted: code of more
# takes tens of seconds to emit, and ptxas far longer.
MOST_ROUNDS = 512

# An image of data on its way is a multiple of this; its rounds may be a loop.
IMAGE_BYTES = 16
# A scatter has a queue beside the image: 16 updates of a byte, with their positions.
SCATTER_BYTES = 96

# SPDX-License-Identifier: Apache-2.0
"""The hash of random numbers."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gpu.entry.expand import Composite, composite

# J. Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011): Threefry-2x32
# with 20 rounds. The rotations alternate; after four rounds a part of the key is added.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_GROUPS = 5


@composite("threefry2x32")
def _threefry(composite: Composite, *operands: Any) -> tuple[Any, Any]:
    shape = composite.out_avals[0].shape
    first, second, a, b = (
        x if x.shape in ((), shape) else jnp.broadcast_to(x, shape) for x in operands
    )
    parts = (first, second, first ^ second ^ np.uint32(_PARITY))
    a, b = a + first, b + second
    for group in range(_GROUPS):
        for distance in _ROTATIONS[group % 2]:
            a = a + b
            b = a ^ _rotated(b, distance)
        a = a + parts[(group + 1) % 3]
        b = b + parts[(group + 2) % 3] + np.uint32(group + 1)
    return a, b


def _rotated(x: Any, distance: int) -> Any:
    left = lax.shift_left(x, jnp.full_like(x, distance))
    return left | lax.shift_right_logical(x, jnp.full_like(x, 32 - distance))

# SPDX-License-Identifier: Apache-2.0
"""The scratch in SMEM without which no code for a body exists, whatever the layouts.

More may be necessary in the layouts that the compiler finds; it reports that itself.
"""

from __future__ import annotations

import math

from pallas_gpu import _jax, types
from pallas_gpu.layouts.moves.least_scratch import IMAGE_BYTES, SCATTER_BYTES
from pallas_gpu.primitives.positions import gather_positions_p, scatter_positions_p
from pallas_gpu.types.mesh import WARPGROUP_THREADS

_WARPS = 4
# The least width in which elements are combined.
_COMBINED_BITS = 32
_REDUCTIONS = (
    *("reduce_sum", "reduce_prod", "reduce_max", "reduce_min"),
    *("reduce_and", "reduce_or", "reduce_xor"),
)


def least_scratch_bytes(eqn: _jax.JaxprEqn) -> int:
    """Returns the least scratch of a warpgroup for an equation."""
    if eqn.primitive is gather_positions_p:
        return IMAGE_BYTES
    if eqn.primitive is scatter_positions_p:
        return SCATTER_BYTES
    if eqn.primitive.name == "rev":
        return IMAGE_BYTES if eqn.params["dimensions"] else 0
    if eqn.primitive.name not in _REDUCTIONS:
        return 0
    aval = eqn.invars[0].aval
    # All warps may have the same elements if there are fewer.
    few = math.prod(aval.shape) < WARPGROUP_THREADS
    if few or len(eqn.params["axes"]) < len(aval.shape):
        return 0
    # Each warp passes on one element.
    return _WARPS * max(types.itemsize_bits(aval.dtype), _COMBINED_BITS) // 8

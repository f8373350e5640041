# SPDX-License-Identifier: Apache-2.0
"""The primitive of `warp_map`: a region that each warp executes independently."""

from __future__ import annotations

from pallas_gpu import _jax
from pallas_gpu.primitives import _registry as registry

WARPS = 4  # of a warpgroup (PTX ISA, "warpgroup")

# The inputs of its `jaxpr` are the captured values, then the warp's index; no results.
# `axis_name` is the name of the axis of warps in it, None if it has none.
warp_map_p = registry.define("warp_map", "warp", by_warp=False)
_jax.check_types_under_axes(
    warp_map_p,
    lambda params: [(name, WARPS)] if (name := params["axis_name"]) else [],
)

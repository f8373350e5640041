# SPDX-License-Identifier: Apache-2.0
"""The primitive of `warp_map`: a region that each warp executes independently."""

from __future__ import annotations

from pallas_gpu.primitives import _registry as registry

WARPS = 4  # of a warpgroup (PTX ISA, "warpgroup")

# The inputs of its `jaxpr` are the captured values, then the warp's index; no results.
warp_map_p = registry.define("warp_map", "warp")

# SPDX-License-Identifier: Apache-2.0
"""Regions that each warp of a warpgroup runs by itself: the primitive of `warp_map`."""

from __future__ import annotations

from pallas_gpu.primitives import _registry as registry

WARPS = 4  # of a warpgroup (PTX ISA, "warpgroup")

# Its `jaxpr` has as inputs what it captured, then the warp's number; no results.
warp_map_p = registry.define("warp_map", "warp")

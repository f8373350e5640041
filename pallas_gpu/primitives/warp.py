# SPDX-License-Identifier: Apache-2.0
"""Regions that each warp of a warpgroup runs by itself: the primitive of `warp_map`."""

from __future__ import annotations

from typing import Any

from pallas_gpu import _jax
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import mbarrier, registers, tma

WARPS = 4  # of a warpgroup (PTX ISA, "warpgroup")

warp_map_p = registry.define("warp_map", "warp", multiple_results=True)

# Operations of ours that a single warp can issue. `load` is here for single elements.
IN_WARP: frozenset[Any] = frozenset(
    {
        mbarrier.barrier_arrive_p,
        mbarrier.barrier_wait_p,
        registers.load_p,
        tma.copy_gmem_to_smem_p,
        tma.copy_smem_to_gmem_p,
        tma.commit_group_p,
        tma.wait_smem_to_gmem_p,
        tma.commit_smem_p,
    }
)


@warp_map_p.def_effectful_abstract_eval
def _warp_map_type(*captured: Any, jaxpr: _jax.Jaxpr):
    """No results: `jaxpr` takes what it captured, then the warp's number."""
    return [], {registry.KERNEL_EFFECT}

# SPDX-License-Identifier: Apache-2.0
"""A machine without a program, for tests of its units."""

from __future__ import annotations

from pallas_gpu.lockstep.engine import Strand
from pallas_gpu.lockstep.launch import WARPGROUP_WARPS, Cluster, Launch, Shape


def cluster(ctas: int = 1, warpgroups: int = 1, smem_bytes: int = 4096) -> Cluster:
    """A cluster whose blocks run nothing."""
    shape = Shape((ctas, 1, 1), (ctas, 1, 1), (128 * warpgroups, 1, 1), smem_bytes)
    return Cluster(Launch([], {}, is_early=False), shape, (0, 0, 0))


def strands(of: Cluster, warps: int = WARPGROUP_WARPS) -> list[Strand]:
    """Strands of some warps each, for all blocks."""
    found = []
    for cta in of.ctas:
        for start in range(0, cta.threads // 32, warps):
            found.append(Strand(cta, range(start, start + warps), 0))
    return found

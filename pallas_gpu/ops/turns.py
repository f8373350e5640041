# SPDX-License-Identifier: Apache-2.0
"""The number of persistent blocks: no more than take the same number of turns."""

from __future__ import annotations

import math

import pallas_gpu as plgpu
from pallas_gpu import arch

_SMS = arch.SM_90A.sm_count


def blocks(plane: tuple[int, ...], cluster_size: int) -> int:
    """Returns the blocks, one per SM, that loop over a plane of tiles of clusters.

    Blocks beyond these would save no turn. Without them fewer SMs take power, and the
    tiles of a turn form a rectangle more often, whose operands the L2 holds once.
    """
    clusters = max(math.prod(plane), 1)
    turns = plgpu.cdiv(clusters, _SMS // cluster_size)
    return plgpu.cdiv(clusters, turns) * cluster_size

# SPDX-License-Identifier: Apache-2.0
"""A file per family: its lane, warpgroup, infer and expand rules together.

Importing this package registers all of them.
"""

from pallas_gpu.lowering.expansion import elementwise
from pallas_gpu.lowering.families import (
    control,
    grid,
    mbarrier,
    memory,
    reductions,
    registers,
    scoped,
    shapes,
    tcgen05,
    tma,
    tmem,
    warp,
    wgmma,
)

__all__ = [
    "control",
    "elementwise",
    "grid",
    "mbarrier",
    "memory",
    "reductions",
    "registers",
    "scoped",
    "shapes",
    "tcgen05",
    "tma",
    "tmem",
    "warp",
    "wgmma",
]

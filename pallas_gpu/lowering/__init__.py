# SPDX-License-Identifier: Apache-2.0
"""From a jaxpr over references to Mosaic GPU MLIR; importing it registers the rules."""

from pallas_gpu.lowering import (
    control,
    grid,
    mbarrier,
    registers,
    scoped,
    tma,
    warp,
    warpgroup,
)
from pallas_gpu.lowering.launch import LoweredKernel, lower
from pallas_gpu.lowering.lax import elementwise, shapes

__all__ = [
    "LoweredKernel",
    "control",
    "elementwise",
    "grid",
    "lower",
    "mbarrier",
    "registers",
    "scoped",
    "shapes",
    "tma",
    "warp",
    "warpgroup",
]

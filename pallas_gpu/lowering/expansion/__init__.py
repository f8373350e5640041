# SPDX-License-Identifier: Apache-2.0
"""From the warpgroup-level module to the code of a thread, by mosaic's emitters."""

from pallas_gpu.lowering.expansion import (
    control,
    elementwise,
    memory,
    registers,
    shapes,
    tma,
    wgmma,
)
from pallas_gpu.lowering.expansion.expand import expand

__all__ = [
    "control",
    "elementwise",
    "expand",
    "memory",
    "registers",
    "shapes",
    "tma",
    "wgmma",
]

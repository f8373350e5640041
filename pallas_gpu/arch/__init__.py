# SPDX-License-Identifier: Apache-2.0
"""Targets: what hardware offers to a kernel, and which features it has.

`target.py` has what any target says of itself, and each machine a file of its own.
"""

from pallas_gpu.arch.nvidia import (
    DEFAULT_TARGET,
    SM_90A,
    SM_100A,
    TARGETS,
    Feature,
    GpuTarget,
    target,
    target_of_capability,
)
from pallas_gpu.arch.target import Target

__all__ = [
    "DEFAULT_TARGET",
    "SM_90A",
    "SM_100A",
    "TARGETS",
    "Feature",
    "GpuTarget",
    "Target",
    "target",
    "target_of_capability",
]

# SPDX-License-Identifier: Apache-2.0
"""Targets: the resources and the features of the hardware.

`target.py` has the interface of all targets; each machine has a file of its own.
"""

from pallas_gpu.arch.nvidia import (
    DEFAULT_TARGET,
    SM_90A,
    SM_100A,
    SM_103A,
    STATIC_SMEM_BYTES,
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
    "SM_103A",
    "STATIC_SMEM_BYTES",
    "TARGETS",
    "Feature",
    "GpuTarget",
    "Target",
    "target",
    "target_of_capability",
]


def __dir__() -> list[str]:
    return sorted(__all__)

# SPDX-License-Identifier: Apache-2.0
"""The memory spaces: one object each, public as `plgpu.SMEM` and `MemorySpace.SMEM`."""

from __future__ import annotations

from pallas_gpu.types.spaces.gmem import Gmem
from pallas_gpu.types.spaces.registers import Regs
from pallas_gpu.types.spaces.resource import Resource
from pallas_gpu.types.spaces.smem import Smem
from pallas_gpu.types.spaces.tmem import Tmem

GMEM = Gmem()
SMEM = Smem()
TMEM = Tmem()
REGS = Regs()

Resource.of_captured_refs = GMEM

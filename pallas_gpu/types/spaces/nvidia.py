# SPDX-License-Identifier: Apache-2.0
"""The memory spaces: one object each, public as `plgpu.SMEM` and `MemorySpace.SMEM`."""

from __future__ import annotations

from pallas_gpu.types.refs import SPACES_OF_JAX
from pallas_gpu.types.spaces.gmem import Gmem
from pallas_gpu.types.spaces.registers import Regs
from pallas_gpu.types.spaces.smem import Smem
from pallas_gpu.types.spaces.tmem import Tmem

GMEM = Gmem()
SMEM = Smem()
TMEM = Tmem()
REGS = Regs()
GMEM.also_named("ANY")
SMEM.also_named("DEFAULT")

# A `jax.Ref`, which a kernel closes over, has none.
SPACES_OF_JAX.update(
    none=GMEM, default=SMEM, smem=SMEM, vmem=SMEM, any=GMEM, gmem=GMEM, hbm=GMEM
)

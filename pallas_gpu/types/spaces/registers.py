# SPDX-License-Identifier: Apache-2.0
"""Registers, as the space of accumulators."""

from __future__ import annotations

import math
from typing import Any

from pallas_gpu import arch, errors
from pallas_gpu.types.mesh import WARPGROUP_THREADS, Mesh
from pallas_gpu.types.spaces.memory_space import MemorySpace, ScratchType
from pallas_gpu.types.transforms import itemsize_bits

REGISTER_BITS = 32


class Regs(MemorySpace):
    """Registers of one warpgroup; only accumulators live there as references.

    `plgpu.ACC(shape, dtype)` declares one. No scope allocates other arrays in them.

    Args:
      shape: positive static sizes.
      dtype: element type.
    """

    name = "REGS"
    unit = "registers"
    per_warpgroup = True
    undrawn = "an accumulator has Layout.WGMMA"
    declared_by = "declare an accumulator with plgpu.ACC(shape, dtype)"

    def size(self, aval: Any) -> int:
        bits = math.prod(aval.shape) * itemsize_bits(aval.dtype)
        return -(-bits // (REGISTER_BITS * WARPGROUP_THREADS))

    def budget(self, target: arch.GpuTarget) -> int:
        # No kernel is refused for it: ptxas spills what does not fit.
        return target.max_registers_per_thread

    def check_scope(self, declaration: ScratchType, mesh: Mesh) -> None:
        raise errors.UnsupportedError(
            f"scratch memory in {self.name} is not supported",
            expected="an array in GMEM, SMEM or TMEM, an accumulator or a barrier",
            got=self.describe(declaration, declaration.shape),
            hint="declare an accumulator with plgpu.ACC, or keep values in variables",
        )

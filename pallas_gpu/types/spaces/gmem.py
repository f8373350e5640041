# SPDX-License-Identifier: Apache-2.0
"""Global memory."""

from __future__ import annotations

import math
from typing import Any

from pallas_gpu import arch
from pallas_gpu.types.mesh import Mesh
from pallas_gpu.types.spaces.memory_space import MemorySpace, ScratchType
from pallas_gpu.types.transforms import itemsize_bits


class Gmem(MemorySpace):
    """Global memory: arguments and results of a kernel, row-major.

    PTX: .global. Since: sm_90. As `memory_space` of a `BlockSpec` it leaves the array
    where it is. No scope of a kernel allocates arrays in it.

    Args:
      shape: positive static sizes.
      dtype: element type.

    Raises:
      UnsupportedError: the declaration is used as scratch memory.
    """

    name = "GMEM"
    unit = "bytes"
    has_addresses = True
    declared_by = "pass an argument or a result of the kernel"

    def size(self, aval: Any) -> int:
        return -(-math.prod(aval.shape) * itemsize_bits(aval.dtype) // 8)

    def budget(self, target: arch.GpuTarget) -> int:
        return target.memory_bytes

    def check_scope(self, declaration: ScratchType, mesh: Mesh) -> None:
        raise self.refusal(declaration, "pass GMEM scratch as an additional output")

# SPDX-License-Identifier: Apache-2.0
"""What checks know of the kernel around an operation."""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_gpu.arch import tpu
from pallas_gpu.program.facts import Starts
from pallas_gpu.program.nodes import Access
from pallas_gpu.sparsecore.types import CompilerParams


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel that is checked.

    Attributes:
      mesh: its mesh, with the sizes of the chip.
      params: the compiler parameters.
      chip: the chip that it is traced for.
      starts: what is known of the parts that it accesses.
    """

    name: str
    mesh: Any
    params: CompilerParams
    chip: tpu.TpuTarget
    starts: Starts

    @property
    def is_vector(self) -> bool:
        """Whether vector subcores run it."""
        return self.mesh.is_vector

    def tiling_of(self, access: Access) -> str:
        """Returns the tiling of the array that is accessed."""
        return getattr(access.buffer.aval, "tiling", None) or self.params.tiling

    @property
    def subcore(self) -> str:
        """What runs it, in messages."""
        return f"a {'vector' if self.is_vector else 'scalar'} subcore"

# SPDX-License-Identifier: Apache-2.0
"""Kernels on the Mosaic level's names, which take the module that has them.

That is `pallas_gpu.mosaic` or `jax.experimental.mosaic.gpu`: they run with both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType

from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith


@contextlib.contextmanager
def emitting() -> Iterator[None]:
    """A context for `as_gpu_kernel`: upstream emits the body there."""
    with mlir.make_ir_context(), ir.Location.unknown():
        yield


class Steps:
    """Numbers in a body whose ring has `stages` slots.

    Attributes:
      mgpu: the module with the names of the Mosaic level.
    """

    mgpu: ModuleType
    stages: int

    def index(self, value: int) -> ir.Value:
        """Returns a constant index."""
        return self.mgpu.c(value, ir.IndexType.get())

    def slot(self, step: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Returns the slot of a step, and whether its round is odd."""
        stages, i1 = self.index(self.stages), ir.IntegerType.get_signless(1)
        round_ = arith.index_cast(
            ir.IntegerType.get_signless(32), arith.divui(step, stages)
        )
        return arith.remui(step, stages), arith.trunci(i1, round_)

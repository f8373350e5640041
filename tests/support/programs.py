# SPDX-License-Identifier: Apache-2.0
"""Small kernels and the results that they must give, for runs in lockstep."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.mosaic.gmem import GmemView
from pallas_gpu.mosaic.module import KernelBuilder, LaunchSpec
from tests.support.finished import finished
from tests.support.lockstep import machine as lockstep


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A body on GMEM views, and the arrays that it must store.

    Attributes:
      emit: takes the builder and a view for each operand and result.
      operands: the arrays it loads.
      expected: the arrays it stores.
      tolerance: relative, and absolute around zero; 0 for equality. NaN equals NaN.
      smem_bytes: shared memory that it uses.
    """

    emit: Callable[..., None]
    operands: Sequence[np.ndarray]
    expected: Sequence[np.ndarray]
    tolerance: float = 0.0
    smem_bytes: int = 0

    def module(self) -> ir.Module:
        """Emits the kernel."""
        arrays = [*self.operands, *self.expected]
        spec = LaunchSpec("kernel", num_buffers=len(arrays), smem_bytes=self.smem_bytes)
        with KernelBuilder(spec) as kb:
            views = [
                GmemView.whole(kb.buffers[i], i, x.shape, x.dtype)
                for i, x in enumerate(arrays)
            ]
            self.emit(kb, *views)
        return finished(kb)

    def results(self, module: ir.Module) -> list[np.ndarray]:
        """Runs the module of this program."""
        return lockstep.run_module(module, self.operands, self.expected)

    def is_right(self, results: Sequence[np.ndarray]) -> bool:
        """Whether results are those expected."""
        pairs = zip(results, self.expected, strict=True)
        return all(same(x, y, self.tolerance) for x, y in pairs)


def same(actual: np.ndarray, expected: np.ndarray, tolerance: float = 0.0) -> bool:
    """Whether two arrays are equal, up to a tolerance; NaN equals NaN."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    if expected.dtype.kind in "biu":
        # By bits: a bool in memory is 0 or 1, and NumPy takes any byte for True.
        bits = f"u{expected.dtype.itemsize}"
        return np.array_equal(actual.view(bits), expected.view(bits))
    a, b = (x.astype(np.float64) for x in (actual, expected))
    return np.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)

# SPDX-License-Identifier: Apache-2.0
"""Small kernels and the results that they must give, for runs in lockstep."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType

import numpy as np
from jaxlib.mlir import ir

from tests.support.finished import emitted
from tests.support.lockstep import bodies as lockstep


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A body on GMEM views, and the arrays that it must store.

    Attributes:
      emit: takes the builder and a view for each operand and result.
      operands: the arrays it loads.
      expected: the arrays it stores.
      tolerance: relative, and absolute around zero; 0 for equality. NaN equals NaN.
      smem_bytes: shared memory that it uses.
      arch: compute capability.
      signed_zeros: whether the sign of a zero has to be right.
      arch: compute capability that the kernel is emitted for.
    """

    emit: Callable[..., None]
    operands: Sequence[np.ndarray]
    expected: Sequence[np.ndarray]
    tolerance: float = 0.0
    smem_bytes: int = 0
    arch: tuple[int, int] = (9, 0)
    signed_zeros: bool = True
    arch: tuple[int, int] = (9, 0)

    def module(self) -> ir.Module:
        """Emits the kernel."""
        spec = {"smem_bytes": self.smem_bytes, "arch": self.arch}
        return emitted(self.emit, self.operands, self.expected, **spec)

    def results(
        self, module: ir.Module, machine: ModuleType = lockstep
    ) -> list[np.ndarray]:
        """Runs the module of this program, in lockstep or on the card."""
        return machine.run_module(module, self.operands, self.expected)

    def variants(
        self, contexts: Sequence[Callable[[], AbstractContextManager]]
    ) -> list[bool]:
        """Whether the program is right if it is emitted in each of some contexts."""
        count = len(self.operands)

        def emit(kb, *views):
            for i, context in enumerate(contexts):
                results = views[count + i * len(self.expected) :][: len(self.expected)]
                with context():
                    self.emit(kb, *views[:count], *results)

        expected = [*self.expected] * len(contexts)
        together = dataclasses.replace(self, emit=emit, expected=expected)
        found = iter(together.results(together.module()))
        return [
            self.is_right(list(itertools.islice(found, len(self.expected))))
            for _ in contexts
        ]

    def is_right(self, results: Sequence[np.ndarray]) -> bool:
        """Whether results are those expected."""
        pairs = zip(results, self.expected, strict=True)
        return all(same(x, y, self.tolerance, self.signed_zeros) for x, y in pairs)


def same(
    actual: np.ndarray, expected: np.ndarray, tolerance: float, signed_zeros: bool
) -> bool:
    """Whether two arrays are equal, up to a tolerance; NaN equals NaN."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    if expected.dtype.kind in "biu":
        # By bits: a bool in memory is 0 or 1, and NumPy takes any byte for True.
        bits = f"u{expected.dtype.itemsize}"
        return np.array_equal(actual.view(bits), expected.view(bits))
    a, b = (x.astype(np.float64) for x in (actual, expected))
    zeros = (a == 0) & (b == 0)
    if signed_zeros and np.any(np.signbit(a[zeros]) != np.signbit(b[zeros])):
        return False
    return np.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)

# SPDX-License-Identifier: Apache-2.0
"""Branches under a condition, conditions, and loops that count."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf


def predicated(condition: ir.Value | None):
    """A context whose code executes only if the i1 holds; None means always."""
    return _Predicated(condition)


class _Predicated:
    def __init__(self, condition: ir.Value | None):
        self._condition = condition
        self._point: ir.InsertionPoint | None = None

    def __enter__(self) -> None:
        if self._condition is None:
            return
        branch = scf.IfOp(self._condition)
        self._point = ir.InsertionPoint(branch.then_block)
        self._point.__enter__()

    def __exit__(self, kind, value, traceback) -> None:
        if self._point is None:
            return
        if kind is None:
            scf.yield_([])
        self._point.__exit__(kind, value, traceback)


def both(a: ir.Value | None, b: ir.Value | None) -> ir.Value | None:
    """The conjunction of two conditions, of which None is true."""
    if a is None or b is None:
        return b if a is None else a
    return arith.andi(a, b)


@contextlib.contextmanager
def counting(count: int, step: int = 1) -> Iterator[ir.Value]:
    """A loop in the kernel; yields its counter, an i32 from 0."""
    index = ir.IndexType.get()
    low, high, stride = (arith.constant(index, n) for n in (0, count, step))
    loop = scf.ForOp(low, high, stride)
    with ir.InsertionPoint(loop.body):
        yield arith.index_cast(ir.IntegerType.get_signless(32), loop.induction_variable)
        scf.yield_([])

# SPDX-License-Identifier: Apache-2.0
"""Removes warpgroup barriers that a later barrier makes redundant.

Every emitter that needs its warpgroup synchronized emits a barrier of its own: a store
before and after, a fence, a copy. In sequence, several follow each other directly.
"""

from __future__ import annotations

from jaxlib.mlir import ir

# Operations between two barriers that do not need the first one: arithmetic, and the
# proxy fence, which orders each thread's own earlier accesses.
_PURE_DIALECTS = ("arith.", "vector.", "math.")
# Of these dialects, what accesses memory: authors of inline code use it.
_ACCESSES = tuple(
    f"vector.{name}"
    for name in ("load", "store", "masked", "gather", "scatter", "transfer", "expand",
                 "compress")
)  # fmt: skip
_PURE = ("llvm.getelementptr", "builtin.unrealized_conversion_cast", "nvvm.fence.proxy")


def drop_repeated(root: ir.Operation) -> None:
    """Erases each barrier that another one follows without a memory access in between.

    Args:
      root: the operation whose regions to process, nested ones included.
    """
    pending: ir.Operation | None = None
    repeated = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        # Operations with regions and terminators are not pure: no barrier remains
        # pending from one block to another.
        nonlocal pending
        name = op.name
        if name == "nvvm.barrier":
            if pending is not None and _same(pending, op):
                repeated.append(pending)
            pending = op
        elif pending is not None and not _pure(name):
            pending = None
        return ir.WalkResult.ADVANCE

    # A walk is three times as fast as iterating over the blocks' operations.
    root.walk(visit, ir.WalkOrder.PRE_ORDER)
    for operation in repeated:
        operation.erase()


def _pure(name: str) -> bool:
    if name.startswith(_ACCESSES):
        return False
    return name in _PURE or name.startswith(_PURE_DIALECTS)


def _same(a: ir.Operation, b: ir.Operation) -> bool:
    """True for two barriers of one warpgroup; that of the whole CTA has no operands."""
    return len(a.operands) > 0 and list(a.operands) == list(b.operands)

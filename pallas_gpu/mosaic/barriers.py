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
_PURE = ("llvm.getelementptr", "builtin.unrealized_conversion_cast", "nvvm.fence.proxy")


def drop_repeated(block: ir.Block) -> None:
    """Erases each barrier that another one follows without a memory access in between.

    Args:
      block: the block to process, nested regions included.
    """
    pending: ir.Operation | None = None
    repeated = []
    for op in block.operations:
        operation = op.operation
        name = operation.name
        if name == "nvvm.barrier":
            if pending is not None and _same(pending, operation):
                repeated.append(pending)
            pending = operation
        elif name not in _PURE and not name.startswith(_PURE_DIALECTS):
            pending = None
            for region in operation.regions:
                for inner in region.blocks:
                    drop_repeated(inner)
    for operation in repeated:
        operation.erase()


def _same(a: ir.Operation, b: ir.Operation) -> bool:
    """True for two barriers of one warpgroup; that of the whole CTA has no operands."""
    return len(a.operands) > 0 and list(a.operands) == list(b.operands)

# SPDX-License-Identifier: Apache-2.0
"""Drops barriers of a warpgroup that a later one makes superfluous.

Every emitter that needs its warpgroup together says so by itself: a store before and
after, a fence, a copy. In a row they meet several times with nothing in between.
"""

from __future__ import annotations

from jaxlib.mlir import ir

# What may stand between two barriers without a reason for the first one: arithmetic,
# and the proxy fence, which each thread issues for its own accesses before.
_PURE_DIALECTS = ("arith.", "vector.", "math.")
_PURE = ("llvm.getelementptr", "builtin.unrealized_conversion_cast", "nvvm.fence.proxy")


def drop_repeated(block: ir.Block) -> None:
    """Erases each barrier that another one follows with no memory access in between.

    Args:
      block: where to look, in nested regions too.
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
    """True for two barriers of one warpgroup; the block's own has no operands."""
    return len(a.operands) > 0 and list(a.operands) == list(b.operands)

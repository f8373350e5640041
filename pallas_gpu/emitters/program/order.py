# SPDX-License-Identifier: Apache-2.0
"""The order of some operations in a program, without a walk over all of it."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from jaxlib.mlir import ir


def in_order(operations: Iterable[ir.Operation]) -> list[ir.Operation]:
    """Sorts operations of one module, nested ones included, by their position."""
    paths = sorted(map(_path, operations), key=functools.cmp_to_key(_compare))
    return [path[-1] for path in paths]


def _path(operation: ir.Operation) -> list[ir.Operation]:
    """An operation after those that enclose it, the outermost first."""
    path = [operation]
    while (parent := path[-1].parent) is not None:
        path.append(parent.operation)
    return path[::-1]


def _compare(a: list[ir.Operation], b: list[ir.Operation]) -> int:
    for around, (one, other) in enumerate(zip(a, b, strict=False)):
        if one == other:
            continue
        if one.block == other.block:
            return -1 if one.is_before_in_block(other) else 1
        parent = a[around - 1]
        blocks = [block for region in parent.regions for block in region.blocks]
        return blocks.index(one.block) - blocks.index(other.block)
    return len(a) - len(b)


def first_of(root: ir.Operation, name: str) -> ir.Operation | None:
    """The first operation of a name in another one; None if there is none."""
    # Unlike a block's operations, those of a walk are not looked up by their dialects.
    found: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name != name:
            return ir.WalkResult.ADVANCE
        found.append(op)
        return ir.WalkResult.INTERRUPT

    root.walk(visit, ir.WalkOrder.PRE_ORDER)
    return found[0] if found else None

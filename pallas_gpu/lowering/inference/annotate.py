# SPDX-License-Identifier: Apache-2.0
"""The module with the inferred layouts as attributes of its operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from jaxlib.mlir import ir

from pallas_gpu.layouts import SmemLayout, TmemLayout
from pallas_gpu.layouts.registers.placement import Placement, describe

# Attributes that occur in the text only.
_OPERANDS, _RESULTS = "layouts.operands", "layouts.results"
_SMEM, _TMEM = "layouts.smem", "layouts.tmem"


class Layouts(Protocol):
    """What `infer` returns."""

    def result(self, value: ir.Value) -> Placement | None: ...
    def operand(self, op: ir.Operation, i: int) -> Placement | None: ...
    def smem(self, value: ir.Value) -> SmemLayout: ...
    def tmem(self, value: ir.Value) -> TmemLayout: ...


def annotate(block: ir.Block, assignment: Layouts) -> str:
    """The text of the operation around a block, with layouts as attributes.

    The module itself is unchanged.
    """
    written: list[tuple[ir.Operation, str]] = []
    try:
        for op in operations(block):
            for name, texts in _texts(op, assignment):
                op.attributes[name] = ir.ArrayAttr.get(
                    [ir.StringAttr.get(text, op.context) for text in texts], op.context
                )
                written.append((op, name))
        return str(block.owner)
    finally:
        for op, name in written:
            del op.attributes[name]


def operations(block: ir.Block) -> Iterator[ir.Operation]:
    """The operations of a block and of all regions in it, in order."""
    for view in block.operations:
        yield view.operation
        for region in view.operation.regions:
            for inner in region.blocks:
                yield from operations(inner)


def _texts(
    op: ir.Operation, assignment: Layouts
) -> Iterator[tuple[str, Sequence[str]]]:
    if op.name == "mosaic_gpu.slice_smem":
        yield _SMEM, [assignment.smem(op.results[0]).description]
    if op.name in ("mosaic_gpu.tmem_alloc", "mosaic_gpu.slice_tmem"):
        yield _TMEM, [str(assignment.tmem(op.results[0]))]
    operands = [assignment.operand(op, i) for i in range(len(op.operands))]
    if any(layout is not None for layout in operands):
        yield _OPERANDS, ["-" if x is None else describe(x) for x in operands]
    results = [assignment.result(value) for value in op.results]
    if any(layout is not None for layout in results):
        yield _RESULTS, ["-" if x is None else describe(x) for x in results]

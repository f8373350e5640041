# SPDX-License-Identifier: Apache-2.0
"""Loops and branches: vectors that cross a border become registers.

An operation is entered as dead before those of its regions: what its blocks were given
is used until they are gone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import scf

from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.expansion.expand import (
    Expansion,
    expand_block,
    expands,
    is_array,
)
from pallas_gpu.mosaic import logical
from pallas_gpu.mosaic import registers as regs


@dataclasses.dataclass(frozen=True)
class _Border:
    """How values cross: scalars as they are, arrays as their registers."""

    expansion: Expansion
    specs: tuple[vals.Packed | None, ...]  # None: a scalar

    @classmethod
    def of(cls, expansion: Expansion, values: Sequence[ir.Value]) -> _Border:
        """Returns the border that values of these layouts cross."""
        return cls(expansion, tuple(_spec(expansion, v) for v in values))

    def types(self, values: Sequence[ir.Value]) -> list[ir.Type]:
        """Returns the types of the SSA values that stand for some values."""
        result: list[ir.Type] = []
        for spec, value in zip(self.specs, values, strict=True):
            result += [value.type] if spec is None else spec.types
        return result

    def pack(self, op: Any, first: int = 0) -> list[ir.Value]:
        """Returns the SSA values of an operation's operands, from the first on."""
        result: list[ir.Value] = []
        for i, spec in enumerate(self.specs, first):
            if spec is None:
                result.append(op.operands[i])
                continue
            array = self.expansion.array(op.operands[i])
            placed = self.expansion.in_layout(array, spec.layout)
            assert isinstance(placed, regs.RegisterArray)
            result += placed.values
        return result

    def unpack(self, old: Sequence[ir.Value], new: Sequence[ir.Value]) -> None:
        """Enters what has become of values."""
        new = list(new)
        for spec, value in zip(self.specs, old, strict=True):
            if spec is None:
                value.replace_all_uses_with(new.pop(0))
                continue
            self.expansion.arrays[value] = spec.unpack(new[: spec.count])
            del new[: spec.count]


def _spec(expansion: Expansion, value: ir.Value) -> vals.Packed | None:
    if not is_array(value):
        return None
    dtype = logical.dtype_of(value.type)
    layout = expansion.assignment.result(value)
    if layout is None:
        layout = regs.default_placement(tuple(value.type.shape), dtype)
    return vals.Packed(dtype, layout=layout)


def _move(source: Any, target: Any) -> None:
    for op in list(source.operations):
        target.append(op)


def _expand_regions(expansion: Expansion, op: Any) -> None:
    for region in op.regions:
        for block in region.blocks:
            expand_block(expansion, block)


@expands("scf.for")
def _for(expansion: Expansion, op: Any) -> None:
    if not any(map(is_array, op.results)):
        _expand_regions(expansion, op)
        return
    expansion.dead.append(op.operation)
    old = op.regions[0].blocks[0]
    induction, *carried = old.arguments
    border = _Border.of(expansion, carried)
    bounds = [op.operands[i] for i in range(3)]
    loop = scf.ForOp(*bounds, border.pack(op, first=3))
    induction.replace_all_uses_with(loop.induction_variable)
    border.unpack(carried, loop.inner_iter_args)
    _move(old, loop.body)
    expand_block(expansion, loop.body)
    _yield(expansion, loop.body, border)
    border.unpack(op.results, loop.results)


@expands("scf.while")
def _while(expansion: Expansion, op: Any) -> None:
    if not any(map(is_array, (*op.results, *op.operands))):
        _expand_regions(expansion, op)
        return
    expansion.dead.append(op.operation)
    before, after = (region.blocks[0] for region in op.regions)
    outer = _Border.of(expansion, before.arguments)
    inner = _Border.of(expansion, after.arguments)
    results = inner.types(list(op.results))
    loop = scf.WhileOp(results, outer.pack(op))
    new_before = loop.before.blocks.append(*outer.types(list(before.arguments)))
    new_after = loop.after.blocks.append(*results)
    for border, old, new in ((outer, before, new_before), (inner, after, new_after)):
        border.unpack(list(old.arguments), list(new.arguments))
        _move(old, new)
        expand_block(expansion, new)
    condition = list(new_before.operations)[-1]
    with ir.InsertionPoint(condition), ir.Location.unknown():
        scf.condition(condition.operands[0], inner.pack(condition, first=1))
    expansion.dead.append(condition.operation)
    _yield(expansion, new_after, outer)
    inner.unpack(op.results, loop.results)


@expands("scf.if")
def _if(expansion: Expansion, op: Any) -> None:
    if not any(map(is_array, op.results)):
        _expand_regions(expansion, op)
        return
    expansion.dead.append(op.operation)
    results = list(op.results)
    border = _Border.of(expansion, results)
    new = scf.IfOp(op.operands[0], border.types(results), has_else=True)
    for region, block in zip(op.regions, (new.then_block, new.else_block), strict=True):
        _move(region.blocks[0], block)
        expand_block(expansion, block)
        _yield(expansion, block, border)
    border.unpack(results, new.results)


def _yield(expansion: Expansion, block: Any, border: _Border) -> None:
    """Replaces a block's terminator by one of registers."""
    old = list(block.operations)[-1]
    with ir.InsertionPoint(old), ir.Location.unknown():
        scf.yield_(border.pack(old))
    expansion.dead.append(old.operation)


@expands("scf.yield", "scf.condition")
def _terminator(expansion: Expansion, op: Any) -> None:
    """The operation around it replaces it, once its block is done."""

# SPDX-License-Identifier: Apache-2.0
"""mma: products of values in registers."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.layouts.registers.fragments import MmaShape
from pallas_gpu.layouts.registers.placement import place
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.expansion.walk import Expansion
from pallas_gpu.lowering.families.shapes import as_vector
from pallas_gpu.lowering.inference.collect import Node, Symbol
from pallas_gpu.lowering.inference.network import Key, Network
from pallas_gpu.lowering.rules import expands, infers, lane, relates, warpgroup
from pallas_gpu.mosaic import logical
from pallas_gpu.mosaic import registers as regs
from pallas_gpu.mosaic.elements import dtypes
from pallas_gpu.mosaic.tensor_cores import mma
from pallas_gpu.primitives.tensor_cores import mma as primitives

_ROLES = ("accumulator", "left operand", "right operand")
# Attributes of the warpgroup-level operation: the types of the operands.
_TYPES = ("acc", "a", "b")


@lane(primitives.mma_p)
def _mma_lane(ctx: RuleContext, *invals: Any) -> Any:
    operands = ctx.operands(invals)
    given = [ctx.operand(operands[name], name) for name in _TYPES]
    if any(isinstance(x, regs.Deferred) for x in given):
        given = _in_layouts(given)
    return mma.mma(*given)


def _in_layouts(given: list[Any]) -> list[Any]:
    """Returns the operands, those without a layout in that of the others' division."""
    acc, a, b = given
    (m, n), k = acc.shape, b.shape[0]
    bits = dtypes.stored_bits(a.dtype)
    for shape in MmaShape.divisions(m, n, k, bits):
        layouts = (shape.acc, shape.lhs, shape.rhs)
        fits = shape == shape.padded and all(
            isinstance(x, regs.Deferred) or x.layout == place(layout, x.shape)
            for x, layout in zip(given, layouts, strict=True)
        )
        if fits:
            return [
                x.materialize(layout) if isinstance(x, regs.Deferred) else x
                for x, layout in zip(given, layouts, strict=True)
            ]
    best = MmaShape.best(m, n, k, bits)
    assert best is not None  # the public function refuses other shapes
    layouts = (best.acc, best.lhs, best.rhs)
    return [
        x.materialize(layout) if isinstance(x, regs.Deferred) else x
        for x, layout in zip(given, layouts, strict=True)
    ]


@relates(primitives.mma_p)
def _relate(node: Node, *_: Any) -> Symbol:
    acc, a, b = given = [node.operands[name] for name in _TYPES]
    bits = dtypes.stored_bits(np.dtype(a.dtype))
    shape = MmaShape.best(*acc.shape, b.shape[0], bits)
    assert shape is not None  # the public function refuses other shapes
    made = None
    layouts = (shape.acc, shape.lhs, shape.rhs)
    for name, x, layout, role in zip(_TYPES, given, layouts, _ROLES, strict=True):
        variable = node.variable(x, role, fixed=place(layout, x.shape))
        node.take(x, variable, name)
        made = made or variable
    assert made is not None
    return node.make(made, acc)


@warpgroup(primitives.mma_p)
def _mma_warpgroup(ctx: RuleContext, *invals: Any) -> Any:
    operands = ctx.operands(invals)
    given = [as_vector(x, tuple(x.shape)) for x in (operands[n] for n in _TYPES)]
    attributes = {
        name: ir.StringAttr.get(x.dtype.name)
        for name, x in zip(_TYPES, given, strict=True)
    }
    acc = given[0]
    type_ = logical.vector_type(acc.dtype, acc.shape)
    values = [x.value for x in given]
    op = ir.Operation.create("pallas_gpu.mma", [type_], values, attributes)
    return vals.Vector(op.result, acc.dtype)


@infers("pallas_gpu.mma")
def _infer(network: Network, op: ir.Operation, key: Key) -> None:
    (m, n), _ = network.vector_type(op.operands[0].type)
    (_, k), _ = network.vector_type(op.operands[1].type)
    shape = MmaShape.best(m, n, k, dtypes.stored_bits(_dtype(op, "a")))
    assert shape is not None  # the public function refuses other shapes
    layouts = (shape.acc, shape.lhs, shape.rhs)
    for i, (layout, role) in enumerate(zip(layouts, _ROLES, strict=True)):
        type_ = op.operands[i].type
        sizes, _ = network.vector_type(type_)
        fixed: Any = place(layout, sizes)
        variable = network.variable(op, type_, key, role=role, fixed=fixed)
        network.consume(op, i, variable)
        if i == 0:
            network.produce(op.results[0], variable)


@expands("pallas_gpu.mma")
def _expand(expansion: Expansion, op: Any) -> None:
    given = [expansion.placed(op, i, _dtype(op, name)) for i, name in enumerate(_TYPES)]
    expansion.set(op.result, mma.mma(*given))
    expansion.dead.append(op.operation)


def _dtype(op: Any, name: str) -> np.dtype:
    """The element type of an operand, which MLIR's type does not tell."""
    return dtypes.named(ir.StringAttr(op.attributes[name]).value)

# SPDX-License-Identifier: Apache-2.0
"""mma: products of values in registers."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_gpu.emitters import registers as regs
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.tensor_cores import mma
from pallas_gpu.layouts.registers.fragments import MmaShape
from pallas_gpu.layouts.registers.placement import place
from pallas_gpu.lowering import slow
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.inference.collect import Node, Symbol
from pallas_gpu.lowering.rules import emits, relates
from pallas_gpu.primitives.tensor_cores import mma as primitives

_ROLES = ("accumulator", "left operand", "right operand")
_NAMES = ("acc", "a", "b")


@emits(primitives.mma_p)
def _mma(ctx: RuleContext, acc: Any, a: Any, b: Any) -> Any:
    operands = zip((acc, a, b), _NAMES, strict=True)
    given = [ctx.operand(x, name) for x, name in operands]
    reason = ctx.eqn.params.get("reason")
    if reason is not None:
        shown = " times ".join(f"{x.dtype}{list(x.shape)}" for x in given[1:])
        slow.warn(reason.what, shown, reason.hint, ctx.kernel.where)
    if any(isinstance(x, regs.Deferred) for x in given):
        given = _in_layouts(given)
    return mma.mma(*given)


def _in_layouts(given: list[Any]) -> list[Any]:
    """Returns the operands, those without a layout in that of the others' division."""
    acc, a, b = given
    (m, n), k = acc.shape, b.shape[0]
    bits = dtypes.stored_bits(a.dtype)
    fitting = (
        shape
        for shape in MmaShape.divisions(m, n, k, bits)
        if shape == shape.padded
        and all(
            isinstance(x, regs.Deferred) or x.layout == place(layout, x.shape)
            for x, layout in zip(given, _layouts(shape), strict=True)
        )
    )
    chosen = next(fitting, None) or MmaShape.best(m, n, k, bits)
    assert chosen is not None  # the public function refuses other shapes
    return [
        x.materialize(layout) if isinstance(x, regs.Deferred) else x
        for x, layout in zip(given, _layouts(chosen), strict=True)
    ]


def _layouts(shape: MmaShape) -> tuple[Any, ...]:
    return shape.acc, shape.lhs, shape.rhs


@relates(primitives.mma_p)
def _relate(node: Node, acc: Symbol, a: Symbol, b: Symbol) -> Symbol:
    given = acc, a, b
    bits = dtypes.stored_bits(np.dtype(a.dtype))
    (m, n), k = acc.shape, b.shape[0]
    shape = MmaShape.best(m, n, k, bits)
    assert shape is not None  # the public function refuses other shapes
    made = None
    layouts = _layouts(shape)
    for name, x, layout, role in zip(_NAMES, given, layouts, _ROLES, strict=True):
        variable = node.variable(x, role, fixed=place(layout, x.shape))
        node.take(x, variable, name)
        made = made or variable
    assert made is not None
    return node.make(made, acc)

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
from pallas_gpu.lowering.inference.collect import Node
from pallas_gpu.lowering.rules import emits_and_relates
from pallas_gpu.primitives.tensor_cores import mma as primitives

_ROLES = ("accumulator", "left operand", "right operand")
_NAMES = ("acc", "a", "b")


@emits_and_relates(primitives.mma_p)
def _mma(on: RuleContext | Node, acc: Any, a: Any, b: Any) -> Any:
    if isinstance(on, Node):
        layouts = _layouts(_best(acc, a, b))
        made = [
            on.variable(x, role, fixed=place(layout, x.shape))
            for x, layout, role in zip((acc, a, b), layouts, _ROLES, strict=True)
        ]
        for x, variable, name in zip((acc, a, b), made, _NAMES, strict=True):
            on.take(x, variable, name)
        return on.make(made[0], acc)
    operands = zip((acc, a, b), _NAMES, strict=True)
    given = [on.operand(x, name) for x, name in operands]
    reason = on.eqn.params.get("reason")
    if reason is not None:
        shown = " times ".join(f"{x.dtype}{list(x.shape)}" for x in given[1:])
        slow.warn(reason.what, shown, reason.hint, on.kernel.where)
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
    chosen = next(fitting, None) or _best(*given)
    return [
        x.materialize(layout) if isinstance(x, regs.Deferred) else x
        for x, layout in zip(given, _layouts(chosen), strict=True)
    ]


def _best(acc: Any, a: Any, b: Any) -> MmaShape:
    (m, n), k = acc.shape, b.shape[0]
    shape = MmaShape.best(m, n, k, dtypes.stored_bits(np.dtype(a.dtype)))
    assert shape is not None  # the public function refuses other shapes
    return shape


def _layouts(shape: MmaShape) -> tuple[Any, ...]:
    return shape.acc, shape.lhs, shape.rhs

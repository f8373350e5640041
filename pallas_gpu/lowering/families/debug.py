# SPDX-License-Identifier: Apache-2.0
"""Printing from a kernel, checks, and the layouts of values while it is compiled."""

from __future__ import annotations

from typing import Any

from pallas_gpu import _jax, types
from pallas_gpu.emitters import registers as regs
from pallas_gpu.emitters.debug import values as printed
from pallas_gpu.layouts.registers.placement import describe
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.inference.collect import Memory, Node, Symbol
from pallas_gpu.lowering.rules import emits, relates
from pallas_gpu.primitives import debug
from pallas_gpu.program.nodes import Access

# --- printed lines --------------------------------------------------------------------


def _print(ctx: RuleContext, *values: Any) -> None:
    alike = [ctx.operand(x, i) for i, x in enumerate(values)]
    printed.print_values(debug.line_of(ctx.eqn), alike)


def _relate_print(node: Node, *values: Symbol) -> None:
    """The arrays of a line have one layout, which costs nothing by itself."""
    arrays = [(i, x) for i, x in enumerate(values) if x.shape]
    if all(x.deferred for _, x in arrays):
        return
    variable = node.variable(arrays[0][1])
    for i, x in arrays:
        node.take(x, variable, i)


for _primitive in (debug.debug_print_p, _jax.debug_print_p):
    emits(_primitive)(_print)
    relates(_primitive)(_relate_print)


# --- checks ---------------------------------------------------------------------------


@emits(debug.debug_check_p)
def _debug_check(ctx: RuleContext, condition: Any, *, message: str) -> None:
    """Emits the check; `passes.unchecked` has removed those that are not enabled."""
    params = ctx.kernel.params
    names = [name for name, _ in params.mesh.axes if name is not None]
    place = ", ".join(f"{name}=%d" for name in names)
    where = _jax.where(ctx.eqn)
    text = f"kernel {params.name}: debug_check: {message}"
    text += f"\n  at: {where}" if where else ""
    text = text.replace("%", "%%") + (f"\n  in: {place}" if place else "")
    axes = [ctx.kernel.axes[name] for name in names]
    printed.check(vals.scalar_value(condition), text, axes)


# --- layouts --------------------------------------------------------------------------


@emits(debug.print_layout_p)
def _layout(ctx: RuleContext, x: Any, *, fmt: str) -> None:
    if ctx.kernel.trial is None:
        print(fmt.format(_known_layout(x)))


def _known_layout(x: Any) -> str:
    """The layout of a value or a reference, as text."""
    match getattr(x, "handle", x):
        case vals.AccumulatorHandle():
            return "Layout.WGMMA (an accumulator)"
        case vals.SmemHandle(layout=layout):
            return layout.description
        case vals.GmemHandle():
            return "row-major, in GMEM"
        case vals.TmemHandle(layout=layout):
            return str(layout)
        case regs.Splat(shape=()):
            return "a scalar, in a register of every thread"
        case regs.RegisterArray(layout=layout):
            return describe(layout)
    return "no layout: each use materializes it in its own"


@relates(debug.print_layout_p)
def _relate_layout(node: Node, x: Any) -> None:
    """It requires nothing: it prints what the other operations lead to."""
    if isinstance(x, Access) and isinstance(node.reference(x), Memory):
        part = node.part(x)
        if part.space is not types.GMEM:
            node.network.array(part)

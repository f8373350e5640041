# SPDX-License-Identifier: Apache-2.0
"""Printing from a kernel, checks, and the layouts of values while it is compiled."""

from __future__ import annotations

from typing import Any

from pallas_gpu import _jax, types
from pallas_gpu.emitters import registers as regs
from pallas_gpu.emitters.debug import values as printed
from pallas_gpu.emitters.smem import SmemView
from pallas_gpu.emitters.tensor_cores.tmem import TmemView
from pallas_gpu.layouts.registers.placement import describe
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.inference.collect import Memory, Node
from pallas_gpu.lowering.rules import emits, emits_and_relates
from pallas_gpu.primitives import debug
from pallas_gpu.program.nodes import Access

# --- printed lines --------------------------------------------------------------------


@emits_and_relates(debug.debug_print_p, _jax.debug_print_p)
def _print(on: RuleContext | Node, *values: Any) -> None:
    """The arrays of a line have one layout, which costs nothing by itself."""
    if isinstance(on, Node):
        arrays = [x for x in values if x.shape]
        if arrays:
            on.alike(values, arrays[0])
        return
    alike = [on.operand(x, i) for i, x in enumerate(values)]
    printed.print_values(debug.line_of(on.eqn), alike)


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


@emits_and_relates(debug.print_layout_p)
def _layout(on: RuleContext | Node, x: Any, *, fmt: str) -> None:
    """It requires nothing: it prints what the other operations lead to."""
    if isinstance(on, Node):
        if isinstance(x, Access) and isinstance(on.reference(x), Memory):
            part = on.part(x)
            if part.space is not types.GMEM:
                on.network.array(part)
    elif on.kernel.trial is None:
        print(fmt.format(_known_layout(x)))


def _known_layout(x: Any) -> str:
    """The layout of a value or a reference, as text."""
    match getattr(x, "handle", x):
        case vals.AccumulatorHandle():
            return "Layout.WGMMA (an accumulator)"
        case SmemView(layout=layout):
            return layout.description
        case vals.GmemHandle():
            return "row-major, in GMEM"
        case TmemView(layout=layout):
            return str(layout)
        case regs.Splat(shape=()):
            return "a scalar, in a register of every thread"
        case regs.RegisterArray(layout=layout):
            return describe(layout)
    return "no layout: each use materializes it in its own"

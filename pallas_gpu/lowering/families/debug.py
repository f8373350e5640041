# SPDX-License-Identifier: Apache-2.0
"""Printing from a kernel, checks, and the layouts of values while it is compiled."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from pallas_gpu import _jax, types
from pallas_gpu.layouts.registers.placement import describe
from pallas_gpu.lowering import memrefs
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.expansion.walk import Expansion, is_array
from pallas_gpu.lowering.inference import constraints
from pallas_gpu.lowering.inference.collect import Memory, Node, Symbol
from pallas_gpu.lowering.inference.network import Key, Network
from pallas_gpu.lowering.rules import expands, infers, lane, relates, uniform, warpgroup
from pallas_gpu.mosaic import registers as regs
from pallas_gpu.mosaic.debug import values as printed
from pallas_gpu.mosaic.elements import dtypes
from pallas_gpu.primitives import debug
from pallas_gpu.program.nodes import Access
from pallas_gpu.types import formats

# Attributes of the warpgroup-level operations.
_FORMAT, _DTYPES = "format", "dtypes"


# --- printed lines --------------------------------------------------------------------


def _print_lane(ctx: RuleContext, *values: Any) -> list[Any]:
    alike = [ctx.operand(x, i) for i, x in enumerate(values)]
    printed.print_values(debug.line_of(ctx.eqn), alike)
    return []


def _relate_print(node: Node, *values: Symbol) -> list[Any]:
    """The arrays of a line have one layout, which costs nothing by itself."""
    arrays = [(i, x) for i, x in enumerate(values) if x.shape]
    if all(x.deferred for _, x in arrays):
        return []
    variable = node.variable(arrays[0][1])
    for i, x in arrays:
        node.take(x, variable, i)
    return []


def _print_warpgroup(ctx: RuleContext, *values: Any) -> list[Any]:
    line = debug.line_of(ctx.eqn)
    names = [ir.StringAttr.get(x.dtype.name) for x in values]
    attributes = {
        _FORMAT: ir.StringAttr.get(str(line)),
        _DTYPES: ir.ArrayAttr.get(names),
    }
    operands = [x.value for x in values]
    ir.Operation.create("pallas_gpu.debug_print", [], operands, attributes)
    return []


for _primitive in (debug.debug_print_p, _jax.debug_print_p):
    lane(_primitive)(_print_lane)
    relates(_primitive)(_relate_print)
    warpgroup(_primitive)(_print_warpgroup)


@infers("pallas_gpu.debug_print")
def _infer_print(network: Network, op: ir.Operation, key: Key) -> None:
    """The arrays of a line have one layout, which costs nothing by itself."""
    positions = constraints.vector_operands(op)
    if all(op.operands[i] in network.deferred for i in positions):
        return
    type_ = op.operands[positions[0]].type
    variable = network.variable(op, type_, key)
    for i in positions:
        network.consume(op, i, variable)


@expands("pallas_gpu.debug_print")
def _expand_print(expansion: Expansion, op: Any) -> None:
    names = [attribute.value for attribute in op.attributes[_DTYPES]]
    values = [
        expansion.operand(op, i, dtypes.named(name))
        if is_array(op.operands[i])
        else regs.Splat(op.operands[i], dtypes.named(name), ())
        for i, name in enumerate(names)
    ]
    line = formats.parse(ir.StringAttr(op.attributes[_FORMAT]).value)
    printed.print_values(line, values)
    expansion.dead.append(op.operation)


# --- checks ---------------------------------------------------------------------------


@uniform(debug.debug_check_p)
def _debug_check(ctx: RuleContext, *invals: Any) -> list[Any]:
    """Emits the check; `lowering.unchecked` has removed those that are not enabled."""
    params = ctx.kernel.params
    condition = ctx.operands(invals)["condition"]
    names = [name for name, _ in params.mesh.axes if name is not None]
    place = ", ".join(f"{name}=%d" for name in names)
    where = _jax.where(ctx.eqn)
    text = f"kernel {params.name}: debug_check: {ctx.eqn.params['message']}"
    text += f"\n  at: {where}" if where else ""
    text = text.replace("%", "%%") + (f"\n  in: {place}" if place else "")
    axes = [ctx.kernel.axes[name] for name in names]
    printed.check(vals.scalar_value(condition), text, axes)
    return []


# --- layouts --------------------------------------------------------------------------


@lane(debug.print_layout_p)
def _layout_lane(ctx: RuleContext, *invals: Any) -> list[Any]:
    if ctx.kernel.trial is None:
        print(ctx.eqn.params["fmt"].format(_known_layout(ctx, invals)))
    return []


def _known_layout(ctx: RuleContext, invals: Any) -> str:
    """The layout of a value or a reference, as text."""
    x = ctx.operands(invals)["x"]
    handle = getattr(x, "ref", x)
    match handle:
        case vals.AccumulatorHandle():
            return "Layout.WGMMA (an accumulator)"
        case vals.SmemHandle():
            return handle.layout.description
        case vals.GmemHandle():
            return "row-major, in GMEM"
        case vals.TmemHandle():
            return str(handle.layout)
        case int() | float():
            return _SCALAR
    return _layout_of(handle)


_SCALAR = "a scalar, in a register of every thread"


def _layout_of(array: Any) -> str:
    if vals.is_scalar(array):
        return _SCALAR
    if isinstance(array, regs.RegisterArray):
        return describe(array.layout)
    return "no layout: each use materializes it in its own"


@relates(debug.print_layout_p)
def _relate_layout(node: Node, *_: Any) -> list[Any]:
    """It requires nothing: it prints what the other operations lead to."""
    x = node.operands["x"]
    if isinstance(x, Access) and isinstance(node.reference(x), Memory):
        part = node.part(x)
        if part.space is not types.GMEM:
            node.network.array(part)
    return []


@warpgroup(debug.print_layout_p)
def _layout_warpgroup(ctx: RuleContext, *invals: Any) -> list[Any]:
    x = ctx.operands(invals)["x"]
    handle = getattr(x, "ref", x)
    match handle:
        case vals.MemrefHandle():
            operand = handle.memref
        case vals.Vector():
            operand = handle.value
        case _:
            return _layout_lane(ctx, *invals)
    attributes = {_FORMAT: ir.StringAttr.get(ctx.eqn.params["fmt"])}
    ir.Operation.create("pallas_gpu.print_layout", [], [operand], attributes)
    return []


@infers("pallas_gpu.print_layout")
def _infer_layout(network: Network, op: ir.Operation, key: Key) -> None:
    """It requires nothing: it prints what the other operations lead to."""
    if not is_array(op.operands[0]):
        part = constraints.array_of(network, op, 0)
        if part.space is not types.GMEM:
            network.array(part)


@expands("pallas_gpu.print_layout")
def _expand_layout(expansion: Expansion, op: Any) -> None:
    (operand,) = op.operands
    text = _layout_in_memory(expansion, operand)
    if is_array(operand):
        text = _layout_of(expansion.array(operand))
    print(ir.StringAttr(op.attributes[_FORMAT]).value.format(text))
    expansion.dead.append(op.operation)


def _layout_in_memory(expansion: Expansion, operand: ir.Value) -> str:
    part = None if is_array(operand) else memrefs.resolve(operand)
    if part is None or part.space is types.GMEM:
        return "row-major, in GMEM"
    if part.space is types.SMEM:
        return expansion.assignment.smem(part.base).description
    return str(expansion.assignment.tmem(operand))

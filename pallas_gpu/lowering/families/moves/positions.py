# SPDX-License-Identifier: Apache-2.0
"""Elements of arrays in registers at positions that are values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.lowering import scratch
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.expansion.walk import Expansion
from pallas_gpu.lowering.families import shapes
from pallas_gpu.lowering.families.moves.rearrange import in_registers
from pallas_gpu.lowering.inference.network import Key, Network, digest
from pallas_gpu.lowering.rules import expands, infers, lane, warpgroup
from pallas_gpu.mosaic import logical
from pallas_gpu.mosaic import registers as regs
from pallas_gpu.mosaic.elements import dtypes, table
from pallas_gpu.mosaic.moves import gather, image, relayout, scatter
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.positions import gather_positions_p, scatter_positions_p

# Attributes of the warpgroup-level operations.
_DTYPE, _KIND, _UNIQUE = "dtype", "kind", "unique"


def _operands(ctx: RuleContext, invals: Sequence[Any]) -> dict[str, Any]:
    """The operands by name; constants are values too."""
    return ops.unflatten(ctx.eqn.params["tree"], list(invals))


# --- gathers --------------------------------------------------------------------------


def _gather(kernel: Any, x: Any, index: Any, fill: regs.Array) -> regs.RegisterArray:
    room = scratch.for_data(kernel, image.size_bytes(math.prod(x.shape), x.dtype))
    other = fill.materialize(index.layout) if isinstance(fill, regs.Deferred) else fill
    return gather.gather(x, index, other, room)


@lane(gather_positions_p)
def _gather_lane(ctx: RuleContext, *invals: Any) -> Any:
    operands = _operands(ctx, invals)
    x, index = (in_registers(ctx, operands[name]) for name in ("x", "index"))
    fill = regs.splat(vals.scalar_value(operands["fill"]), x.dtype, index.shape)
    return _gather(ctx.kernel, x, index, fill)


@warpgroup(gather_positions_p)
def _gather_warpgroup(ctx: RuleContext, *invals: Any) -> Any:
    operands = _operands(ctx, invals)
    x, index = operands["x"], operands["index"]
    fill = shapes.splat(operands["fill"], index.shape)
    op = ir.Operation.create(
        "pallas_gpu.gather_positions",
        [logical.vector_type(x.dtype, index.shape)],
        [index.value, fill.value, x.value],
        {_DTYPE: ir.StringAttr.get(x.dtype.name)},
    )
    return vals.Vector(op.result, x.dtype)


@infers("pallas_gpu.gather_positions")
def _infer_gather(network: Network, op: ir.Operation, key: Key) -> None:
    """Index, fill and result have one layout; the array may have any."""
    _, bits = network.vector_type(op.results[0].type)
    made = network.variable(op, op.results[0].type, key, moved_bits=max(bits, 8))
    _consume_moved(network, op, 2, key)
    network.consume(op, 0, made)
    network.consume(op, 1, made)
    network.produce(op.results[0], made)


def _consume_moved(network: Network, op: ir.Operation, i: int, key: Key) -> None:
    """An operand that is stored to scratch, from any layout."""
    type_ = op.operands[i].type
    _, bits = network.vector_type(type_)
    variable = network.variable(
        op,
        type_,
        digest(str(key), str(i)),
        role=f"operand {i}",
        moved_bits=max(bits, 8),
    )
    network.consume(op, i, variable)


@expands("pallas_gpu.gather_positions")
def _expand_gather(expansion: Expansion, op: Any) -> None:
    dtype = dtypes.named(ir.StringAttr(op.attributes[_DTYPE]).value)
    target = expansion.assignment.result(op.result)
    index = expansion.in_layout(expansion.operand(op, 0), target)
    fill, x = expansion.operand(op, 1, dtype), expansion.placed(op, 2, dtype)
    expansion.set(op.result, _gather(expansion.kernel, x, index, fill))
    expansion.dead.append(op.operation)


# --- scatters -------------------------------------------------------------------------


@registry.checks(scatter_positions_p)
def _check_scatter(op: Any, mesh: Any) -> None:
    if op.params["kind"] != "set":
        dtype = np.dtype(op.results[0].dtype)
        table.lookup(op.params["kind"]).require_combining(dtype)


def _scatter(
    kernel: Any, kind: Any, unique: bool, x: Any, index: Any, updates: Any
) -> regs.RegisterArray:
    wanted = scatter.wanted_bytes(
        math.prod(x.shape), math.prod(index.shape), x.dtype, unique
    )
    room = scratch.for_data(kernel, wanted)
    return scatter.scatter(kind, x, index, updates, room, unique=unique)


@lane(scatter_positions_p)
def _scatter_lane(ctx: RuleContext, *invals: Any) -> Any:
    operands = _operands(ctx, invals)
    x, updates = (in_registers(ctx, operands[name]) for name in ("x", "updates"))
    index = operands["index"]
    if isinstance(index, regs.Deferred):
        index = in_registers(ctx, index)
    if index.layout != updates.layout:
        room = scratch.for_relayout(ctx.kernel, updates, index.layout)
        updates = relayout.relayout(updates, index.layout, room)
    params = ctx.eqn.params
    return _scatter(ctx.kernel, params["kind"], params["unique"], x, index, updates)


@warpgroup(scatter_positions_p)
def _scatter_warpgroup(ctx: RuleContext, *invals: Any) -> Any:
    operands = _operands(ctx, invals)
    x, index, updates = (operands[name] for name in ("x", "index", "updates"))
    op = ir.Operation.create(
        "pallas_gpu.scatter_positions",
        [x.value.type],
        [index.value, updates.value, x.value],
        {
            _DTYPE: ir.StringAttr.get(x.dtype.name),
            _KIND: ir.StringAttr.get(ctx.eqn.params["kind"]),
            _UNIQUE: ir.BoolAttr.get(ctx.eqn.params["unique"]),
        },
    )
    return vals.Vector(op.result, x.dtype)


@infers("pallas_gpu.scatter_positions")
def _infer_scatter(network: Network, op: ir.Operation, key: Key) -> None:
    """Index and updates have one layout, the array and the result another."""
    _, bits = network.vector_type(op.results[0].type)
    taken = network.variable(
        op,
        op.operands[0].type,
        digest(str(key), "updates"),
        role="updates",
        moved_bits=max(bits, 8),
    )
    network.consume(op, 0, taken)
    network.consume(op, 1, taken)
    made = network.variable(op, op.results[0].type, key, moved_bits=max(bits, 8))
    network.consume(op, 2, made)
    network.produce(op.results[0], made)


@expands("pallas_gpu.scatter_positions")
def _expand_scatter(expansion: Expansion, op: Any) -> None:
    dtype = dtypes.named(ir.StringAttr(op.attributes[_DTYPE]).value)
    index = expansion.placed(op, 0)
    updates = expansion.in_layout(expansion.operand(op, 1, dtype), index.layout)
    x = expansion.placed(op, 2, dtype)
    kind = ir.StringAttr(op.attributes[_KIND]).value
    unique = ir.BoolAttr(op.attributes[_UNIQUE]).value
    result = _scatter(expansion.kernel, kind, unique, x, index, updates)
    expansion.set(op.result, result)
    expansion.dead.append(op.operation)

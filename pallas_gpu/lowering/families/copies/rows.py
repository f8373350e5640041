# SPDX-License-Identifier: Apache-2.0
"""Copies of rows that an array of indices names."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.expansion.memory import gmem_view, smem_view
from pallas_gpu.lowering.expansion.walk import Expansion
from pallas_gpu.lowering.families.copies import cp_async
from pallas_gpu.lowering.families.mbarrier import predicate_value
from pallas_gpu.lowering.inference.collect import Node
from pallas_gpu.lowering.inference.constraints import array_of
from pallas_gpu.lowering.inference.network import Key, Network, Use
from pallas_gpu.lowering.rules import expands, infers, lane, relates, warpgroup
from pallas_gpu.mosaic import tma
from pallas_gpu.mosaic.copies import rows
from pallas_gpu.mosaic.elements import dtypes
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import rows as primitives


def _indices(ctx: RuleContext, invals: Any) -> Any:
    # Here they are an array; `ctx.operands` makes numbers of constants.
    rows_ = ops.unflatten(ctx.eqn.params["tree"], list(invals))["rows"]
    return ctx.operand(rows_, "rows")


@lane(primitives.gather_rows_p)
def _gather_lane(ctx: RuleContext, *invals: Any) -> list[Any]:
    operands = ctx.operands(invals)
    rows.gather(
        ctx.part(operands["src"]),
        _indices(ctx, invals),
        ctx.part(operands["dst"]),
        cp_async.barrier_of(ctx, operands["barrier"]),
        predicate_value(operands["predicate"]),
    )
    return []


@warpgroup(primitives.gather_rows_p)
def _gather_warpgroup(ctx: RuleContext, *invals: Any) -> list[Any]:
    operands = ctx.operands(invals)
    parts = [ctx.part(operands["src"]), ctx.part(operands["dst"])]
    pointer = cp_async.barrier_of(ctx, operands["barrier"])
    predicate = predicate_value(operands["predicate"])
    parts.append(_indices(ctx, invals).value)
    ir.Operation.create(
        "pallas_gpu.gather_rows", *cp_async.operands_of(parts, pointer, predicate)
    )
    return []


@expands("pallas_gpu.gather_rows")
def _expand_gather(expansion: Expansion, op: Any) -> None:
    rows.gather(
        gmem_view(expansion, op.operands[0]),
        expansion.operand(op, 2, dtypes.I32),
        smem_view(expansion, op.operands[1]),
        *cp_async.optional_operands(op, 3),
    )
    expansion.dead.append(op.operation)


@lane(primitives.scatter_rows_p)
def _scatter_lane(ctx: RuleContext, *invals: Any) -> list[Any]:
    operands = ctx.operands(invals)
    rows.scatter(
        ctx.part(operands["src"]),
        ctx.part(operands["dst"]),
        _indices(ctx, invals),
        predicate_value(operands["predicate"]),
    )
    _close_group(ctx)
    return []


@warpgroup(primitives.scatter_rows_p)
def _scatter_warpgroup(ctx: RuleContext, *invals: Any) -> list[Any]:
    operands = ctx.operands(invals)
    parts = [ctx.part(operands["src"]), ctx.part(operands["dst"])]
    predicate = predicate_value(operands["predicate"])
    parts.append(_indices(ctx, invals).value)
    ir.Operation.create(
        "pallas_gpu.scatter_rows", *cp_async.operands_of(parts, None, predicate)
    )
    _close_group(ctx)
    return []


def _close_group(ctx: RuleContext) -> None:
    # All threads have copies of their own, and each closes its group.
    if ctx.eqn.params["commit_group"]:
        tma.commit_group()


@expands("pallas_gpu.scatter_rows")
def _expand_scatter(expansion: Expansion, op: Any) -> None:
    _, predicate = cp_async.optional_operands(op, 3)
    rows.scatter(
        smem_view(expansion, op.operands[0]),
        gmem_view(expansion, op.operands[1]),
        expansion.operand(op, 2, dtypes.I32),
        predicate,
    )
    expansion.dead.append(op.operation)


@relates(primitives.gather_rows_p)
def _relate_gather(node: Node, *_: Any) -> list[Any]:
    return _related(node, "dst")


@relates(primitives.scatter_rows_p)
def _relate_scatter(node: Node, *_: Any) -> list[Any]:
    return _related(node, "src")


def _related(node: Node, smem: str) -> list[Any]:
    """Indices and SMEM are taken in any layout."""
    operands = node.operands
    node.use(node.part(operands[smem]), "indexed")
    rows_ = operands["rows"]
    node.take(rows_, node.variable(rows_), "rows")
    return []


@infers("pallas_gpu.gather_rows", "pallas_gpu.scatter_rows")
def _infer_rows(network: Network, op: ir.Operation, key: Key) -> None:
    """Indices and SMEM are taken in any layout."""
    part = array_of(network, op, 1 if op.name == "pallas_gpu.gather_rows" else 0)
    network.use_memory(Use(op, "indexed", part, network.weight))
    network.consume(op, 2, network.variable(op, op.operands[2].type, key))

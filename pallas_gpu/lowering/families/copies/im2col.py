# SPDX-License-Identifier: Apache-2.0
"""Copies of one pixel of each of some windows."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from pallas_gpu.layouts.gmem.im2col import Windows
from pallas_gpu.lowering.context import RuleContext, i32
from pallas_gpu.lowering.expansion.memory import gmem_view, smem_view
from pallas_gpu.lowering.expansion.walk import Expansion
from pallas_gpu.lowering.families.copies import cp_async
from pallas_gpu.lowering.families.mbarrier import predicate_value
from pallas_gpu.lowering.inference.collect import Node
from pallas_gpu.lowering.inference.constraints import array_of
from pallas_gpu.lowering.inference.network import Key, Network, Use
from pallas_gpu.lowering.rules import expands, infers, lane, relates, warpgroup
from pallas_gpu.mosaic.copies import im2col
from pallas_gpu.primitives.copies import im2col as primitives

_SHAPE, _PADDING = "window_shape", "padding"


def _scalars(ctx: RuleContext, values: Any) -> list[ir.Value]:
    found = map(i32, values)
    return [ctx.builder.i32(x) if isinstance(x, int) else x for x in found]


@lane(primitives.copy_im2col_p)
def _copy_lane(ctx: RuleContext, *invals: Any) -> list[Any]:
    operands = ctx.operands(invals)
    pointer = cp_async.barrier_of(ctx, operands["barrier"])
    assert pointer is not None
    im2col.load(
        ctx.eqn.params["windows"],
        ctx.part(operands["src"]),
        ctx.part(operands["dst"]),
        pointer,
        _scalars(ctx, operands["start"]),
        _scalars(ctx, operands["offsets"]),
        predicate_value(operands["predicate"]),
    )
    return []


@warpgroup(primitives.copy_im2col_p)
def _copy_warpgroup(ctx: RuleContext, *invals: Any) -> list[Any]:
    operands = ctx.operands(invals)
    parts = [ctx.part(operands["src"]), ctx.part(operands["dst"])]
    for name in ("start", "offsets"):
        parts += _scalars(ctx, operands[name])
    pointer = cp_async.barrier_of(ctx, operands["barrier"])
    predicate = predicate_value(operands["predicate"])
    results, values, attributes = cp_async.operands_of(parts, pointer, predicate)
    windows: Windows = ctx.eqn.params["windows"]
    padding = [n for pair in windows.padding for n in pair]
    attributes |= {
        _SHAPE: ir.DenseI64ArrayAttr.get(windows.shape),
        _PADDING: ir.DenseI64ArrayAttr.get(padding),
    }
    ir.Operation.create("pallas_gpu.copy_im2col", results, values, attributes)
    return []


@relates(primitives.copy_im2col_p)
def _relate(node: Node, *_: Any) -> list[Any]:
    node.use(node.part(node.operands["dst"]), "im2col")
    return []


@infers("pallas_gpu.copy_im2col")
def _infer_copy(network: Network, op: ir.Operation, key: Key) -> None:
    use = Use(op, "im2col", array_of(network, op, 1), network.weight)
    network.use_memory(use)


@expands("pallas_gpu.copy_im2col")
def _expand_copy(expansion: Expansion, op: Any) -> None:
    shape = tuple(ir.DenseI64ArrayAttr(op.attributes[_SHAPE]))
    padding = list(ir.DenseI64ArrayAttr(op.attributes[_PADDING]))
    pairs = tuple(zip(padding[::2], padding[1::2], strict=True))
    rank = len(shape)
    start, offsets = 2, 2 + rank + 2
    end = offsets + rank
    pointer, predicate = cp_async.optional_operands(op, end)
    assert pointer is not None
    im2col.load(
        Windows(shape, pairs),
        gmem_view(expansion, op.operands[0]),
        smem_view(expansion, op.operands[1]),
        pointer,
        list(op.operands)[start:offsets],
        list(op.operands)[offsets:end],
        predicate,
    )
    expansion.dead.append(op.operation)

# SPDX-License-Identifier: Apache-2.0
"""Copies by threads between GMEM and SMEM, and waits for them."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from pallas_gpu import _jax
from pallas_gpu.lowering import slow
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.expansion.memory import gmem_view, smem_view
from pallas_gpu.lowering.expansion.walk import Expansion
from pallas_gpu.lowering.families.mbarrier import (
    barrier_index,
    barrier_pointer,
    predicate_value,
)
from pallas_gpu.lowering.inference import sources
from pallas_gpu.lowering.inference.collect import Node
from pallas_gpu.lowering.inference.constraints import array_of
from pallas_gpu.lowering.inference.network import Key, Network, Use
from pallas_gpu.lowering.rules import expands, infers, lane, relates, uniform, warpgroup
from pallas_gpu.mosaic import tma
from pallas_gpu.mosaic.copies import cp_async
from pallas_gpu.primitives import cp_async as primitives

# Which of the optional operands an operation has: a barrier, a predicate.
_TRACKED, _PREDICATED = "tracked", "predicated"


def barrier_of(ctx: RuleContext, barrier: Any) -> ir.Value | None:
    """Returns the address of the barrier operand; None if there is none."""
    if barrier is None:
        return None
    index = barrier_index(barrier.ref, barrier.transforms)
    return barrier_pointer(ctx, barrier.ref, index)


@lane(primitives.cp_async_p)
def _load_lane(ctx: RuleContext, *invals: Any) -> list[Any]:
    operands = ctx.operands(invals)
    source = ctx.part(operands["src"])
    plan = cp_async.copy_gmem_to_smem(
        source,
        ctx.part(operands["dst"]),
        barrier_of(ctx, operands["barrier"]),
        predicate_value(operands["predicate"]),
    )
    slow.copied_by_threads(plan, source, lambda: _jax.where(ctx.eqn))
    return []


@warpgroup(primitives.cp_async_p)
def _load_warpgroup(ctx: RuleContext, *invals: Any) -> list[Any]:
    operands = ctx.operands(invals)
    pointer = barrier_of(ctx, operands["barrier"])
    parts = [ctx.part(operands["src"]), ctx.part(operands["dst"])]
    predicate = predicate_value(operands["predicate"])
    ir.Operation.create("pallas_gpu.cp_async", *operands_of(parts, pointer, predicate))
    return []


def operands_of(
    parts: list[ir.Value], pointer: ir.Value | None, predicate: ir.Value | None
) -> tuple[list[ir.Type], list[ir.Value], dict[str, ir.Attribute]]:
    """Returns a copy as types, operands and attributes of an operation."""
    optional = {_TRACKED: pointer, _PREDICATED: predicate}
    given = {key: value for key, value in optional.items() if value is not None}
    return [], [*parts, *given.values()], {key: ir.UnitAttr.get() for key in given}


def optional_operands(
    op: Any, first: int = 2
) -> tuple[ir.Value | None, ir.Value | None]:
    """Returns barrier and predicate of an operation, its operands from a position."""
    rest = iter(list(op.operands)[first:])
    keys = _TRACKED, _PREDICATED
    pointer, predicate = (
        next(rest) if key in op.operation.attributes else None for key in keys
    )
    return pointer, predicate


@expands("pallas_gpu.cp_async")
def _expand_load(expansion: Expansion, op: Any) -> None:
    source = gmem_view(expansion, op.operands[0])
    target = smem_view(expansion, op.operands[1])
    plan = cp_async.copy_gmem_to_smem(source, target, *optional_operands(op))
    slow.copied_by_threads(plan, source, lambda: sources.where(op.operation))
    expansion.dead.append(op.operation)


@lane(primitives.store_by_threads_p)
def _store_lane(ctx: RuleContext, *invals: Any) -> list[Any]:
    operands = ctx.operands(invals)
    target = ctx.part(operands["dst"])
    plan = cp_async.copy_smem_to_gmem(
        ctx.part(operands["src"]), target, predicate_value(operands["predicate"])
    )
    slow.copied_by_threads(plan, target, lambda: _jax.where(ctx.eqn))
    _close_group(ctx)
    return []


@warpgroup(primitives.store_by_threads_p)
def _store_warpgroup(ctx: RuleContext, *invals: Any) -> list[Any]:
    operands = ctx.operands(invals)
    parts = [ctx.part(operands["src"]), ctx.part(operands["dst"])]
    predicate = predicate_value(operands["predicate"])
    ir.Operation.create(
        "pallas_gpu.copy_smem_to_gmem_by_threads", *operands_of(parts, None, predicate)
    )
    _close_group(ctx)
    return []


def _close_group(ctx: RuleContext) -> None:
    """An empty group of TMA's, so that wait_smem_to_gmem counts the copy."""
    if ctx.eqn.params["commit_group"]:
        tma.commit_group()


@expands("pallas_gpu.copy_smem_to_gmem_by_threads")
def _expand_store(expansion: Expansion, op: Any) -> None:
    source = smem_view(expansion, op.operands[0])
    target = gmem_view(expansion, op.operands[1])
    plan = cp_async.copy_smem_to_gmem(source, target, optional_operands(op)[1])
    slow.copied_by_threads(plan, target, lambda: sources.where(op.operation))
    expansion.dead.append(op.operation)


@relates(primitives.cp_async_p)
def _relate_load(node: Node, *_: Any) -> list[Any]:
    """Threads access SMEM in any layout."""
    node.use(node.part(node.operands["dst"]), "indexed")
    return []


@relates(primitives.store_by_threads_p)
def _relate_store(node: Node, *_: Any) -> list[Any]:
    node.use(node.part(node.operands["src"]), "indexed")
    return []


@infers("pallas_gpu.cp_async", "pallas_gpu.copy_smem_to_gmem_by_threads")
def _infer_copy(network: Network, op: ir.Operation, key: Key) -> None:
    """Threads access SMEM in any layout."""
    part = array_of(network, op, 1 if op.name == "pallas_gpu.cp_async" else 0)
    network.use_memory(Use(op, "indexed", part, network.weight))


@uniform(primitives.wait_gmem_to_smem_p)
def _wait_gmem_to_smem(ctx: RuleContext) -> list[Any]:
    cp_async.wait_group(ctx.eqn.params["n"])
    return []

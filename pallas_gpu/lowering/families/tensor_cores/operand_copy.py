# SPDX-License-Identifier: Apache-2.0
"""Copies of left operands of tcgen05_mma to TMEM."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.expansion.memory import smem_view
from pallas_gpu.lowering.expansion.walk import Expansion
from pallas_gpu.lowering.families.tmem import constrain, packed, require, tmem_view
from pallas_gpu.lowering.inference.collect import Node
from pallas_gpu.lowering.inference.constraints import array_of
from pallas_gpu.lowering.inference.network import Key, Network, Use
from pallas_gpu.lowering.inference.spaces import smem as smem_space
from pallas_gpu.lowering.rules import expands, infers, lane, relates, warpgroup
from pallas_gpu.mosaic import dialect
from pallas_gpu.mosaic.tensor_cores import operand_copy
from pallas_gpu.primitives.tensor_cores import operand_copy as primitives


@lane(primitives.async_copy_smem_to_tmem_p)
def _copy_lane(ctx: RuleContext, *invals: Any) -> list[Any]:
    operands = ctx.operands(invals)
    operand_copy.copy_to_tmem(
        ctx.part(operands["smem"]),
        ctx.part(operands["tmem"]),
        collective=ctx.eqn.params["collective_axis"] is not None,
    )
    return []


@warpgroup(primitives.async_copy_smem_to_tmem_p)
def _copy_warpgroup(ctx: RuleContext, *invals: Any) -> list[Any]:
    operands = ctx.operands(invals)
    source, target = ctx.part(operands["smem"]), ctx.part(operands["tmem"])
    dialect.ops.async_store_smem_to_tmem(
        source, target, collective=ctx.eqn.params["collective_axis"] is not None
    )
    return []


@relates(primitives.async_copy_smem_to_tmem_p)
def _relate(node: Node, *_: Any) -> list[Any]:
    operands = node.operands
    target = node.part(operands["tmem"])
    # It reads the tiles of a left operand in SMEM.
    node.use(node.part(operands["smem"]), "mma", role=smem_space.COPIED)
    constrain(node, target, "", lambda: packed(target))
    return []


@infers("mosaic_gpu.async_store_smem_to_tmem")
def _infer_copy(network: Network, op: ir.Operation, key: Key) -> None:
    source, target = array_of(network, op, 0), array_of(network, op, 1)
    # It reads the tiles of a left operand in SMEM.
    network.use_memory(Use(op, "mma", source, network.weight, role=smem_space.COPIED))
    require(network, op, 1, "", lambda: packed(target))


@expands("mosaic_gpu.async_store_smem_to_tmem")
def _expand_copy(expansion: Expansion, op: Any) -> None:
    source, target = op.operands
    operand_copy.copy_to_tmem(
        smem_view(expansion, source),
        tmem_view(expansion, target),
        collective=ir.BoolAttr(op.attributes["collective"]).value,
    )
    expansion.dead.append(op.operation)

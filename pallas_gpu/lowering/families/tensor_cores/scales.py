# SPDX-License-Identifier: Apache-2.0
"""Copies of the scales of blocks to TMEM."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from pallas_gpu.layouts import TmemLayout
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.expansion.memory import smem_view
from pallas_gpu.lowering.expansion.walk import Expansion
from pallas_gpu.lowering.families.tmem import (
    infer_contiguous_copy,
    related_contiguous_copy,
    tmem_view,
)
from pallas_gpu.lowering.inference.collect import Node
from pallas_gpu.lowering.inference.network import Key, Network
from pallas_gpu.lowering.rules import expands, infers, lane, relates, warpgroup
from pallas_gpu.mosaic import dialect
from pallas_gpu.mosaic.tensor_cores import scales
from pallas_gpu.primitives.tensor_cores import scales as primitives


@lane(primitives.async_copy_scales_to_tmem_p)
def _copy_lane(ctx: RuleContext, *invals: Any) -> list[Any]:
    operands = ctx.operands(invals)
    scales.copy_to_tmem(
        ctx.part(operands["smem"]),
        ctx.part(operands["tmem"]),
        collective=ctx.eqn.params["collective_axis"] is not None,
    )
    return []


@warpgroup(primitives.async_copy_scales_to_tmem_p)
def _copy_warpgroup(ctx: RuleContext, *invals: Any) -> list[Any]:
    operands = ctx.operands(invals)
    source, target = ctx.part(operands["smem"]), ctx.part(operands["tmem"])
    dialect.ops.async_store_scales_smem_to_tmem(
        source, target, collective=ctx.eqn.params["collective_axis"] is not None
    )
    return []


@relates(primitives.async_copy_scales_to_tmem_p)
def _relate(node: Node, *_: Any) -> list[Any]:
    return related_contiguous_copy(
        node, TmemLayout.scales(), TmemLayout.scales_m64_collective()
    )


@infers("mosaic_gpu.async_store_scales_smem_to_tmem")
def _infer_copy(network: Network, op: ir.Operation, key: Key) -> None:
    infer_contiguous_copy(
        network, op, TmemLayout.scales(), TmemLayout.scales_m64_collective()
    )


@expands("mosaic_gpu.async_store_scales_smem_to_tmem")
def _expand_copy(expansion: Expansion, op: Any) -> None:
    source, target = op.operands
    scales.copy_to_tmem(
        smem_view(expansion, source),
        tmem_view(expansion, target),
        collective=ir.BoolAttr(op.attributes["collective"]).value,
    )
    expansion.dead.append(op.operation)

# SPDX-License-Identifier: Apache-2.0
"""Stores to the memory of all devices, and loads that combine it."""

from __future__ import annotations

from typing import Any

from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families import registers
from pallas_gpu.lowering.inference.collect import Node, Symbol
from pallas_gpu.lowering.rules import emits, relates
from pallas_gpu.primitives.devices.multimem import (
    multimem_load_reduce_p,
    multimem_store_p,
)


@relates(multimem_store_p)
def _relate_store(node: Node, *_: Any) -> list[Any]:
    registers.relate_write(node, node.operands["dst"], node.operands["value"])
    return []


@emits(multimem_store_p)
def _store(ctx: RuleContext, *invals: Any) -> list[Any]:
    operands = ctx.operands(invals, numbers=False)
    registers.write_memory(ctx, operands["dst"], operands["value"])
    return []


@relates(multimem_load_reduce_p)
def _relate_load(node: Node, *_: Any) -> Symbol:
    return registers.relate_read(node, node.operands["src"])


@emits(multimem_load_reduce_p)
def _load(ctx: RuleContext, *invals: Any) -> Any:
    src, reduction = ctx.operands(invals)["src"], ctx.op.params["reduction_op"]
    # A mesh of one device has nothing to combine.
    several = ctx.builder.spec.devices > 1
    return registers.read_memory(ctx, src, reduction=reduction if several else None)

# SPDX-License-Identifier: Apache-2.0
"""Stores to the memory of all devices, and loads that combine it."""

from __future__ import annotations

from typing import Any

from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families import registers
from pallas_gpu.lowering.inference.collect import Node, Symbol
from pallas_gpu.lowering.references import Reference
from pallas_gpu.lowering.rules import emits, relates
from pallas_gpu.primitives.devices.multimem import (
    multimem_load_reduce_p,
    multimem_store_p,
)
from pallas_gpu.program.nodes import Access


@relates(multimem_store_p)
def _relate_store(node: Node, dst: Access, value: Symbol) -> None:
    registers.relate_write(node, dst, value)


@emits(multimem_store_p)
def _store(ctx: RuleContext, dst: Reference, value: Any) -> None:
    registers.write_memory(ctx, dst, value)


@relates(multimem_load_reduce_p)
def _relate_load(node: Node, src: Access) -> Symbol:
    return registers.relate_read(node, src)


@emits(multimem_load_reduce_p)
def _load(ctx: RuleContext, src: Reference, *, reduction_op: str) -> Any:
    # A mesh of one device has nothing to combine.
    reduction = reduction_op if ctx.builder.spec.devices > 1 else None
    return registers.read_memory(ctx, src, reduction=reduction)

# SPDX-License-Identifier: Apache-2.0
"""Loads, stores and casts."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from pallas_gpu.lowering.expansion.expand import Expansion, expands
from pallas_gpu.lowering.expansion.memory import view
from pallas_gpu.lowering.registers import deals_evenly
from pallas_gpu.mosaic import gmem, smem
from pallas_gpu.mosaic import registers as regs
from pallas_gpu.mosaic.elements import dtypes


@expands("mosaic_gpu.vector_load")
def _load(expansion: Expansion, op: Any) -> None:
    source = view(expansion, op.operands[0])
    placement = expansion.assignment.result(op.result)
    if placement is None:
        placement = regs.default_placement(tuple(source.shape), source.dtype)
    if isinstance(source, gmem.GmemView):
        array = gmem.load(source, placement)
    else:
        optimized = _is_optimized(op) and deals_evenly(source)
        array = smem.load(source, placement, optimized=optimized)
    expansion.set(op.result, array)
    expansion.dead.append(op.operation)


@expands("mosaic_gpu.vector_store")
def _store(expansion: Expansion, op: Any) -> None:
    target = view(expansion, op.operands[1])
    array = expansion.placed(op, 0)
    array = regs.with_sign(array, target.dtype)
    if isinstance(target, gmem.GmemView):
        gmem.store(target, array)
    else:
        # The author chooses no layout for a store and cannot accept bank conflicts: it
        # has them where no layout is free of them, for inference makes them dear.
        smem.store(target, array, optimized=False)
    expansion.dead.append(op.operation)


def _is_optimized(op: Any) -> bool:
    if "optimized" not in op.attributes:
        return True
    return ir.BoolAttr(op.attributes["optimized"]).value


@expands("memref.load")
def _load_element(expansion: Expansion, op: Any) -> None:
    source = view(expansion, op.operands[0])
    module = smem if isinstance(source, smem.SmemView) else gmem
    op.result.replace_all_uses_with(module.load_scalar(source))
    expansion.dead.append(op.operation)


@expands("memref.store")
def _store_element(expansion: Expansion, op: Any) -> None:
    value, ref = op.operands[0], op.operands[1]
    target = view(expansion, ref)
    module = smem if isinstance(target, smem.SmemView) else gmem
    module.store_scalar(target, dtypes.bitcast(value, target.dtype))
    expansion.dead.append(op.operation)


@expands("mosaic_gpu.layout_cast")
def _cast(expansion: Expansion, op: Any) -> None:
    expansion.set(op.result, expansion.operand(op, 0))
    expansion.dead.append(op.operation)

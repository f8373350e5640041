# SPDX-License-Identifier: Apache-2.0
"""wgmma, accumulators that are updated in part, and optimization barriers."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from pallas_gpu.lowering.expansion.expand import Expansion, expands, is_array
from pallas_gpu.lowering.expansion.memory import smem_view
from pallas_gpu.mosaic import logical, wgmma
from pallas_gpu.mosaic import registers as regs


@expands("mosaic_gpu.wgmma")
def _wgmma(expansion: Expansion, op: Any) -> None:
    acc = expansion.placed(op, 0)
    left: Any = op.operands[1]
    left = expansion.placed(op, 1) if is_array(left) else smem_view(expansion, left)
    right = smem_view(expansion, op.operands[2])
    expansion.set(op.result, wgmma.mma(acc, left, right))
    expansion.dead.append(op.operation)


@expands("vector.insert_strided_slice")
def _insert(expansion: Expansion, op: Any) -> None:
    starts = [ir.IntegerAttr(x).value for x in ir.ArrayAttr(op.attributes["offsets"])]
    part, whole = expansion.placed(op, 0), expansion.placed(op, 1)
    expansion.set(op.result, wgmma.accumulator_update(whole, starts, part))
    expansion.dead.append(op.operation)


@expands("mosaic_gpu.optimization_barrier")
def _barrier(expansion: Expansion, op: Any) -> None:
    operands = [
        expansion.operand(op, i)
        if is_array(x)
        else regs.splat(x, logical.dtype_of(x.type))
        for i, x in enumerate(op.operands)
    ]
    held = wgmma.optimization_barrier(operands)
    for result, array in zip(op.results, held, strict=True):
        if is_array(result):
            expansion.set(result, array)
        else:
            result.replace_all_uses_with(array.value)  # type: ignore[union-attr]
    expansion.dead.append(op.operation)

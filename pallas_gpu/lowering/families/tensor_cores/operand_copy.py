# SPDX-License-Identifier: Apache-2.0
"""Copies of left operands of tcgen05_mma to TMEM."""

from __future__ import annotations

from typing import Any

from pallas_gpu.emitters.tensor_cores import operand_copy
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.inference.collect import Node
from pallas_gpu.lowering.inference.spaces import smem as smem_space
from pallas_gpu.lowering.rules import emits, relates
from pallas_gpu.primitives.tensor_cores import operand_copy as primitives


@emits(primitives.async_copy_smem_to_tmem_p)
def _copy(ctx: RuleContext, smem: Any, tmem: Any, *, collective_axis: Any) -> None:
    collective = collective_axis is not None
    operand_copy.copy_to_tmem(ctx.view(smem), ctx.view(tmem), collective=collective)


@relates(primitives.async_copy_smem_to_tmem_p)
def _relate(node: Node, smem: Any, tmem: Any) -> None:
    # It reads the tiles of a left operand in SMEM.
    node.use(node.part(smem), "mma", role=smem_space.COPIED)
    node.use(node.part(tmem), "mma")

# SPDX-License-Identifier: Apache-2.0
"""Copies of the scales of blocks to TMEM."""

from __future__ import annotations

from typing import Any

from pallas_gpu.emitters.tensor_cores import scales
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.rules import emits, relates, used
from pallas_gpu.primitives.tensor_cores import scales as primitives


@emits(primitives.async_copy_scales_to_tmem_p)
def _copy(ctx: RuleContext, *invals: Any) -> list[Any]:
    operands = ctx.operands(invals)
    scales.copy_to_tmem(
        ctx.view(operands["smem"]),
        ctx.view(operands["tmem"]),
        collective=ctx.eqn.params["collective_axis"] is not None,
    )
    return []


# It copies contiguous bytes.
relates(primitives.async_copy_scales_to_tmem_p)(
    lambda node, *_: used(node, smem="pointer", tmem="mma")
)

# SPDX-License-Identifier: Apache-2.0
"""Regions of single warps: between two barriers of the warpgroup, emitted once.

The parity bits of barriers are register state, so each warp has its own by itself: a
branch on the warp's number gives threads of different warps different bits.

Under Warpgroup semantics copies and stores are expanded when the layouts are known; an
attribute (`RuleContext.mark_scope`) tells them then that a warp issues.
"""

from __future__ import annotations

from typing import Any

from pallas_gpu.lowering.context import I32, RuleContext, lower_jaxpr
from pallas_gpu.lowering.rules import uniform
from pallas_gpu.mosaic import elementwise, mbarrier
from pallas_gpu.primitives.warp import warp_map_p


@uniform(warp_map_p)
def _warp_map(ctx: RuleContext, *captured: Any) -> list[Any]:
    # A warp may touch what the others were still using before, and the warpgroup goes
    # on with what any of them has done.
    mbarrier.warpgroup_barrier()
    number = elementwise.scalar(ctx.builder.threads.warp, I32)
    with ctx.builder.in_warp():
        lower_jaxpr(ctx.kernel, ctx.eqn.params["jaxpr"], [*captured, number])
    mbarrier.warpgroup_barrier()
    return []

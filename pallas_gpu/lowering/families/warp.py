# SPDX-License-Identifier: Apache-2.0
"""warp_map: regions of single warps, between two barriers of the warpgroup.

The region is emitted once. The parity bits of barriers are register state, so each warp
has its own: a branch on the warp index sets different bits in threads of different
warps.

Under Warpgroup semantics copies and stores are expanded after inference; an attribute
(`RuleContext.mark_issuer`) records that a single warp issues them.
"""

from __future__ import annotations

from typing import Any

from pallas_gpu.lowering.context import I32, RuleContext, lower_jaxpr
from pallas_gpu.lowering.rules import uniform
from pallas_gpu.mosaic import elementwise, mbarrier
from pallas_gpu.primitives.warp import warp_map_p


@uniform(warp_map_p)
def _warp_map(ctx: RuleContext, *captured: Any) -> list[Any]:
    # A warp may access what other warps were using before, and the warpgroup continues
    # with the effects of all of them.
    mbarrier.warpgroup_barrier()
    number = elementwise.scalar(ctx.builder.threads.warp, I32)
    axes, name = ctx.kernel.axes, ctx.eqn.params["axis_name"]
    if name is not None:
        axes[name] = ctx.builder.threads.warp
    with ctx.builder.in_warp():
        lower_jaxpr(ctx.kernel, ctx.eqn.params["jaxpr"], [*captured, number])
    axes.pop(name, None)
    mbarrier.warpgroup_barrier()
    return []

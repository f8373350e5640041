# SPDX-License-Identifier: Apache-2.0
"""warp_map: regions of single warps, between two barriers of the warpgroup.

The region is emitted once. The parity bits of barriers are register state, so each warp
has its own: a branch on the warp index sets different bits in threads of different
warps.

An array of a warp is one in a layout in which no element depends on the warp: each
warp holds another array in it.
"""

from __future__ import annotations

from typing import Any

from pallas_gpu.emitters import elementwise, mbarrier
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.inference.collect import Node
from pallas_gpu.lowering.references import I32
from pallas_gpu.lowering.rules import emits_and_relates
from pallas_gpu.primitives.warp import warp_map_p


@emits_and_relates(warp_map_p)
def _warp_map(on: RuleContext | Node, *captured: Any, axis_name: Any) -> None:
    if isinstance(on, Node):
        outer, on.network.in_warp = on.network.in_warp, True
        number = on.scalar(on.op.regions[0].inputs[-1], "number")
        on.run(0, [*captured, number])
        on.network.in_warp = outer
        return
    # A warp may access what other warps were using before, and the warpgroup continues
    # with the effects of all of them.
    mbarrier.warpgroup_barrier()
    warp = on.builder.threads.warp
    if axis_name is not None:
        on.kernel.axes[axis_name] = warp
    with on.builder.in_warp():
        on.run(0, [*captured, elementwise.scalar(warp, I32)])
    on.kernel.axes.pop(axis_name, None)
    mbarrier.warpgroup_barrier()

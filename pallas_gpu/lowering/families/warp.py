# SPDX-License-Identifier: Apache-2.0
"""warp_map: regions of single warps, between two barriers of the warpgroup.

The region is emitted once. The parity bits of barriers are register state, so each warp
has its own: a branch on the warp index sets different bits in threads of different
warps.

An array of a warp is one in a layout in which no element depends on the warp: each
warp holds another array in it. Under Warpgroup semantics arrays get layouts, and are
expanded, later: an attribute marks the operations of the region.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

from jaxlib.mlir import ir

from pallas_gpu.lowering.context import I32, RuleContext
from pallas_gpu.lowering.inference.collect import Node
from pallas_gpu.lowering.rules import relates, uniform
from pallas_gpu.mosaic import elementwise, logical, mbarrier
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
    # Each warp has a stack of its own.
    block_top, ctx.kernel.smem_top_bytes = ctx.kernel.smem_top_bytes, 0
    with ctx.builder.in_warp(), _marked(ctx):
        ctx.run(0, [*captured, number])
    ctx.kernel.smem_top_bytes = block_top
    axes.pop(name, None)
    mbarrier.warpgroup_barrier()
    return []


@relates(warp_map_p)
def _relate(node: Node, *captured: Any) -> list[Any]:
    outer, node.network.in_warp = node.network.in_warp, True
    number = node.scalar(node.op.regions[0].inputs[-1], "number")
    node.run(0, [*captured, number])
    node.network.in_warp = outer
    return []


@contextlib.contextmanager
def _marked(ctx: RuleContext) -> Iterator[None]:
    """Marks what is emitted, if it is expanded later."""
    operations = ir.InsertionPoint.current.block.operations
    # The barrier; numbers of operations change, as hoisted ones are put before it.
    last_before = operations[len(operations) - 1]
    yield
    if "expand" not in ctx.kernel.semantics.stages:
        return
    emitted = itertools.takewhile(lambda op: op != last_before, reversed([*operations]))
    for op in emitted:
        if not op.operation.name.startswith(logical.SCALAR):
            op.operation.attributes[logical.IN_WARP] = ir.UnitAttr.get()

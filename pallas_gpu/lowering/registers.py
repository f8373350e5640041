# SPDX-License-Identifier: Apache-2.0
"""Reads and writes of references, loads with a layout, layout casts."""

from __future__ import annotations

import functools
import math
from typing import Any

from pallas_gpu import types
from pallas_gpu.layouts import Layout, WGSplatLayout
from pallas_gpu.lowering import access, scratch, wgmma
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.memory import memory_view
from pallas_gpu.lowering.rules import lane
from pallas_gpu.mosaic import elementwise, gmem, mbarrier, relayout, smem
from pallas_gpu.mosaic import registers as regs
from pallas_gpu.primitives.registers import layout_cast_p, load_p

# Rows and columns of the smallest tile that the tensor core's layouts cover.
_WGMMA_ROWS, _WGMMA_COLUMNS = 64, 8


def _covered_by_wgmma(rows: int, columns: int) -> bool:
    return rows % _WGMMA_ROWS == 0 and columns % _WGMMA_COLUMNS == 0


def default_layout(handle: Any, view: Any) -> Any:
    """Returns the layout of a load that asks for none.

    An array tiled for the tensor core gives WGMMA, every other a strided layout.
    """
    shape = tuple(view.shape)
    tiled = isinstance(handle, vals.SmemHandle) and handle.layout.tiling is not None
    if tiled and len(shape) == 2 and _covered_by_wgmma(*shape):
        return regs.place(Layout.WGMMA, shape)
    return regs.default_placement(shape, handle.dtype)


def read(ctx: RuleContext, handle: Any, transforms: Any, layout: Any, optimized: bool):
    """Loads a part of a reference."""
    view = memory_view(ctx, handle, transforms)
    module = smem if isinstance(handle, vals.SmemHandle) else gmem
    if tuple(view.shape) == ():
        return elementwise.scalar(module.load_scalar(view), handle.dtype)
    placement = (
        default_layout(handle, view)
        if layout is None
        else regs.place(layout, tuple(view.shape))
    )
    if module is gmem:
        return gmem.load(view, placement)
    optimized = optimized and deals_evenly(view)
    return smem.load(view, placement, optimized=optimized)


def deals_evenly(view: Any) -> bool:
    """False for odd shapes, whose default layouts may meet bank conflicts."""
    return math.prod(view.shape) % types.mesh.WARPGROUP_THREADS == 0


def write(ctx: RuleContext, handle: Any, transforms: Any, value: Any) -> None:
    """Stores into a part of a reference, in order with the warpgroup's accesses."""
    view = memory_view(ctx, handle, transforms)
    automatic = not ctx.kernel.params.compiler_params.unsafe_no_auto_barriers
    module = smem if isinstance(handle, vals.SmemHandle) else gmem
    if automatic:
        # Another warp may still read what this store overwrites.
        mbarrier.meet()
    if tuple(view.shape) == ():
        module.store_scalar(view, vals.scalar_value(value))
    else:
        if isinstance(value, regs.Deferred):
            value = value.materialize(default_layout(handle, view))
        if module is gmem:
            gmem.store(view, value)
        else:
            smem.store(view, value, optimized=deals_evenly(view))
    if automatic:
        mbarrier.meet()


def _read_like(ctx: RuleContext, handle: Any, transforms: Any, like: Any) -> Any:
    return read(ctx, handle, transforms, getattr(like, "layout", None), True)


access.enter_rules(
    lane,
    read=_read_like,
    write=write,
    add=functools.partial(elementwise.apply, "add"),
    accumulators=wgmma,
)


@lane(load_p)
def _load(ctx: RuleContext, *invals: Any) -> Any:
    src = ctx.operands(invals)["src"]
    params = ctx.eqn.params
    return read(ctx, src.ref, src.transforms, params["layout"], params["optimized"])


@lane(layout_cast_p)
def _layout_cast(ctx: RuleContext, x: Any) -> Any:
    if vals.is_scalar(x):
        return x
    layout = regs.place(ctx.eqn.params["layout"], x.shape)
    room = None
    if isinstance(x, regs.RegisterArray) and not isinstance(layout, WGSplatLayout):
        room = scratch.for_relayout(ctx.kernel, x, layout)
    return relayout.layout_cast(x, layout, room)

# SPDX-License-Identifier: Apache-2.0
"""Loops of products that wait in each iteration for what they load from GMEM."""

from __future__ import annotations

from pallas_gpu.entry.call import CallParams
from pallas_gpu.lowering import slow
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.program.nodes import Kind, Op, Region

_PRODUCTS = ("wgmma", "mma", "tcgen05_mma")
_LOOPS = (Kind.FOR, Kind.WHILE)
# Shorter loops, and smaller arrays than the operands of products, take little time.
FEW_ITERATIONS, _FEW_ELEMENTS = 8, 1024
_PIPELINES = "plgpu.emit_pipeline, or the grid of a pallas_call"


def load(ctx: RuleContext, elements: int, size_bytes: int) -> None:
    """Warns of a load from GMEM that the products of its loop wait for.

    Args:
      ctx: of the load.
      elements, size_bytes: of the array.
    """
    loops = [(op, i) for op, i, _ in ctx.kernel.path if op.kind in _LOOPS]
    if not loops or elements < _FEW_ELEMENTS:
        return
    loop, i = loops[-1]
    body = loop.regions[i]
    iterations = loop.params.get("length", 0)
    if iterations < FEW_ITERATIONS:
        # Nothing is known of the others.
        return
    if is_carried(ctx.op, body) or not _multiplies(body):
        return
    slow.warn(
        said(iterations, size_bytes),
        "products in the same loop",
        what_helps(ctx.kernel.params, ctx.op),
        lambda: ctx.op.where,
    )


def said(iterations: float, size_bytes: float) -> str:
    """Returns what a loop waits for, in a sentence."""
    return (
        f"each of {iterations:g} iterations waits for {size_bytes:,.0f} bytes that "
        "threads load from GMEM"
    )


def what_helps(params: CallParams, op: Op) -> str:
    """Returns what helps where products wait for a load.

    Args:
      params: of the kernel, which say why a loop does not copy the load ahead.
      op: the load.
    """
    why = dict(params.not_ahead).get(op.where or "")
    if why is None:
        return f"load ahead: plgpu.loop(..., num_stages=3), {_PIPELINES}"
    return f"the loop does not copy it ahead: {why}; or use {_PIPELINES}"


def is_carried(op: Op, body: Region) -> bool:
    """Whether a loop only carries the results of an operation: the next one uses them.

    Args:
      op: the operation.
      body: of the loop.
    """
    used = {x for other in body.ops for x in other.inputs}
    return any(x in body.results for x in op.results) and not used & {*op.results}


def _multiplies(region: Region) -> bool:
    return any(
        op.name in _PRODUCTS or any(map(_multiplies, op.regions)) for op in region.ops
    )

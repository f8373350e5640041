# SPDX-License-Identifier: Apache-2.0
"""The operation that moves the elements of arrays through scratch in SMEM.

It executes the plans of `layouts/moves/rearrange.py`: for reshapes, slices,
concatenations and others. Where the layouts permit it, registers are renamed instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu import errors
from pallas_gpu.layouts import LinearLayout
from pallas_gpu.layouts.moves import rearrange as plans
from pallas_gpu.layouts.moves.rearrange import Rearrangement
from pallas_gpu.layouts.registers.placement import Placement
from pallas_gpu.lowering import scratch
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families import shapes
from pallas_gpu.lowering.inference import relations
from pallas_gpu.lowering.inference.collect import Node, Symbol
from pallas_gpu.mosaic import registers as regs
from pallas_gpu.mosaic.elements import dtypes
from pallas_gpu.mosaic.moves import image
from pallas_gpu.mosaic.moves import rearrange as moves
from pallas_gpu.mosaic.registers import default_placement

# From operands in registers and the result's layout to the result.
Rename = Callable[[Sequence[regs.RegisterArray], Placement], Any]


def moved(
    ctx: RuleContext,
    plan: Rearrangement,
    operands: Sequence[Any],
    *,
    starts: Sequence[ir.Value] = (),
    other: Any = None,
    target: Placement | None = None,
    rename: Rename | None = None,
    slot: str = "moved",
) -> regs.RegisterArray:
    """Moves arrays through scratch, to the default layout unless another is given.

    Args:
      starts: the dynamic starts of the plan.
      other: what the elements are that the plan leaves out.
      target: the result's layout, where inference has not assigned one.
      rename: returns the result if it consists of registers of the operands.
      slot: as in `related_moved`.
    """
    assigned = ctx.target(slot)
    if assigned is None:
        held = [in_registers(ctx, x) for x in operands]
        target = target or default_placement(plan.shape, dtypes.bits(held[0].dtype))
        return through_scratch(ctx.kernel, plan, held, starts, other, target)
    held = [ctx.placed(x, f"{slot} {i}") for i, x in enumerate(operands)]
    if rename is not None and (result := rename(held, assigned)) is not None:
        return result
    if other is not None:
        other = ctx.operand(other, f"{slot} other")
    return through_scratch(ctx.kernel, plan, held, starts, other, assigned)


def related_moved(
    node: Node,
    operands: Sequence[Symbol],
    aval: Any,
    *,
    other: Symbol | None = None,
    renames: Sequence[relations.Relation] = (),
    slot: str = "moved",
) -> Symbol:
    """The relation of `moved`.

    Args:
      aval: the result's type.
      renames: for each operand how registers are renamed; empty if data always moves.
    """
    moved_bits = 0 if renames else max(dtypes.bits(np.dtype(aval.dtype)), 8)
    made = node.variable(aval, "" if slot == "moved" else slot, moved_bits=moved_bits)
    for i, x in enumerate(operands):
        role = f"operand {i}" if len(operands) > 1 else "operand"
        role = role if slot == "moved" else f"{slot}'s {role}"
        taken = node.variable(x, role, moved_bits=moved_bits)
        node.take(x, taken, f"{slot} {i}")
        if renames:
            node.network.move(taken, made, renames[i])
    if other is not None:
        node.taken(other, made, f"{slot} other")
    return node.make(made, aval, slot)


def through_scratch(
    kernel: Any,
    plan: Rearrangement,
    operands: Sequence[regs.RegisterArray],
    starts: Sequence[ir.Value],
    other: Any,
    target: Placement,
) -> regs.RegisterArray:
    """Moves arrays through scratch, which grows for it."""
    room = scratch.for_data(kernel, image.size_bytes(plan.size, operands[0].dtype))
    return moves.rearrange(plan, operands, target, room, starts=starts, other=other)


def in_registers(ctx: RuleContext, x: Any) -> regs.RegisterArray:
    """Materializes a deferred array in the default layout."""
    return _emitted(ctx, x, {})


def _emitted(
    ctx: RuleContext, x: Any, done: dict[int, regs.RegisterArray]
) -> regs.RegisterArray:
    # An operand that is used twice is emitted once.
    if id(x) not in done:
        done[id(x)] = _emit(ctx, x, done)
    return done[id(x)]


def _emit(
    ctx: RuleContext, x: Any, done: dict[int, regs.RegisterArray]
) -> regs.RegisterArray:
    if isinstance(x, regs.RegisterArray):
        return x
    try:
        return shapes.placed(x)
    except errors.LayoutError:
        pass  # the operands of broadcasts are in different threads
    match x:
        case regs.Broadcast():
            plan = plans.broadcast(x.operand.shape, x.shape, x.dims)
            return moved(ctx, plan, [x.operand])
        case regs.Mapped():
            columns = [_emitted(ctx, o, done).values for o in x.operands]
            values = regs.map_registers(x.emit, columns)
            layout = default_placement(x.shape, dtypes.bits(x.dtype))
            return regs.RegisterArray(values, layout, x.dtype)
    raise errors.InternalError("an array that no layout suits", got=type(x).__name__)


def renamed_part(
    x: regs.RegisterArray, starts: Sequence[int], target: Placement
) -> regs.Array | None:
    """The part, if it consists of registers of the array; else None."""
    try:
        part = regs.static_slice(x, starts, target.shape)
    except errors.LayoutError:
        return None
    return part if getattr(part, "layout", None) == target else None


def joined(
    operands: Sequence[regs.RegisterArray],
    parts: Sequence[Sequence[int]],
    target: Placement,
) -> regs.RegisterArray | None:
    """The registers of all operands as those of the whole; None if data would move."""
    if not isinstance(target, LinearLayout):
        return None
    values: dict[int, ir.Value] = {}
    for x, start in zip(operands, parts, strict=True):
        if not isinstance(x.layout, LinearLayout):
            return None
        try:
            chosen = target.slice_registers(start, x.shape)
            if target.slice(start, x.shape) != x.layout:
                return None
        except errors.LayoutError:
            return None
        values.update(zip(chosen, x.values, strict=True))
    ordered = tuple(values[r] for r in range(target.num_registers))
    return regs.RegisterArray(ordered, target, operands[0].dtype)

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

from pallas_gpu.emitters import registers as regs
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.moves import image
from pallas_gpu.emitters.moves import rearrange as moves
from pallas_gpu.emitters.registers import default_placement
from pallas_gpu.layouts.moves.rearrange import Rearrangement
from pallas_gpu.layouts.registers.placement import Placement
from pallas_gpu.lowering import scratch
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.inference import relations
from pallas_gpu.lowering.inference.collect import Node, Symbol

# From operands in registers and the result's layout, where it is assigned, to the
# result; None if data moves.
Rename = Callable[[Sequence[regs.RegisterArray], Placement | None], Any]


def moved(
    ctx: RuleContext,
    plan: Rearrangement,
    operands: Sequence[Any],
    *,
    starts: Sequence[ir.Value] = (),
    other: Any = None,
    rename: Rename | None = None,
    slot: str = "moved",
) -> regs.RegisterArray:
    """Moves arrays through scratch, which grows for it.

    Where no layout is assigned, the result has that of an array of its shape, or else
    the default one.

    Args:
      starts: the dynamic starts of the plan.
      other: what the elements are that the plan leaves out.
      rename: returns the result if it consists of registers of the operands.
      slot: as in `related_moved`.
    """
    target = ctx.target(slot)
    held = [ctx.placed(x, f"{slot} {i}") for i, x in enumerate(operands)]
    if rename is not None and (result := rename(held, target)) is not None:
        return result
    if other is not None:
        placed = ctx.operand if isinstance(other, regs.Splat) else ctx.placed
        other = placed(other, f"{slot} other")
    if target is None:
        same = (x.layout for x in (other, *held) if _is_held(x, plan.shape))
        default = default_placement(plan.shape, dtypes.bits(held[0].dtype))
        target = next(same, default)
    return through_scratch(ctx.kernel, plan, held, starts, other, target)


def _is_held(x: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(x, regs.RegisterArray) and x.shape == shape


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

# SPDX-License-Identifier: Apache-2.0
"""The operation that moves the elements of arrays through scratch in SMEM.

It executes the plans of `layouts/moves/rearrange.py`: for reshapes, slices,
concatenations and others. Where the layouts permit it, registers are renamed instead. A
rule says what moves; it is both the emit rule and the relation of its primitive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu import errors
from pallas_gpu.emitters import registers as regs
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.moves import image
from pallas_gpu.emitters.moves import rearrange as moves
from pallas_gpu.emitters.registers import default_placement
from pallas_gpu.layouts.moves.rearrange import Rearrangement
from pallas_gpu.layouts.registers.placement import Placement
from pallas_gpu.lowering import scratch
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.inference.collect import Node
from pallas_gpu.lowering.inference.network import Move
from pallas_gpu.lowering.inference.relations import Relation


def moved(
    on: RuleContext | Node,
    plan: Rearrangement,
    operands: Sequence[Any],
    aval: Any,
    *,
    starts: Sequence[ir.Value] = (),
    other: Any = None,
    renames: Sequence[Relation] = (),
    slot: str = "moved",
) -> Any:
    """Moves arrays through scratch, which grows for it, or declares that it does.

    Where no layout is assigned, the result has that of an array of its shape, or else
    the default one.

    Args:
      aval: the result's type.
      starts: the dynamic starts of the plan.
      other: what the elements are that the plan leaves out: an array, or a scalar.
      renames: for each operand how its registers are renamed; empty if data always
        moves.
      slot: names the result and its operands.
    """
    if isinstance(on, Node):
        return _related(on, operands, aval, other, renames, slot)
    target = on.target(slot)
    if renames and target is None:
        operands = _in_one_layout(operands)
    held = [on.placed(x, f"{slot} {i}") for i, x in enumerate(operands)]
    if renames and (renamed := _renamed(renames, held, target)) is not None:
        return renamed
    if other is not None:
        other = vals.as_shape(other, plan.shape)
        placed = on.operand if isinstance(other, regs.Splat) else on.placed
        other = placed(other, f"{slot} other")
    if target is None:
        arrays = (x for x in (other, *held) if isinstance(x, regs.RegisterArray))
        same = (x.layout for x in arrays if x.shape == plan.shape)
        default = default_placement(plan.shape, dtypes.bits(held[0].dtype))
        target = next(same, default)
    return through_scratch(on.kernel, plan, held, starts, other, target)


def _in_one_layout(operands: Sequence[Any]) -> list[Any]:
    """Deferred arrays in the layout of the first other one, if no data moves."""
    found = list(operands)
    first = next((x for x in operands if isinstance(x, regs.RegisterArray)), None)
    for i, x in enumerate(operands):
        if first is not None and isinstance(x, regs.Deferred):
            with contextlib.suppress(errors.LayoutError):
                found[i] = x.materialize(first.layout)
    return found


def _renamed(
    renames: Sequence[Relation],
    held: Sequence[regs.RegisterArray],
    target: Placement | None,
) -> regs.RegisterArray | None:
    """The registers of the operands as those of the result; None if data moves."""
    layout = target or renames[0].forward(held[0].layout)
    if layout is None:
        return None
    values: dict[int, ir.Value] = {}
    for relation, x in zip(renames, held, strict=True):
        pairs = relation.renamed(x.layout, layout)
        if pairs is None:
            return None
        values.update((to, x.values[own]) for own, to in pairs)
    ordered = tuple(values[r] for r in range(layout.num_registers))
    return regs.RegisterArray(ordered, layout, held[0].dtype)


def _related(
    node: Node,
    operands: Sequence[Any],
    aval: Any,
    other: Any,
    renames: Sequence[Relation],
    slot: str,
) -> Any:
    moved_bits = 0 if renames else max(dtypes.bits(np.dtype(aval.dtype)), 8)
    made = node.variable(aval, "" if slot == "moved" else slot, moved_bits=moved_bits)
    for i, x in enumerate(operands):
        role = f"operand {i}" if len(operands) > 1 else "operand"
        role = role if slot == "moved" else f"{slot}'s {role}"
        taken = node.variable(x, role, moved_bits=moved_bits)
        node.take(x, taken, f"{slot} {i}")
        if renames:
            node.network.moves.append(Move(taken, made, renames[i]))
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

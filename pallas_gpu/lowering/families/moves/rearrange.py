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
from pallas_gpu.layouts.moves.rearrange import Affine, Rearrangement
from pallas_gpu.layouts.registers.placement import Placement
from pallas_gpu.lowering import scratch
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.expansion.walk import Expansion
from pallas_gpu.lowering.families import shapes
from pallas_gpu.lowering.inference import relations
from pallas_gpu.lowering.inference.collect import Node, Symbol
from pallas_gpu.lowering.inference.network import Key, Network, digest
from pallas_gpu.lowering.rules import expands, infers
from pallas_gpu.mosaic import logical
from pallas_gpu.mosaic import registers as regs
from pallas_gpu.mosaic.elements import dtypes
from pallas_gpu.mosaic.moves import image
from pallas_gpu.mosaic.moves import rearrange as moves
from pallas_gpu.mosaic.registers import default_placement

# Attributes of the warpgroup-level operation: a plan, and how registers are renamed.
_DTYPE, _SOURCES, _OTHER, _PARTS, _WHOLE = (
    "dtype", "sources", "other", "parts", "whole"
)  # fmt: skip
_FIELDS = ("result", "firsts", "steps", "counts", "dynamic")
_ALL = -1  # a count of None

# From operands in registers and the result's layout to the result.
Rename = Callable[[Sequence[regs.RegisterArray], Placement], Any]


# --- both semantics: an operation on arrays -------------------------------------------


def lane_moved(
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
        return moved(ctx.kernel, plan, held, starts, other, target)
    held = [ctx.placed(x, f"{slot} {i}") for i, x in enumerate(operands)]
    if rename is not None and (result := rename(held, assigned)) is not None:
        return result
    if other is not None:
        other = ctx.operand(other, f"{slot} other")
    return moved(ctx.kernel, plan, held, starts, other, assigned)


def related_moved(
    node: Node,
    operands: Sequence[Symbol],
    aval: Any,
    *,
    other: Symbol | None = None,
    renames: Sequence[relations.Relation] = (),
    slot: str = "moved",
) -> Symbol:
    """The relation of `lane_moved`.

    Args:
      aval: the result's type.
      renames: for each operand how registers are renamed; empty if data always moves.
    """
    like = Symbol(tuple(aval.shape), np.dtype(aval.dtype), lambda: 0)
    moved_bits = 0 if renames else max(like.bits, 8)
    made = node.variable(like, "" if slot == "moved" else slot, moved_bits=moved_bits)
    for i, x in enumerate(operands):
        name = f"{slot} {i}"
        taken = node.variable(x, name, moved_bits=moved_bits)
        node.take(x, taken, name)
        if renames:
            node.network.move(taken, made, renames[i])
    if other is not None:
        node.taken(other, made, f"{slot} other")
    return node.make(made, aval, slot)


def moved(
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
            return lane_moved(ctx, plan, [x.operand])
        case regs.Mapped():
            columns = [_emitted(ctx, o, done).values for o in x.operands]
            values = regs.map_registers(x.emit, columns)
            layout = default_placement(x.shape, dtypes.bits(x.dtype))
            return regs.RegisterArray(values, layout, x.dtype)
    raise errors.InternalError("an array that no layout suits", got=type(x).__name__)


def warpgroup_moved(
    plan: Rearrangement,
    operands: Sequence[vals.Vector],
    *,
    starts: Sequence[ir.Value] = (),
    other: vals.Vector | None = None,
    parts: Sequence[Sequence[int]] | None = None,
    whole: bool = False,
) -> vals.Vector:
    """Emits the warpgroup-level operation.

    Args:
      parts: the starts of parts whose registers may be renamed: of the operand that is
        the result, or, if the result is the `whole`, of each operand in the result.
    """
    dtype = operands[0].dtype
    fields = {
        "result": [plan.result.offset, *plan.result.strides],
        "firsts": plan.firsts,
        "steps": plan.steps,
        "counts": [_ALL if n is None else n for n in plan.counts],
        "dynamic": plan.dynamic,
    }
    attributes = {name: _numbers(values) for name, values in fields.items()}
    rows = [[plan.size, s.offset, *s.strides] for s in plan.sources]
    attributes[_SOURCES] = ir.ArrayAttr.get([_numbers(row) for row in rows])
    attributes[_DTYPE] = ir.StringAttr.get(dtype.name)
    attributes[_OTHER] = ir.BoolAttr.get(other is not None)
    if parts is not None:
        attributes[_PARTS] = ir.ArrayAttr.get([_numbers(part) for part in parts])
        attributes[_WHOLE] = ir.BoolAttr.get(whole)
    arrays = [x.value for x in operands] + ([] if other is None else [other.value])
    type_ = logical.vector_type(dtype, plan.shape)
    op = ir.Operation.create(
        "pallas_gpu.rearrange", [type_], [*arrays, *starts], attributes
    )
    return vals.Vector(op.result, dtype)


def _numbers(values: Sequence[int]) -> ir.Attribute:
    return ir.DenseI64ArrayAttr.get(list(values))


def _plan_of(op: ir.Operation) -> Rearrangement:
    rows = [
        tuple(ir.DenseI64ArrayAttr(a)) for a in ir.ArrayAttr(op.attributes[_SOURCES])
    ]
    result, firsts, steps, counts, dynamic = (
        tuple(ir.DenseI64ArrayAttr(op.attributes[name])) for name in _FIELDS
    )
    return Rearrangement(
        rows[0][0],
        tuple(Affine(row[1], row[2:]) for row in rows),
        tuple(op.results[0].type.shape),
        Affine(result[0], result[1:]),
        firsts,
        steps,
        tuple(None if n == _ALL else n for n in counts),
        dynamic,
    )


def _renames(op: ir.Operation) -> list[relations.Relation]:
    """For each operand how registers are renamed; empty if data always moves."""
    if _PARTS not in op.attributes:
        return []
    parts = [
        tuple(ir.DenseI64ArrayAttr(a)) for a in ir.ArrayAttr(op.attributes[_PARTS])
    ]
    shape = tuple(op.results[0].type.shape)
    sizes = [tuple(op.operands[i].type.shape) for i in range(len(parts))]
    if ir.BoolAttr(op.attributes[_WHOLE]).value:
        return [
            relations.Join(size, shape, part)
            for size, part in zip(sizes, parts, strict=True)
        ]
    return [relations.Slice(sizes[0], parts[0], shape)]


@infers("pallas_gpu.rearrange")
def _infer(network: Network, op: ir.Operation, key: Key) -> None:
    (result,) = op.results
    _, bits = network.vector_type(result.type)
    renames = _renames(op)
    sources = len(ir.ArrayAttr(op.attributes[_SOURCES]))
    moved_bits = 0 if renames else max(bits, 8)
    made = network.variable(op, result.type, key, moved_bits=moved_bits)
    for i in range(sources):
        taken = network.variable(
            op,
            op.operands[i].type,
            digest(str(key), str(i)),
            role=f"operand {i}" if sources > 1 else "operand",
            moved_bits=moved_bits,
        )
        network.consume(op, i, taken)
        if renames:
            network.move(taken, made, renames[i])
    if ir.BoolAttr(op.attributes[_OTHER]).value:
        network.consume(op, sources, made)
    network.produce(result, made)


@expands("pallas_gpu.rearrange")
def _expand(expansion: Expansion, op: Any) -> None:
    plan = _plan_of(op.operation)
    dtype = dtypes.named(ir.StringAttr(op.attributes[_DTYPE]).value)
    count = len(plan.sources)
    operands = [expansion.placed(op, i, dtype) for i in range(count)]
    target = expansion.assignment.result(op.result)
    assert target is not None
    result: regs.Array | None = None
    if _PARTS in op.attributes:
        parts = [tuple(ir.DenseI64ArrayAttr(a)) for a in op.attributes[_PARTS]]
        if ir.BoolAttr(op.attributes[_WHOLE]).value:
            result = joined(operands, parts, target)
        else:
            result = renamed_part(operands[0], parts[0], target)
    if result is None:
        other = None
        if ir.BoolAttr(op.attributes[_OTHER]).value:
            other = expansion.operand(op, count, dtype)
            count += 1
        starts = list(op.operands)[count:]
        result = moved(expansion.kernel, plan, operands, starts, other, target)
    expansion.set(op.result, result)
    expansion.dead.append(op.operation)


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

# SPDX-License-Identifier: Apache-2.0
"""The registers that a kernel of reductions needs, and the limit for ptxas.

ptxas takes as many registers as shorten the code of one thread. Kernels that alternate
between memory and arithmetic gain more from blocks that overlap. What every schedule
has to hold are the arrays that are live across a reduction, a store or
synchronization: elementwise operations between these can follow each other element by
element. ptxas schedules a loop that carries many registers of arrays as a whole; such
kernels have no limit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jaxlib.mlir import ir

from pallas_gpu.lowering.inference import Assignment, relations
from pallas_gpu.mosaic import logical
from pallas_gpu.mosaic.elements import dtypes, table

_REDUCTION = "vector.multi_reduction"
_RESHAPE, _CAST = "vector.shape_cast", "mosaic_gpu.layout_cast"
_LOOP, _YIELD = "scf.for", "scf.yield"
# Operations that move no array to other threads and need no array of temporaries.
_STREAMING = frozenset(
    {logical.OWN + row.name for row in table.ROWS}
    | {_REDUCTION, "vector.broadcast", "mosaic_gpu.broadcast_in_dim"}
    | {"mosaic_gpu.vector_load", "mosaic_gpu.vector_store", "shell.prologue"}
    | {"mosaic_gpu.broadcasted_iota"}
    | {"mosaic_gpu.slice_smem", "mosaic_gpu.async_load", "mosaic_gpu.async_store"}
    | {_LOOP, "scf.if", _YIELD}
)
_DIALECTS = (*logical.SCALAR, "memref.", "math.", "builtin.")
# Operations over which no array, or no load, is moved element by element.
_FENCES = (
    *(_REDUCTION, "mosaic_gpu.vector_store", "scf.", "mosaic_gpu.async_"),
    *("nvvm.", "gpu.barrier", "llvm.inline_asm"),
)
_SETS_REGISTERS = "nvvm.setmaxregister"
# Measured on an H200 with the kernels on rows of docs/performance.md: what ptxas needs
# without spills beside the arrays. 8 warpgroups fit an SM with 64 registers.
_OTHERS, _FEWEST = 28, 64
# Registers of arrays that a loop may carry: sums and extrema of each thread.
_CARRIED = 4
# ptxas and the hardware allocate registers of a thread in units of 8.
_UNIT = 8


@dataclasses.dataclass(frozen=True)
class Room:
    """The registers of an SM, and the blocks of a kernel that can share them.

    Attributes:
      per_sm: registers of an SM.
      per_thread: the most that a thread can have.
      threads: threads of a block.
      blocks: blocks on an SM, registers aside.
    """

    per_sm: int
    per_thread: int
    threads: int
    blocks: int


def register_limit(block: Any, assignment: Assignment, room: Room) -> int | None:
    """Returns the most registers that a thread should have; None: as ptxas decides.

    It is the number with which as many blocks fit an SM as with what the kernel needs.

    Args:
      block: the body of the kernel, of whole arrays.
      assignment: its layouts.
      room: the registers of an SM.
    """
    arrays = _most_registers(block, assignment)
    if arrays is None:
        return None
    needed = max(_FEWEST, arrays + _OTHERS)
    blocks = min(room.per_sm // (room.threads * _rounded_up(needed)), room.blocks)
    if not blocks:
        return None
    limit = room.per_sm // (room.threads * blocks) // _UNIT * _UNIT
    return limit if limit < room.per_thread else None


def _rounded_up(registers: int) -> int:
    return -(-registers // _UNIT) * _UNIT


def _most_registers(block: Any, assignment: Assignment) -> int | None:
    """The most registers that arrays take at once, whatever the schedule.

    These are the arrays that are live across a reduction or another operation of
    `_FENCES`, those that every iteration of a loop uses, and half of what a reduction
    combines unless it is used later: its elements are computed while they are added up.

    None without reductions, for kernels with other operations on arrays than loads,
    stores, reductions and elementwise ones, and where loops or branches yield more than
    a few registers of arrays.
    """
    order = list(_operations(block, ()))
    if any(_yielded(op, assignment) > _CARRIED for op, _ in order):
        return None
    names = [op.name for op, _ in order]
    if _REDUCTION not in names or not all(_is_known(op, assignment) for op, _ in order):
        return None
    first, last = _lives(order)
    held = {value: _registers(value, assignment) for value in last}
    arrays = [(first[v][0], last[v], n) for v, n in held.items() if n]
    consumed = {_YIELD: 1.0, _REDUCTION: 0.5}
    found = []
    for at, name in enumerate(names):
        if name.startswith(_FENCES):
            live = sum(n for start, end, n in arrays if start < at < end)
            ending = sum(n for _, end, n in arrays if end == at)
            found.append(live + int(ending * consumed.get(name, 0)))
    return max(found)


_Ops = tuple[Any, ...]


def _lives(
    order: Sequence[tuple[Any, _Ops]],
) -> tuple[dict[ir.Value, tuple[int, _Ops]], dict[ir.Value, int]]:
    """Where values are defined, with the operations around that, and used last."""
    ends = {outer: at for at, (_, inside) in enumerate(order) for outer in inside}
    first: dict[ir.Value, tuple[int, _Ops]] = {}
    last: dict[ir.Value, int] = {}
    for at, (op, inside) in enumerate(order):
        for value in op.operands:
            if value in first:
                # The end of the loop in which the value is used, but not defined.
                around = inside[len(first[value][1]) :]
                loops = [ends[each] for each in around if each.name == _LOOP]
                used = max([at, *loops[:1]])
                last[value] = max(last.get(value, at), used)
        first.update(dict.fromkeys(op.results, (ends.get(op, at), inside)))
        arguments = [a for r in op.regions for b in r.blocks for a in b.arguments]
        first.update(dict.fromkeys(arguments, (at, (*inside, op))))
    return first, last


def _operations(block: Any, inside: _Ops) -> Iterator[tuple[Any, _Ops]]:
    """The operations of a block and of those in it, with the operations around them."""
    for each in block.operations:
        op = each.operation
        yield op, inside
        for region in op.regions:
            for nested in region.blocks:
                yield from _operations(nested, (*inside, op))


def _yielded(op: Any, assignment: Assignment) -> int:
    """Registers of the arrays that an iteration or a branch yields."""
    if op.name != _YIELD:
        return 0
    return sum(_registers(operand, assignment) for operand in op.operands)


def _is_known(op: Any, assignment: Assignment) -> bool:
    name = op.name
    if name.startswith(_SETS_REGISTERS):
        return False
    if name in (_RESHAPE, _CAST):
        return _is_in_place(op, assignment)
    return name in _STREAMING or name.startswith(_DIALECTS)


def _is_in_place(op: Any, assignment: Assignment) -> bool:
    """Whether a reshape or a layout cast leaves each element in its register."""
    before, after = assignment.operand(op, 0), assignment.result(op.result)
    if before is None or after is None:
        return True
    old, new = (tuple(v.type.shape) for v in (op.operands[0], op.result))
    return relations.Reshape(old, new).forward(before) == after


def _registers(value: ir.Value, assignment: Assignment) -> int:
    """32-bit registers of an array in each thread."""
    if not isinstance(value.type, ir.VectorType):
        return 0
    layout = assignment.result(value)
    if layout is None:
        return 0
    elements = layout.num_registers * layout.vector_length
    return -(-elements * dtypes.bits(logical.dtype_of(value.type)) // 32)

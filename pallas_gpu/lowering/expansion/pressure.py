# SPDX-License-Identifier: Apache-2.0
"""The registers that a kernel of reductions needs, and the limit for ptxas.

ptxas takes as many registers as shorten the code of one thread. Kernels that alternate
between memory and arithmetic gain more from blocks that overlap. What every schedule
has to hold are the arrays that are live across a reduction: elementwise operations
before and after it can follow each other element by element.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jaxlib.mlir import ir

from pallas_gpu.lowering.inference import Assignment
from pallas_gpu.mosaic import logical
from pallas_gpu.mosaic.elements import dtypes, table

_REDUCTION = "vector.multi_reduction"
# Operations that move no array to other threads and need no array of temporaries.
_STREAMING = frozenset(
    {logical.OWN + row.name for row in table.ROWS}
    | {_REDUCTION, "vector.broadcast", "mosaic_gpu.broadcast_in_dim"}
    | {"mosaic_gpu.vector_load", "mosaic_gpu.vector_store", "shell.prologue"}
    | {"mosaic_gpu.broadcasted_iota"}
    | {"mosaic_gpu.slice_smem", "mosaic_gpu.async_load", "mosaic_gpu.async_store"}
    | {"scf.for", "scf.if", "scf.yield"}
)
_DIALECTS = (*logical.SCALAR, "memref.", "math.", "builtin.")
_SETS_REGISTERS = "nvvm.setmaxregister"
# Measured on an H200 with the kernels on rows of docs/performance.md: what ptxas needs
# without spills beside the arrays. 8 warpgroups fit an SM with 64 registers.
_OTHERS, _FEWEST = 28, 64
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
    """The most registers that arrays take during one reduction.

    These are the arrays that are live across it, and half of the one that it combines,
    unless that is one of them: its elements are computed while they are added up.

    None without reductions, and for kernels with other operations on arrays than
    loads, stores, reductions and elementwise ones.
    """
    order = list(_operations(block, ()))
    if not all(_is_known(op) for op, _ in order):
        return None
    first, last = _lives(order)
    held = {value: _registers(value, assignment) for value in last}
    found = []
    for at, (op, _) in enumerate(order):
        if op.name == _REDUCTION:
            live = sum(n for v, n in held.items() if n and first[v][0] < at < last[v])
            source = op.operands[0]
            consumed = last[source] == at
            found.append(live + held[source] // 2 if consumed else live)
    return max(found, default=None)


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
                used = max(at, ends[around[0]]) if around else at
                last[value] = max(last.get(value, at), used)
        first.update(dict.fromkeys(op.results, (at, inside)))
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


def _is_known(op: Any) -> bool:
    if op.name.startswith(_SETS_REGISTERS):
        return False
    return op.name in _STREAMING or op.name.startswith(_DIALECTS)


def _registers(value: ir.Value, assignment: Assignment) -> int:
    """32-bit registers of an array in each thread."""
    if not isinstance(value.type, ir.VectorType):
        return 0
    layout = assignment.result(value)
    if layout is None:
        return 0
    elements = layout.num_registers * layout.vector_length
    return -(-elements * dtypes.bits(logical.dtype_of(value.type)) // 32)

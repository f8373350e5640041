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

from collections.abc import Sequence

from pallas_gpu import _jax, arch
from pallas_gpu.emitters.elements import table
from pallas_gpu.lowering.inference import Assignment, relations
from pallas_gpu.lowering.inference.collect import Node, Step, Symbol
from pallas_gpu.primitives import registers, tma
from pallas_gpu.program.nodes import Kind

_LOADS = (_jax.get_p, registers.load_p)
_STORES = (_jax.swap_p, registers.store_p)
_COPIES = (tma.copy_gmem_to_smem_p, tma.copy_smem_to_gmem_p)
_SETS_REGISTERS = registers.set_max_registers_p
# Operations that move no array to other threads and need no array of temporaries.
_STREAMING = frozenset(
    {row.name for row in table.ROWS}
    | {p.name for p in (*_LOADS, *_STORES, *_COPIES)}
    | {"broadcast_in_dim", "iota", "copy", "stop_gradient", "name"}
)
_KINDS = (Kind.FOR, Kind.IF, Kind.SCOPE)
_MAY_STAY = ("reshape", "squeeze", "layout_cast")
# Measured on an H200 with the kernels on rows of docs/performance.md: what ptxas needs
# without spills beside the arrays. 8 warpgroups fit an SM with 64 registers.
_OTHERS, _FEWEST = 28, 64
# Registers of arrays that a loop may carry: sums and extrema of each thread.
_CARRIED = 4
# ptxas and the hardware allocate registers of a thread in units of 8.
_UNIT = 8


def register_limit(
    layouts: Assignment, target: arch.GpuTarget, threads: int, blocks: int
) -> int | None:
    """Returns the most registers that a thread should have; None: as ptxas decides.

    It is the number with which as many blocks fit an SM as with what the kernel needs.

    Args:
      layouts: those of the kernel's arrays.
      target: whose registers the blocks share.
      threads: of a block.
      blocks: on an SM, registers aside.
    """
    arrays = _most_registers(layouts)
    if arrays is None:
        return None
    needed = -(-max(_FEWEST, arrays + _OTHERS) // _UNIT) * _UNIT
    blocks = min(target.registers_per_sm // (threads * needed), blocks)
    if not blocks:
        return None
    limit = target.registers_per_sm // (threads * blocks) // _UNIT * _UNIT
    return limit if limit < target.max_registers_per_thread else None


def _most_registers(layouts: Assignment) -> int | None:
    """The most registers that arrays take at once, whatever the schedule.

    These are the arrays that are live across a reduction, a store or another operation
    with an effect, those that every iteration of a loop uses, and half of what a
    reduction combines unless it is used later: its elements are computed while they are
    added up.

    None without reductions, for kernels with other operations on arrays than loads,
    stores, reductions and elementwise ones, and where loops or branches yield more than
    a few registers of arrays.
    """
    steps = layouts.network.steps
    if not any(_is_reduction(step.node) for step in steps):
        return None
    for step in steps:
        crossing = step.is_end and step.node.op.kind is not Kind.SCOPE
        carried = sum(_registers(x, layouts) for x in step.operands) if crossing else 0
        if carried > _CARRIED or not (step.is_end or _is_known(step, layouts)):
            return None
    first, last = _lives(steps)
    arrays = [
        (first[x], end, n) for x, end in last.items() if (n := _registers(x, layouts))
    ]
    found = [0]
    for at, step in enumerate(steps):
        if _is_fence(step):
            live = sum(n for start, end, n in arrays if start < at < end)
            ending = sum(n for _, end, n in arrays if end == at)
            # The threads meet before a store.
            share = 0.5 if _is_reduction(step.node) else 1
            found.append(live + int(ending * share))
    return max(found)


def _lives(steps: Sequence[Step]) -> tuple[dict[Symbol, int], dict[Symbol, int]]:
    """Where values are defined and used last, as positions of steps."""
    ends = {step.node: at for at, step in enumerate(steps) if step.is_end}
    first: dict[Symbol, int] = {}
    inside: dict[Symbol, int] = {}
    last: dict[Symbol, int] = {}
    for at, step in enumerate(steps):
        for x in step.operands:
            if x in first:
                # The end of the loop in which the value is used, but not defined.
                around = step.inside[inside[x] :]
                loops = [ends[each] for each in around if each.op.kind is Kind.FOR]
                last[x] = max(last.get(x, at), at, *loops[:1])
        if step.is_end:
            continue
        made = ends.get(step.node, at)
        for x in step.results:
            first.setdefault(x, made)
            inside.setdefault(x, len(step.inside))
        for x in step.arguments:
            first[x], inside[x] = at, len(step.inside) + 1
    return first, last


def _is_reduction(node: Node) -> bool:
    return node.op.name.startswith("reduce_") and bool(node.params.get("axes"))


def _is_fence(step: Step) -> bool:
    """Whether no array is moved over an operation element by element."""
    op = step.node.op
    if op.kind is not Kind.PLAIN:
        return op.kind is not Kind.SCOPE
    loads = op.primitive in _LOADS
    return _is_reduction(step.node) or (bool(op.equation.effects) and not loads)


def _is_known(step: Step, layouts: Assignment) -> bool:
    node, op = step.node, step.node.op
    if op.primitive is _SETS_REGISTERS:
        return False
    if op.kind is not Kind.PLAIN:
        return op.kind in _KINDS
    if op.name in _MAY_STAY:
        return _is_in_place(step, layouts)
    handles = (*node.inputs, *op.results)
    return (
        op.name in _STREAMING
        or _is_reduction(node)
        or not any(getattr(x, "shape", ()) and _in_registers(x) for x in handles)
    )


def _in_registers(x: object) -> bool:
    return isinstance(x, Symbol) or not isinstance(
        getattr(x, "aval", None), _jax.AbstractRef | None.__class__
    )


def _is_in_place(step: Step, layouts: Assignment) -> bool:
    """Whether a reshape or a layout cast leaves each element in its register."""
    x, result = step.operands[0], step.results[0]
    if x.port is None or result.port is None:
        return True
    before = layouts.layout(x.port)
    relation = relations.Reshape(x.shape, result.shape)
    return relation.forward(before) == layouts.layout(result.port)


def _registers(x: Symbol, layouts: Assignment) -> int:
    """32-bit registers of an array in each thread."""
    if not isinstance(x, Symbol) or x.port is None:
        return 0
    layout = layouts.layout(x.port)
    elements = layout.num_registers * layout.vector_length
    return -(-elements * x.bits // 32)

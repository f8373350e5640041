# SPDX-License-Identifier: Apache-2.0
"""SMEM and barriers of a kernel against the target's budget.

Scopes allocate like a stack: arrays of a scope lie above those of the scopes around it,
and scopes that follow each other share the space. Barriers are never shared: their
phase outlives a scope. The planner, the lowering and the emulator walk the same way.

A block's dynamic SMEM, in this order: arrays, barriers, scratch of reductions and
relayouts. Whether the scratch is used is known when the code is emitted; it comes last,
so that a kernel that does not use it does not have it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pallas_gpu import _jax, arch, errors, types
from pallas_gpu.primitives.scoped import run_scoped_p

# TMA destinations need 128 bytes, a 128-byte swizzle repeats every 1024 bytes.
# PTX ISA, "Shared memory alignment requirements" of tensor copies.
ARRAY_ALIGNMENT_BYTES = 1024
BARRIER_BYTES = 8
# The widest access of a thread (PTX ISA, ld).
_SCRATCH_GRANULE_BYTES = 16
_SCRATCH_START_BYTES = 128
_DEFAULT_SCRATCH_BYTES = 2048


@dataclasses.dataclass(frozen=True)
class Allocation:
    """One array in SMEM.

    Attributes:
      what: shape and dtype, for reports.
      offset_bytes: from the start of the block's dynamic SMEM.
      size_bytes: without padding.
    """

    what: str
    offset_bytes: int
    size_bytes: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a block needs.

    Attributes:
      allocations: the arrays of the deepest stack.
      arrays_bytes: arrays with padding.
      scratch_bytes: for reductions and relayouts that cross warps, if there are such.
      barriers: number of barriers.
      barrier_slots: index of the first barrier of each declaration, by the identity of
        its scope's equation and its position there.
      scratch_room_bytes: what the scratch may have.
      scratch_limit_bytes: to which that may be raised before code is emitted.
    """

    allocations: tuple[Allocation, ...]
    arrays_bytes: int
    scratch_bytes: int
    barriers: int
    barrier_slots: dict[tuple[int, int], int]
    scratch_room_bytes: int
    scratch_limit_bytes: int

    @property
    def barrier_offset_bytes(self) -> int:
        """Where the barriers begin."""
        return _align(self.arrays_bytes, BARRIER_BYTES)

    @property
    def scratch_offset_bytes(self) -> int:
        """Where the scratch of reductions and relayouts begins."""
        end = self.barrier_offset_bytes + BARRIER_BYTES * self.barriers
        return _align(end, _SCRATCH_START_BYTES)

    @property
    def smem_bytes(self) -> int:
        """Dynamic SMEM of one block."""
        if self.scratch_bytes:
            return self.scratch_offset_bytes + self.scratch_bytes
        return self.barrier_offset_bytes + BARRIER_BYTES * self.barriers

    @property
    def scratch_rooms_bytes(self) -> tuple[int, ...]:
        """The rooms for scratch to try: each four times the one before."""
        rooms = [self.scratch_room_bytes]
        while rooms[-1] < self.scratch_limit_bytes:
            rooms.append(min(4 * rooms[-1], self.scratch_limit_bytes))
        return tuple(rooms)

    def with_room(self, scratch_room_bytes: int) -> Plan:
        """Returns the plan with another room for scratch."""
        return dataclasses.replace(self, scratch_room_bytes=scratch_room_bytes)

    def with_scratch(self) -> Plan:
        """Returns the plan of a kernel that uses its scratch."""
        return dataclasses.replace(self, scratch_bytes=self.scratch_room_bytes)


def _align(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


def scope_refs(eqn: _jax.JaxprEqn) -> Sequence[Any]:
    """Returns the variables that a run_scoped equation allocates."""
    return eqn.params["jaxpr"].invars[len(eqn.invars) :]


def place_arrays(
    eqn: _jax.JaxprEqn, top_bytes: int
) -> tuple[list[Allocation | None], int]:
    """Places a scope's arrays above `top_bytes`; returns them and the new top.

    The list has None for barriers and accumulators.
    """
    placed: list[Allocation | None] = []
    for var in scope_refs(eqn):
        aval = var.aval
        if isinstance(aval, types.BarrierRef | types.AccumulatorRef):
            placed.append(None)
            continue
        layout = types.smem_layout(aval.shape, aval.dtype, aval.transforms)
        offset = _align(top_bytes, ARRAY_ALIGNMENT_BYTES)
        what = f"{aval.dtype}{list(aval.shape)}"
        placed.append(Allocation(what, offset, layout.size_bytes))
        top_bytes = offset + layout.size_bytes
    return placed, top_bytes


def plan(
    jaxpr: _jax.Jaxpr,
    target: arch.Target,
    name: str,
    reduction_scratch_bytes: int | None,
    warpgroups: int,
) -> Plan:
    """Plans a kernel's SMEM, with as much scratch as is asked for and as there is room.

    Args:
      reduction_scratch_bytes: scratch of each warpgroup; None leaves it to the
        compiler.

    Raises:
      OutOfResources: it does not fit the target; the message lists the allocations.
    """
    walk = _Walk()
    walk.visit(jaxpr, 0, ())
    result = Plan(
        walk.deepest, walk.peak_bytes, 0, walk.barriers, walk.barrier_slots, 0, 0
    )
    limit = target.smem_bytes_per_block
    if result.smem_bytes > limit:
        raise out_of_smem(result, target, name)
    room = max(limit - result.scratch_offset_bytes, 0) // warpgroups
    room -= room % _SCRATCH_GRANULE_BYTES
    asked = reduction_scratch_bytes
    each = _DEFAULT_SCRATCH_BYTES if asked is None else asked
    each = min(_align(each, _SCRATCH_GRANULE_BYTES), room)
    return dataclasses.replace(
        result,
        scratch_room_bytes=each * warpgroups,
        scratch_limit_bytes=(room if asked is None else each) * warpgroups,
    )


class _Walk:
    def __init__(self) -> None:
        self.peak_bytes = 0
        self.deepest: tuple[Allocation, ...] = ()
        self.barriers = 0
        self.barrier_slots: dict[tuple[int, int], int] = {}

    def visit(self, jaxpr: Any, top: int, stack: tuple[Allocation, ...]) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive is run_scoped_p:
                self._scope(eqn, top, stack)
                continue
            for inner in _jax.jaxprs_in_params(eqn.params):
                self.visit(inner, top, stack)

    def _scope(self, eqn, top: int, stack: tuple[Allocation, ...]) -> None:
        placed, inner_top = place_arrays(eqn, top)
        stack = (*stack, *(p for p in placed if p is not None))
        if inner_top > self.peak_bytes:
            self.peak_bytes, self.deepest = inner_top, stack
        for i, var in enumerate(scope_refs(eqn)):
            key = (id(eqn), i)
            if isinstance(var.aval, types.BarrierRef) and key not in self.barrier_slots:
                self.barrier_slots[key] = self.barriers
                self.barriers += var.aval.barrier.size
        self.visit(eqn.params["jaxpr"], inner_top, stack)


def table(result: Plan) -> str:
    """Returns the allocations of a plan as a table in bytes."""
    rows = [
        (a.what, f"{a.offset_bytes:,}", f"{a.size_bytes:,}") for a in result.allocations
    ]
    if result.barriers:
        word = "barrier" if result.barriers == 1 else "barriers"
        rows.append((f"{result.barriers} {word}", f"{result.barrier_offset_bytes:,}",
                     f"{BARRIER_BYTES * result.barriers:,}"))  # fmt: skip
    if result.scratch_bytes:
        rows.append(("scratch", f"{result.scratch_offset_bytes:,}",
                     f"{result.scratch_bytes:,}"))  # fmt: skip
    rows.append(("total", "", f"{result.smem_bytes:,}"))
    header = ("allocation", "offset", "bytes")
    widths = [max(len(r[i]) for r in (header, *rows)) for i in range(3)]
    lines = [
        f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}"
        for a, b, c in (header, *rows)
    ]
    return "\n".join(lines)


def out_of_smem(result: Plan, target: arch.Target, name: str) -> errors.OutOfResources:
    """Returns the error for a kernel that asks for more SMEM than there is."""
    limit = target.smem_bytes_per_block
    return errors.OutOfResources(
        f"kernel {name}: the block needs more SMEM than {target.name} has",
        resource="SMEM",
        limit_bytes=limit,
        used_bytes=result.smem_bytes,
        expected=f"at most {limit:,} bytes a block",
        got=f"{result.smem_bytes:,} bytes\n{table(result)}",
        hint="use smaller tiles or fewer of them",
    )

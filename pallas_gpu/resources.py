# SPDX-License-Identifier: Apache-2.0
"""SMEM and barriers of a kernel against the target's budget.

Scopes allocate like a stack: arrays of a scope lie above those of the scopes around it,
and scopes that follow each other share the space. Barriers are never shared: their
phase outlives a scope. The planner, the lowering and the emulator walk the same way.

A block's dynamic SMEM, in this order: arrays, scratch of reductions and relayouts,
barriers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pallas_gpu import _jax, arch, errors, types
from pallas_gpu.primitives.registers import layout_cast_p
from pallas_gpu.primitives.scoped import run_scoped_p

# TMA destinations need 128 bytes, a 128-byte swizzle repeats every 1024 bytes.
# PTX ISA, "Shared memory alignment requirements" of tensor copies.
ARRAY_ALIGNMENT_BYTES = 1024
BARRIER_BYTES = 8
# The widest access of a thread (PTX ISA, ld).
_SCRATCH_ALIGNMENT_BYTES = 16
_SCRATCH_START_BYTES = 128
# What these make takes any layout: a layout_cast of it moves nothing.
_WITHOUT_LAYOUT = ("iota", "broadcast_in_dim")


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
      scratch_bytes: for reductions and relayouts that cross warps.
      barriers: number of barriers.
      barrier_slots: index of the first barrier of each declaration, by the identity of
        its scope's equation and its position there.
    """

    allocations: tuple[Allocation, ...]
    arrays_bytes: int
    scratch_bytes: int
    barriers: int
    barrier_slots: dict[tuple[int, int], int]

    @property
    def scratch_offset_bytes(self) -> int:
        """Where the scratch of reductions and relayouts begins."""
        return _align(self.arrays_bytes, _SCRATCH_START_BYTES)

    @property
    def barrier_offset_bytes(self) -> int:
        """Where the barriers begin."""
        if self.scratch_bytes:
            return self.scratch_offset_bytes + self.scratch_bytes
        return _align(self.arrays_bytes, BARRIER_BYTES)

    @property
    def smem_bytes(self) -> int:
        """Dynamic SMEM of one block."""
        return self.barrier_offset_bytes + BARRIER_BYTES * self.barriers


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
    reduction_scratch_bytes: int,
    warpgroups: int,
    *,
    infers_layouts: bool = False,
) -> Plan:
    """Plans a kernel's SMEM.

    Args:
      reduction_scratch_bytes: scratch of each warpgroup.
      infers_layouts: relayouts may be anywhere, not only where a layout_cast stands.
        Where no operation asks for scratch, they get what the arrays leave.

    Raises:
      OutOfResources: it does not fit the target; the message lists the allocations.
    """
    walk = _Walk()
    walk.visit(jaxpr, 0, ())
    each = _align(reduction_scratch_bytes, _SCRATCH_ALIGNMENT_BYTES)
    if not walk.needs_scratch:
        each = min(each, _room(walk, target) // warpgroups) if infers_layouts else 0
        each -= each % _SCRATCH_ALIGNMENT_BYTES
    result = Plan(
        walk.deepest,
        walk.peak_bytes,
        each * warpgroups,
        walk.barriers,
        walk.barrier_slots,
    )
    if result.smem_bytes > target.smem_bytes_per_block:
        raise out_of_smem(result, target, name)
    return result


def _room(walk: _Walk, target: arch.Target) -> int:
    """Returns the bytes between the arrays and the barriers of a full block."""
    used = _align(walk.peak_bytes, _SCRATCH_START_BYTES)
    left = target.smem_bytes_per_block - used - BARRIER_BYTES * walk.barriers
    return max(left, 0)


class _Walk:
    def __init__(self) -> None:
        self.peak_bytes = 0
        self.deepest: tuple[Allocation, ...] = ()
        self.barriers = 0
        self.barrier_slots: dict[tuple[int, int], int] = {}
        self.needs_scratch = False

    def visit(self, jaxpr: Any, top: int, stack: tuple[Allocation, ...]) -> None:
        makers: dict[int, str] = {}
        for eqn in jaxpr.eqns:
            self.needs_scratch |= _needs_scratch(eqn, makers)
            makers.update(dict.fromkeys(map(id, eqn.outvars), eqn.primitive.name))
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


def _needs_scratch(eqn: _jax.JaxprEqn, makers: dict[int, str]) -> bool:
    """True for operations that may move data between warps."""
    if eqn.primitive is layout_cast_p:
        (x,) = eqn.invars
        return makers.get(id(x)) not in _WITHOUT_LAYOUT
    return eqn.primitive.name.startswith("reduce_")


def table(result: Plan) -> str:
    """Returns the allocations of a plan as a table in bytes."""
    rows = [
        (a.what, f"{a.offset_bytes:,}", f"{a.size_bytes:,}") for a in result.allocations
    ]
    if result.scratch_bytes:
        rows.append(("scratch of reductions", f"{result.scratch_offset_bytes:,}",
                     f"{result.scratch_bytes:,}"))  # fmt: skip
    if result.barriers:
        word = "barrier" if result.barriers == 1 else "barriers"
        rows.append((f"{result.barriers} {word}", f"{result.barrier_offset_bytes:,}",
                     f"{BARRIER_BYTES * result.barriers:,}"))  # fmt: skip
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

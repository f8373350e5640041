# SPDX-License-Identifier: Apache-2.0
"""SMEM, TMEM, registers and barriers of a kernel within the target's budgets.

Each memory space is a stack: the arrays of a scope are allocated above those of the
enclosing scopes, and consecutive scopes reuse the space. Planner, lowering and emulator
visit the scopes in the same order.

Barriers are never reused, each takes its 8 bytes for the whole kernel. To share them,
every scope would have to invalidate its barriers at its end and to initialise them at
its start, with the block, or for barriers that other CTAs access the cluster, waiting
before and after either: the threads that leave a scope do not know whether others, or
copies in flight, still access its barriers. That costs two waits of all threads for
each entry, also in loops, in order to save a few bytes.

The scopes inside `warp_map` are a stack of each warp of the block: no two warps share
memory, so nothing has to order their scopes. Likewise in a block of several warpgroups
the scopes that one of them enters alone, which only operations of this package open.

A block's dynamic SMEM consists of arrays, arrays of its warpgroups, arrays of its
warps, barriers, the address of its TMEM, profiled events, and scratch of
reductions and relayouts, in this order. Whether the scratch is used is known only when
the code is emitted; it is last, so that a kernel that does not use it does not allocate
it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pallas_gpu import _jax, arch, errors, types
from pallas_gpu.arch.residency import Residency
from pallas_gpu.layouts.tmem.layout import COLUMN_BITS, LANES, allocated_columns
from pallas_gpu.primitives._scratch import least_scratch_bytes
from pallas_gpu.primitives.scoped import run_scoped_p
from pallas_gpu.primitives.warp import WARPS, warp_map_p
from pallas_gpu.program.bodies import kept
from pallas_gpu.program.nodes import Operand
from pallas_gpu.program.walk import Site, walk
from pallas_gpu.types.mesh import WARPGROUP_THREADS

# The widest access of a thread (PTX ISA, ld).
SCRATCH_GRANULE_BYTES = 16
_SCRATCH_START_BYTES = 128
# The address of a block's TMEM, behind the barriers and aligned like one.
_TMEM_ADDRESS_BYTES = types.BARRIER_BYTES
_DEFAULT_SCRATCH_BYTES = 2048


@dataclasses.dataclass(frozen=True)
class Allocation:
    """One array; in the unit of its space: bytes, columns or registers.

    Attributes:
      what: dtype, shape and the storage if it is part of the size, for reports.
      offset: from the start of the block's part of the space.
      size: without padding.
    """

    what: str
    offset: int
    size: int


@dataclasses.dataclass(frozen=True)
class Stack:
    """Arrays of nested scopes in one memory space, bottom to top.

    Attributes:
      space: the memory space.
      allocations: from the bottom up.
      top: end of the last one, with padding before each.
    """

    space: types.MemorySpace
    allocations: tuple[Allocation, ...] = ()
    top: int = 0


class Own(NamedTuple):
    """SMEM of which each warpgroup, or each warp, of a block has its own.

    Attributes:
      offset_bytes: of the first one's.
      bytes_each: with padding: the distance from one to the next.
      number: of warpgroups or warps.
    """

    offset_bytes: int
    bytes_each: int
    number: int

    @property
    def end_bytes(self) -> int:
        """The end of the last one's."""
        return self.offset_bytes + self.number * self.bytes_each


_Path = tuple[tuple[int, int], ...]
# Who has the SMEM of a scope: all threads of the block share it, or each warpgroup or
# each warp of the block has memory of its own.
Owner = Literal["block", "warpgroup", "warp"]


class BarrierKey(NamedTuple):
    """A declaration of barriers.

    Attributes:
      scope: the equation of its scope.
      position: in the scope.
      in_warp: whether each warp has its own: a function may be called by both.
    """

    scope: _jax.JaxprEqn
    position: int
    in_warp: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """The memory and barriers of a block.

    Attributes:
      stacks: for each memory space, the stack with the highest top. For registers it
        holds the accumulators of each thread.
      scratch_bytes: for reductions and relayouts that cross warps, if any.
      barriers: number of barriers.
      collective_tmem: whether a pair of CTAs allocates the TMEM.
      barrier_slots: index of the first barrier of each declaration.
      declared: the barriers that start at an index, and how often the block has them.
      scratch_room_bytes: the part of the scratch that code may use.
      scratch_limit_bytes: the maximum of `scratch_room_bytes`.
      scratch_free_bytes: likewise if the author sets no limit.
      warpgroup_stack: the SMEM arrays of one warpgroup, from the start of its part.
      warp_stack: likewise those of one warp.
      warps: number of warps of a block.
    """

    stacks: Mapping[types.MemorySpace, Stack]
    scratch_bytes: int
    barriers: int
    barrier_slots: dict[BarrierKey, int]
    declared: dict[int, tuple[types.Barrier, int]]
    scratch_room_bytes: int
    scratch_limit_bytes: int
    scratch_free_bytes: int
    collective_tmem: bool = False
    warpgroup_stack: Stack = Stack(types.SMEM)
    warp_stack: Stack = Stack(types.SMEM)
    warps: int = 0

    @property
    def allocations(self) -> tuple[Allocation, ...]:
        """The SMEM arrays that are live at the peak of SMEM usage."""
        return self.stacks[types.SMEM].allocations

    @property
    def arrays_bytes(self) -> int:
        """SMEM arrays with padding, those of warpgroups and warps included."""
        warps = self.own("warp")
        return warps.end_bytes if warps.bytes_each else self._warpgroups_end_bytes

    @property
    def _warpgroups_end_bytes(self) -> int:
        warpgroups = self.own("warpgroup")
        shared = self.stacks[types.SMEM].top
        return warpgroups.end_bytes if warpgroups.bytes_each else shared

    def own(self, owner: Literal["warpgroup", "warp"]) -> Own:
        """Returns where arrays are of which each warpgroup, or warp, has its own."""
        if owner == "warp":
            stack, number = self.warp_stack, self.warps
            below = self._warpgroups_end_bytes
        else:
            stack, number = self.warpgroup_stack, self.warps // WARPS
            below = self.stacks[types.SMEM].top
        alignment = types.SMEM.alignment
        return Own(_align(below, alignment), _align(stack.top, alignment), number)

    @property
    def tmem_columns(self) -> int:
        """Columns of the one TMEM allocation of a block: 0 or a power of two."""
        top = self.stacks[types.TMEM].top
        return allocated_columns(top) if top else 0

    @property
    def barrier_offset_bytes(self) -> int:
        """The offset of the barriers."""
        return _align(self.arrays_bytes, types.BARRIER_BYTES)

    @property
    def tmem_address_offset_bytes(self) -> int:
        """The offset of the word that receives the address of the block's TMEM."""
        return self.barrier_offset_bytes + types.BARRIER_BYTES * self.barriers

    @property
    def _scratch_floor_bytes(self) -> int:
        """The end of what precedes the scratch."""
        word = _TMEM_ADDRESS_BYTES if self.tmem_columns else 0
        return self.tmem_address_offset_bytes + word

    @property
    def scratch_offset_bytes(self) -> int:
        """The offset of the scratch of reductions and relayouts."""
        return _align(self._scratch_floor_bytes, _SCRATCH_START_BYTES)

    @property
    def smem_bytes(self) -> int:
        """Dynamic SMEM of one block."""
        if self.scratch_bytes:
            return self.scratch_offset_bytes + self.scratch_bytes
        return self._scratch_floor_bytes

    @property
    def scratch_rooms_bytes(self) -> tuple[int, ...]:
        """Sizes of scratch to try, each four times the previous one."""
        rooms = [self.scratch_room_bytes]
        while rooms[-1] < self.scratch_limit_bytes:
            rooms.append(min(4 * rooms[-1], self.scratch_limit_bytes))
        return tuple(rooms)

    def table(self) -> str:
        """Returns the allocations as a table in bytes."""
        return table(self)

    def with_room(self, scratch_room_bytes: int) -> Plan:
        """Returns the plan with another size of scratch."""
        return dataclasses.replace(self, scratch_room_bytes=scratch_room_bytes)

    def with_scratch(self) -> Plan:
        """Returns the plan of a kernel whose code uses scratch."""
        return dataclasses.replace(self, scratch_bytes=self.scratch_room_bytes)


def residency(plan: Plan, target: arch.GpuTarget, mesh: types.Mesh) -> Residency:
    """Returns how many CTAs of a kernel are resident at once, registers aside."""
    threads = WARPGROUP_THREADS * mesh.warpgroups
    return Residency.of(target, plan.smem_bytes, threads, math.prod(mesh.cluster))


def _align(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


def scope_refs(eqn: _jax.JaxprEqn) -> Sequence[Any]:
    """Returns the variables that a run_scoped equation allocates."""
    return eqn.params["jaxpr"].invars[len(eqn.invars) :]


def scopes(jaxpr: Any) -> list[Site]:
    """Returns the scopes of a jaxpr, the outer before the inner ones."""
    return [site for site in walk(jaxpr) if site.op.primitive is run_scoped_p]


def arrays_of(found: Sequence[Site]) -> dict[Operand, Any]:
    """Returns the variable of each reference that scopes allocate."""
    return {
        value: var
        for site in found
        for value, var in zip(site.op.made, scope_refs(site.eqn), strict=True)
    }


def barriers_of(site: Site) -> Iterator[tuple[BarrierKey, Any]]:
    """Yields the barriers that a scope declares, and their types."""
    in_warp = site.is_inside(warp_map_p)
    for i, ref in enumerate(site.op.made):
        if ref.aval.memory_space is types.BARRIERS:
            yield BarrierKey(site.eqn, i, in_warp), ref.aval


def place(
    space: types.MemorySpace, refs: Sequence[Any], top: int
) -> tuple[list[Allocation | None], int]:
    """Places a scope's arrays in a memory space above `top`.

    The alternatives of a union start at one offset. The arrays of an alternative lie
    behind each other, and what follows the union lies behind the longest one.

    Returns:
      An allocation per declaration, None for those in other spaces; and the new top.
    """
    placed: list[Allocation | None] = []
    # The ends of alternatives so far, by path, and the starts of unions, by the path of
    # the alternative around them and their number in it.
    starts: dict[tuple[_Path, int], int] = {}
    ends: dict[_Path, int] = {}
    for ref in refs:
        aval = ref.aval
        if aval.memory_space is not space:
            placed.append(None)
            continue
        overlay = aval.storage.overlay if isinstance(aval, types.KernelRef) else None
        path = () if overlay is None else overlay.path
        below = _end_of(path, top, starts, ends)
        offset, size = _align(below, space.alignment), space.size(aval)
        what = _what(aval) + (" in a union" if overlay is not None else "")
        placed.append(Allocation(what, offset, size))
        top = max(top, offset + size)
        for depth in range(1, len(path) + 1):
            ends[path[:depth]] = max(ends.get(path[:depth], 0), offset + size)
    return placed, top


def _end_of(
    path: _Path,
    top: int,
    starts: dict[tuple[_Path, int], int],
    ends: dict[_Path, int],
) -> int:
    """Returns the end of an alternative: the start of its union if it is empty."""
    if not path or path in ends:
        return ends.get(path, top)
    around, (union, _) = path[:-1], path[-1]
    if (around, union) not in starts:
        starts[around, union] = _end_of(around, top, starts, ends)
    return starts[around, union]


def _what(aval: Any) -> str:
    return aval.memory_space.describe(aval, aval.shape).partition(" ")[2]


def _highest(found: Sequence[Site], space: types.MemorySpace) -> Stack:
    """Returns the stack of nested scopes with the highest top in a memory space."""
    highest = Stack(space)
    opened: list[tuple[Site, Stack]] = []
    for site in found:
        while opened and opened[-1][0] not in site.enclosing:
            opened.pop()
        below = opened[-1][1] if opened else Stack(space)
        placed, top = place(space, site.op.made, below.top)
        own = tuple(allocation for allocation in placed if allocation is not None)
        stack = Stack(space, (*below.allocations, *own), top)
        opened.append((site, stack))
        highest = max(highest, stack, key=lambda s: s.top)
    return highest


def owner(eqn: _jax.JaxprEqn, *, in_warp: bool, warpgroups: int) -> Owner:
    """Returns who has the SMEM of a scope.

    Args:
      eqn: the run_scoped equation.
      in_warp: whether a warp enters it.
      warpgroups: of a block.
    """
    if in_warp:
        return "warp"
    if warpgroups == 1 or eqn.params["collective_axes"]:
        return "block"
    # A scope of accumulators has no arrays in SMEM; others in it may have.
    spaces = [var.aval.memory_space for var in scope_refs(eqn)]
    return "warpgroup" if types.SMEM in spaces else "block"


def _barriers(
    found: Sequence[Site], warps: int
) -> tuple[int, dict[BarrierKey, int], dict[int, tuple[types.Barrier, int]]]:
    """Returns the number of barriers, and the declarations with their first one."""
    slots: dict[BarrierKey, int] = {}
    declared: dict[int, tuple[types.Barrier, int]] = {}
    count = 0
    for key, aval in (one for site in found for one in barriers_of(site)):
        if key not in slots:
            copies = warps if key.in_warp else 1
            slots[key], declared[count] = count, (aval.barrier, copies)
            count += types.BARRIERS.size(aval) * copies
    return count, slots, declared


@kept
def plan(
    jaxpr: _jax.Jaxpr,
    target: arch.GpuTarget,
    name: str,
    reduction_scratch_bytes: int | None,
    warpgroups: int,
) -> Plan:
    """Plans the declarations of a kernel's scopes, and scratch in the remaining SMEM.

    Args:
      jaxpr: the kernel's body, without composites.
      target: the target, with its budgets.
      name: of the kernel, for messages.
      reduction_scratch_bytes: scratch of each warpgroup; None lets the compiler choose.
      warpgroups: of a block.

    Raises:
      OutOfResources: it does not fit the target; the message lists the allocations.
      ArgumentError: two of its declarations exclude each other.
    """
    result = _without_scratch(jaxpr, warpgroups)
    if result.stacks[types.TMEM].top > types.TMEM.budget(target):
        raise _out_of_tmem(result.stacks[types.TMEM], target, name)
    _check_accumulators(result.stacks[types.REGS], target, name)
    limit = types.SMEM.budget(target)
    if result.smem_bytes > limit:
        raise out_of_smem(result, target, name)
    room = _room_bytes(result, target, warpgroups)
    least = max((least_scratch_bytes(site.eqn) for site in walk(jaxpr)), default=0)
    if room < least:
        needed = dataclasses.replace(result, scratch_bytes=least * warpgroups)
        raise out_of_smem(needed, target, name)
    asked = reduction_scratch_bytes
    each = _DEFAULT_SCRATCH_BYTES if asked is None else asked
    each = min(_align(each, SCRATCH_GRANULE_BYTES), room)
    return dataclasses.replace(
        result,
        scratch_room_bytes=each * warpgroups,
        scratch_limit_bytes=(room if asked is None else each) * warpgroups,
        scratch_free_bytes=room * warpgroups,
    )


def staging_bytes(jaxpr: _jax.Jaxpr, target: arch.GpuTarget, warpgroups: int) -> int:
    """Returns the SMEM that is left for further arrays of each warpgroup.

    Negative if there is too little for the arrays and the usual scratch.
    """
    alignment = types.SMEM.alignment
    room = _room_bytes(_without_scratch(jaxpr, warpgroups), target, warpgroups)
    if room < _DEFAULT_SCRATCH_BYTES:
        return -1
    # The arrays of the first warpgroup start at the next multiple.
    left = room - _DEFAULT_SCRATCH_BYTES - _align(alignment, warpgroups) // warpgroups
    return max(left - left % alignment, 0)


def _room_bytes(result: Plan, target: arch.GpuTarget, warpgroups: int) -> int:
    """Returns the scratch that each warpgroup can have."""
    left = types.SMEM.budget(target) - result.scratch_offset_bytes
    room = max(left, 0) // warpgroups
    return room - room % SCRATCH_GRANULE_BYTES


def _without_scratch(jaxpr: _jax.Jaxpr, warpgroups: int) -> Plan:
    found = scopes(jaxpr)
    _check_scopes(found)
    of: dict[Owner, list[Site]] = {"block": [], "warpgroup": [], "warp": []}
    for site in found:
        in_warp = site.is_inside(warp_map_p)
        of[owner(site.eqn, in_warp=in_warp, warpgroups=warpgroups)].append(site)
    stacks = {space: _highest(of["block"], space) for space in types.MemorySpace}
    warps = WARPS * warpgroups
    barriers = _barriers(found, warps)
    own = (_highest(of["warpgroup"], types.SMEM), _highest(of["warp"], types.SMEM))
    pairs = _has_collective_tmem(found)
    return Plan(stacks, 0, *barriers, 0, 0, 0, pairs, *own, warps)


def _has_collective_tmem(found: Sequence[Site]) -> bool:
    refs = [ref.aval for site in found for ref in site.op.made]
    return any(a.memory_space is types.TMEM and a.storage.collective for a in refs)


def _check_scopes(found: Sequence[Site]) -> None:
    """Raises for conflicting declarations."""
    seen: dict[types.Resource, list[Any]] = {}
    for site in found:
        with errors.at(site.line):
            for aval in (ref.aval for ref in site.op.made):
                earlier = seen.setdefault(aval.memory_space, [])
                aval.memory_space.check_beside(aval, earlier)
                earlier.append(aval)


def table(result: Plan) -> str:
    """Returns what a plan allocates in SMEM as a table in bytes."""
    rows = _rows(result.stacks[types.SMEM])
    own: tuple[Literal["warpgroup", "warp"], ...] = ("warpgroup", "warp")
    for who in own:
        offset, each, count = result.own(who)
        if each:
            what = f"arrays of {count} {who}s"
            rows.append((what, f"{offset:,}", f"{each * count:,}"))
    if result.barriers:
        word = "barrier" if result.barriers == 1 else "barriers"
        rows.append((f"{result.barriers} {word}", f"{result.barrier_offset_bytes:,}",
                     f"{types.BARRIER_BYTES * result.barriers:,}"))  # fmt: skip
    if result.tmem_columns:
        rows.append(("address of TMEM", f"{result.tmem_address_offset_bytes:,}",
                     f"{_TMEM_ADDRESS_BYTES:,}"))  # fmt: skip
    if result.scratch_bytes:
        rows.append(("scratch", f"{result.scratch_offset_bytes:,}",
                     f"{result.scratch_bytes:,}"))  # fmt: skip
    return _table(rows, result.smem_bytes, "bytes")


def _rows(stack: Stack) -> list[tuple[str, str, str]]:
    return [(a.what, f"{a.offset:,}", f"{a.size:,}") for a in stack.allocations]


def _table(rows: list[tuple[str, str, str]], total: int, unit: str) -> str:
    rows = [*rows, ("total", "", f"{total:,}")]
    header = ("allocation", "offset", unit)
    widths = [max(len(r[i]) for r in (header, *rows)) for i in range(3)]
    lines = [
        f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}"
        for a, b, c in (header, *rows)
    ]
    return "\n".join(lines)


def out_of_smem(
    result: Plan, target: arch.GpuTarget, name: str
) -> errors.OutOfResources:
    """Returns the error for a kernel that exceeds the target's SMEM."""
    limit = types.SMEM.budget(target)
    return errors.OutOfResources(
        f"kernel {name}: the block needs more SMEM than {target.name} has",
        resource="SMEM",
        limit_bytes=limit,
        used_bytes=result.smem_bytes,
        expected=f"at most {limit:,} bytes a block",
        got=f"{result.smem_bytes:,} bytes\n{table(result)}",
        hint="use smaller tiles or fewer of them",
    )


def _check_accumulators(stack: Stack, target: arch.GpuTarget, name: str) -> None:
    """Raises OutOfResources for accumulators that no SM has the registers for.

    Up to there, ptxas spills the registers that a thread does not have.
    """
    limit = target.registers_per_sm // WARPGROUP_THREADS
    if stack.top <= limit:
        return
    register_bytes = 4 * WARPGROUP_THREADS
    raise errors.OutOfResources(
        f"kernel {name}: the accumulators of a warpgroup need more registers than an "
        f"SM of {target.name} has",
        resource="registers",
        limit_bytes=limit * register_bytes,
        used_bytes=stack.top * register_bytes,
        expected=f"at most {limit} registers a thread for accumulators, and "
        f"{types.REGS.budget(target)} to avoid spills",
        got=f"{stack.top:,} registers a thread\n"
        + _table(_rows(stack), stack.top, "registers"),
        hint="use a smaller tile, or divide it among several warpgroups",
    )


def _out_of_tmem(
    stack: Stack, target: arch.GpuTarget, name: str
) -> errors.OutOfResources:
    limit = types.TMEM.budget(target)
    column_bytes = LANES * COLUMN_BITS // 8
    return errors.OutOfResources(
        f"kernel {name}: the block needs more TMEM than {target.name} has",
        resource="TMEM",
        limit_bytes=limit * column_bytes,
        used_bytes=stack.top * column_bytes,
        expected=f"at most {limit:,} columns a block",
        got=f"{stack.top:,} columns\n{_table(_rows(stack), stack.top, 'columns')}",
        hint="use smaller tiles, or pack the elements of operands",
    )

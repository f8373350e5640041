# SPDX-License-Identifier: Apache-2.0
"""Scoped allocations: SMEM and barriers for the extent of a body.

A CTA of a cluster may reach into a scope that another has not entered yet: the memory
is there from the start, at an address that both know. A shared scope is entered by all
warpgroups of the CTA together, which also orders what they did before it (the compiled
kernel has to synchronise there, since barriers are initialised on entry). The last one
to leave looks for work that nobody waited for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_gpu import errors, types
from pallas_gpu.emulator.engine import ordering, scheduler
from pallas_gpu.emulator.engine.memory import Memory
from pallas_gpu.emulator.gpu.machine import Cta, Warpgroup
from pallas_gpu.emulator.gpu.mbarrier import BarrierArray
from pallas_gpu.emulator.gpu.wgmma import Accumulator


@dataclasses.dataclass
class Scope:
    """One entered scope.

    Attributes:
      key: (scope, its one warpgroup or None, visit); the same in all CTAs.
      declared: what is allocated.
      allocated: a Memory or BarrierArray for each declaration; None for accumulators,
        which every warpgroup has for itself.
      members: how many warpgroups have to enter.
      entered, left: how many have.
      clock: what they knew together when they entered.
    """

    key: tuple[int, int | None, int]
    declared: Sequence[Any]
    allocated: list[Any]
    members: int
    entered: int = 0
    left: int = 0
    clock: ordering.Clock = dataclasses.field(default_factory=dict)


def enter(
    wg: Warpgroup, scope_id: int, declared: Sequence[Any], shared: bool
) -> scheduler.Run:
    """Allocates, or finds what is allocated; returns the Scope and its references."""
    cta = wg.cta
    visit = wg.visits.get(scope_id, 0)
    wg.visits[scope_id] = visit + 1
    scope = scope_of(cta, (scope_id, None if shared else wg.index, visit), declared)
    scope.entered += 1
    if scope.members > 1:
        ordering.join(scope.clock, wg.release())
        yield scheduler.Wait(
            lambda: scope.entered == scope.members,
            "all warpgroups to enter run_scoped",
            lambda: f"{scope.entered} of {scope.members} warpgroups have entered",
        )
        ordering.join(wg.clock, scope.clock)
    refs = [
        Accumulator(aval) if item is None else item
        for aval, item in zip(declared, scope.allocated, strict=True)
    ]
    return scope, refs


def scope_of(
    cta: Cta, key: tuple[int, int | None, int], declared: Sequence[Any]
) -> Scope:
    """Returns a scope of a CTA, and makes it for the first who asks."""
    scope = cta.scopes.get(key)
    if scope is None:
        members = len(cta.warpgroups) if key[1] is None else 1
        scope = Scope(key, declared, _allocate(cta, key, declared), members)
        cta.scopes[key] = scope
    return scope


def leave(wg: Warpgroup, scope: Scope) -> None:
    """Leaves a scope; the last one frees it.

    Raises:
      BarrierError: a copy or a barrier's phase is unfinished.
      KernelError: asynchronous work may still read the memory.
    """
    cta = wg.cta
    scope.left += 1
    cta.left_at[wg.actor] = wg.clock[wg.actor]
    wg.release()
    if scope.left < scope.members:
        return
    del cta.scopes[scope.key]
    cta.left[scope.key[:2]] = scope.key[2]
    for item in scope.allocated:
        if isinstance(item, Memory):
            _require_quiet(wg, item)
            cta.memories.remove(item)
    for item in scope.allocated:
        # Arrivals of other CTAs may still come: those barriers are looked at when the
        # cluster ends.
        if isinstance(item, BarrierArray) and not item.collective_axes:
            item.require_quiet()


def _allocate(cta: Cta, key: Any, declared: Sequence[Any]) -> list[Any]:
    allocated: list[Any] = []
    for position, aval in enumerate(declared):
        match aval:
            case types.BarrierRef():
                place = (key[0], position)
                allocated.append(BarrierArray.of(cta, aval.barrier, place))
            case types.AccumulatorRef():
                allocated.append(None)
            case _:
                allocated.append(_allocate_array(cta, aval, (key, position)))
    return allocated


def _allocate_array(cta: Cta, aval: Any, place: Any) -> Memory:
    if aval.memory_space is not types.SMEM:
        raise errors.NotModelledError(
            f"the emulator has no scratch memory in {aval.memory_space.name}",
            expected="SMEM, a barrier or an accumulator",
            hint="pass GMEM scratch as an additional output",
        )
    where = f"(allocation {next(cta.allocations)}{cta.suffix})"
    name = f"SMEM {jnp.dtype(aval.dtype).name}{list(aval.shape)} {where}"
    zeros = cta.machine.params.uninitialized_memory == "zero"
    dtype = np.dtype(aval.dtype)
    memory = Memory.fresh(name, types.SMEM, tuple(aval.shape), dtype, zeros)
    tiling = types.smem_layout(aval.shape, aval.dtype, aval.transforms).tiling
    if tiling is not None:
        memory.tile = (1,) * (len(aval.shape) - len(tiling)) + tuple(tiling)
    memory.place = place
    cta.memories.append(memory)
    return memory


def _require_quiet(wg: Warpgroup, memory: Memory) -> None:
    clocks = [t.clock for t in wg.cta.warpgroups]
    for record in memory.history.records:
        if not record.by_copy or any(record.known_to(clock) for clock in clocks):
            continue
        if record.writes:
            raise errors.BarrierError(
                f"{memory.name} is freed while {record.what} is under way: nobody "
                "waited for it",
                expected="a barrier_wait for every copy before the kernel or the scope "
                "ends",
                got=f"a copy to elements {ordering.box_text(record.box)}",
                hint=record.hint,
                where=record.where,
            )
        raise errors.KernelError(
            f"{memory.name} is freed while {record.what} may still read it",
            expected="a wait for it before the kernel or the scope ends",
            got=f"{record.what} reads elements {ordering.box_text(record.box)}",
            hint=record.hint,
            where=record.where,
        )

# SPDX-License-Identifier: Apache-2.0
"""Scoped allocations: SMEM and barriers for the extent of a body.

A shared scope is entered by all warpgroups of the CTA together, which also orders what
they did before it (the compiled kernel has to synchronise there, since barriers are
initialised on entry). The last one to leave looks for work that nobody waited for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_gpu import errors, types
from pallas_gpu.emulator import ordering, scheduler
from pallas_gpu.emulator.machine import Cta, Warpgroup
from pallas_gpu.emulator.mbarrier import BarrierArray
from pallas_gpu.emulator.memory import Memory
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.scoped import run_scoped_p


@dataclasses.dataclass
class Scope:
    """One entered scope.

    Attributes:
      key: which scope and visit, for a shared one.
      allocated: a Memory or BarrierArray for each declaration.
      members: how many warpgroups have to enter.
      entered, left: how many have.
      clock: what they knew together when they entered.
    """

    key: Any
    allocated: list[Any]
    members: int
    entered: int = 0
    left: int = 0
    clock: ordering.Clock = dataclasses.field(default_factory=dict)


def enter(
    wg: Warpgroup, scope_id: int, declared: Sequence[Any], shared: bool
) -> scheduler.Run:
    """Allocates, or finds what another warpgroup has allocated; returns the Scope."""
    cta = wg.cta
    if not shared or len(cta.warpgroups) == 1:
        return Scope(None, _allocate(cta, scope_id, declared), 1)
    visit = wg.visits.get(scope_id, 0)
    wg.visits[scope_id] = visit + 1
    key = (scope_id, visit)
    if key not in cta.scopes:
        allocated = _allocate(cta, scope_id, declared)
        cta.scopes[key] = Scope(key, allocated, len(cta.warpgroups))
    scope = cta.scopes[key]
    scope.entered += 1
    ordering.join(scope.clock, wg.release())
    yield scheduler.Wait(
        lambda: scope.entered == scope.members,
        "all warpgroups to enter run_scoped",
        lambda: f"{scope.entered} of {scope.members} warpgroups have entered",
    )
    ordering.join(wg.clock, scope.clock)
    return scope


def leave(wg: Warpgroup, scope: Scope) -> None:
    """Leaves a scope; the last one frees it.

    Raises:
      BarrierError: a copy or a barrier's phase is unfinished.
      KernelError: a copy to GMEM may still read the memory.
    """
    scope.left += 1
    if scope.left < scope.members:
        return
    if scope.key is not None:
        del wg.cta.scopes[scope.key]
    for item in scope.allocated:
        if isinstance(item, Memory):
            _require_quiet(wg, item)
            wg.cta.memories.remove(item)
    for item in scope.allocated:
        if isinstance(item, BarrierArray):
            item.require_quiet()


def _allocate(cta: Cta, scope_id: int, declared: Sequence[Any]) -> list[Any]:
    allocated: list[Any] = []
    for position, aval in enumerate(declared):
        if not isinstance(aval, types.BarrierRef):
            allocated.append(_allocate_array(cta, aval))
            continue
        key = (scope_id, position)
        if key not in cta.barriers:
            number = next(cta.allocations)
            cta.barriers[key] = BarrierArray(cta, aval.barrier, number)
        allocated.append(cta.barriers[key])
    return allocated


def _allocate_array(cta: Cta, aval: Any) -> Memory:
    if aval.memory_space is not types.SMEM:
        raise errors.NotModelledError(
            f"the emulator has no scratch memory in {aval.memory_space.name}",
            expected="SMEM or a barrier",
            hint="pass GMEM scratch as an additional output",
        )
    number = next(cta.allocations)
    name = f"SMEM {jnp.dtype(aval.dtype).name}{list(aval.shape)} (allocation {number})"
    zeros = cta.machine.params.uninitialized_memory == "zero"
    dtype = np.dtype(aval.dtype)
    memory = Memory.fresh(name, types.SMEM, tuple(aval.shape), dtype, zeros)
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
            expected="wait_smem_to_gmem(0) before the kernel or the scope ends",
            got=f"a copy from elements {ordering.box_text(record.box)}",
            hint=record.hint,
            where=record.where,
        )


@registry.register(run_scoped_p, registry.RuleKind.EMULATE)
def _run_scoped_rule(*_: Any, **__: Any) -> None:
    # Listed so that the table of rules is complete; evaluate.py runs scopes itself,
    # because their body is a plan.
    raise errors.InternalError("run_scoped is control flow, not an effect")

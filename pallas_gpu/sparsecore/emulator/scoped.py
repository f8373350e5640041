# SPDX-License-Identifier: Apache-2.0
"""Scopes: memory and semaphores of a subcore, and what all of a core share.

Each subcore has its own VMEM, SMEM and semaphores; VMEM_SHARED is the core's. A subcore
may reach those of another one that has not entered the scope: they exist already.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from pallas_gpu import errors
from pallas_gpu.emulator.engine import evaluate, ordering
from pallas_gpu.emulator.engine.execution import report
from pallas_gpu.emulator.engine.steps import ControlStep
from pallas_gpu.emulator.engine.tables import Key
from pallas_gpu.emulator.engine.threads import Thread
from pallas_gpu.emulator.engine.waits import Run
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.scoped import run_scoped_p
from pallas_gpu.sparsecore.emulator.cores import Allocated, Declared, Subcore
from pallas_gpu.sparsecore.emulator.memory import Array
from pallas_gpu.sparsecore.emulator.semaphores import SemaphoreArray
from pallas_gpu.sparsecore.types import MACHINE, SEMAPHORES, VMEM_SHARED

# How often a subcore has entered each scope.
_VISITS: Key[Thread, dict[Any, int]] = Key("visits of scopes", lambda thread: {})


@registry.register(run_scoped_p, registry.RuleKind.EMULATE, MACHINE)
def _run_scoped(thread: Subcore, step: ControlStep, ins: list[Any]) -> Run:
    jaxpr, visits = step.params["jaxpr"], _VISITS.of(thread)
    visit = visits[jaxpr] = visits.get(jaxpr, 0) + 1
    names = zip(jaxpr.invars[len(ins) :], step.params["names"], strict=True)
    declared = [
        Declared((jaxpr, visit, i), var.aval, name, _make)
        for i, (var, name) in enumerate(names)
    ]
    refs = [thread.allocated(each) for each in declared]
    (body,) = step.plans
    # That of the kernel's scratch memory, alone or alone in that of `get_global`.
    outermost = all(
        location.op.primitive is run_scoped_p and len(location.op.regions[0].ops) == 1
        for location, _ in thread.around[1:]
    )
    results = yield from evaluate.run(thread, body, [*ins, *refs])
    thread.location = step.location
    if not thread.core.device.like_upstream:
        _require_finished(thread, refs)
    for each in declared:
        thread.free(each, lasts=outermost)
    return results


def _make(declared: Declared, subcore: Subcore) -> Allocated:
    """Returns what a subcore gets for a declaration."""
    aval, core = declared.aval, subcore.core
    of = f" ({declared.name})" if declared.name else ""
    owner = core.index, subcore.index
    place: Hashable
    if aval.memory_space is SEMAPHORES:
        place = declared.place, owner
        return SemaphoreArray(declared, subcore, place)
    shared = aval.memory_space is VMEM_SHARED
    place = declared.place, core.index if shared else owner
    suffix = core.suffix if shared else f" of {subcore.name}"
    dtype = np.dtype(aval.dtype).name
    name = f"{aval.memory_space.name} {dtype}{list(aval.shape)}{of}{suffix}"
    return Array.fresh(name, declared, place, core.device.zeros)


def _require_finished(thread: Subcore, refs: Sequence[Any]) -> None:
    """Reports semaphores that are not zero, and copies that may be under way."""
    for ref in refs:
        if isinstance(ref, SemaphoreArray):
            ref.require_zero()
    for ref in refs:
        if isinstance(ref, Array) and ref.space is not VMEM_SHARED:
            _require_unused(thread, ref)


def _require_unused(thread: Subcore, array: Array) -> None:
    """Reports copies from or to memory that is freed, which may be under way."""
    for record in array.history.live():
        if not record.by_copy or record.known_to(thread.clock):
            continue
        error = errors.KernelError(
            f"{array.name} is freed while {record.what} may still access it",
            expected="a wait for every copy before the kernel or the scope ends",
            got=f"a copy of elements {ordering.box_text(record.box)}",
            hint=record.hint,
            where=record.where,
        )
        report(error.about(rule="freed-memory", buffer=array.name))
        return

# SPDX-License-Identifier: Apache-2.0
"""Scoped allocations: SMEM and barriers for the duration of a body.

A CTA of a cluster may access a scope that another has not entered: the memory exists
from the start, at an address that both know. All warpgroups of the CTA enter a shared
scope together, which also orders their previous accesses (the compiled kernel must
synchronize there, since barriers are initialised on entry). The last one to leave
reports work that has not been waited for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_gpu import errors, resources, types
from pallas_gpu.emulator.engine import evaluate, ordering
from pallas_gpu.emulator.engine.execution import report
from pallas_gpu.emulator.engine.memory import Referent, fresh_elements
from pallas_gpu.emulator.engine.orders.choices import Kind, Touch
from pallas_gpu.emulator.engine.steps import ControlStep
from pallas_gpu.emulator.engine.tables import Key
from pallas_gpu.emulator.engine.threads import Thread
from pallas_gpu.emulator.engine.waits import Run, Wait
from pallas_gpu.emulator.gpu import union
from pallas_gpu.emulator.gpu.machine.cta import Cta, Warpgroup
from pallas_gpu.emulator.gpu.mbarrier import BarrierArray
from pallas_gpu.emulator.gpu.smem import SharedArray
from pallas_gpu.emulator.gpu.sync import semaphore
from pallas_gpu.emulator.gpu.tensor_cores.tmem import WAIT_LOAD, TensorArray
from pallas_gpu.emulator.gpu.tensor_cores.wgmma import Accumulator
from pallas_gpu.layouts import SmemLayout
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.scoped import get_global_p, run_scoped_p

# (scope, its one warpgroup or warp or None, visit); the same in all CTAs.
ScopeKey = tuple[Any, tuple[int, ...] | None, int]


class Declared(NamedTuple):
    """One declaration of a scope.

    Attributes:
      var: the variable of its reference.
      name: by which the author knows it; may be empty.
    """

    var: Any
    name: str

    @property
    def aval(self) -> Any:
        """The type of its reference."""
        return self.var.aval


@dataclasses.dataclass
class Scope:
    """One entered scope.

    Attributes:
      declared: its declarations, with the author's names.
      arrays: in SMEM and TMEM, by the position of their declaration.
      barriers: likewise.
      of_launch: those in GMEM, likewise. Accumulators belong to a warpgroup.
      members: number of warpgroups that must enter; 1 for the scope of a warp.
      entered, left: number of warpgroups that have done so.
      clock: the join of their clocks on entry.
    """

    key: ScopeKey
    declared: Sequence[Declared]
    arrays: dict[int, Any]
    barriers: dict[int, BarrierArray]
    of_launch: dict[int, Referent]
    members: int
    entered: int = 0
    left: int = 0
    clock: ordering.Clock = dataclasses.field(default_factory=dict)

    def referent(self, position: int) -> Referent:
        """Returns the allocation of a reference of the scope."""
        if position in self.arrays:
            return self.arrays[position]
        if position in self.barriers:
            return self.barriers[position]
        if position in self.of_launch:
            return self.of_launch[position]
        return Accumulator(self.declared[position].aval)


@dataclasses.dataclass
class Scopes:
    """The scopes of one CTA.

    Attributes:
      open: those that a warpgroup has entered and not all have left.
      left: for each scope the latest visit that has ended.
      left_at: the time of each warpgroup when it last left a scope.
      lasting: the scope around the whole body, once it is left: its memory exists until
        the cluster ends.
      read: arrays in SMEM of scopes that have ended, which copies may still read; the
        next scope may use their memory.
    """

    open: dict[ScopeKey, Scope] = dataclasses.field(default_factory=dict)
    left: dict[Any, int] = dataclasses.field(default_factory=dict)
    left_at: ordering.Clock = dataclasses.field(default_factory=dict)
    lasting: Scope | None = None
    read: list[SharedArray] = dataclasses.field(default_factory=list)


_SCOPES: Key[Cta, Scopes] = Key("scopes", lambda cta: Scopes())
# How often a warpgroup has entered each scope.
_VISITS: Key[Thread, dict[Any, int]] = Key("visits of scopes", lambda thread: {})


def scopes_of(cta: Cta) -> Scopes:
    """Returns the scopes of a CTA."""
    return _SCOPES.of(cta)


@registry.register(run_scoped_p, registry.RuleKind.EMULATE)
def _run_scoped(wg: Warpgroup, step: ControlStep, ins: list[Any]) -> Run:
    jaxpr = step.params["jaxpr"]
    refs_of = zip(jaxpr.invars[len(ins) :], step.params["names"], strict=True)
    declared = [Declared(v, name) for v, name in refs_of]
    shared = bool(step.params["collective_axes"])
    scope, refs = yield from _enter(wg, jaxpr, declared, shared)
    (body,) = step.plans
    results = yield from evaluate.run(wg, body, [*ins, *refs])
    wg.location = step.location
    _leave(wg, scope)
    return results


@registry.register(get_global_p, registry.RuleKind.EMULATE)
def _get_global(wg: Warpgroup, _: Any, **__: Any) -> list[Referent]:
    assert wg.location is not None
    (var,) = wg.location.op.equation.outvars
    array = wg.cta.work[var]
    if isinstance(var.aval, types.SemaphoreRef):
        return [semaphore.of_launch(wg.cta, array, wg.location.where)]
    return [array]


def _enter(
    wg: Warpgroup, jaxpr: Any, declared: Sequence[Declared], shared: bool
) -> Generator[Wait | None, None, tuple[Scope, list[Referent]]]:
    """Allocates or finds the scope; returns it with its references."""
    cta = wg.cta
    visits = _VISITS.of(wg)
    visit = visits.get(jaxpr, 0)
    visits[jaxpr] = visit + 1
    scope = scope_of(cta, (jaxpr, None if shared else wg.place, visit), declared)
    scope.entered += 1
    inside = (cta.name, scope.key)
    if scope.members > 1:
        wg.execution.touch(Touch(inside, Kind.ADD))
        ordering.join(scope.clock, wg.release())
        yield Wait(
            lambda: scope.entered == scope.members,
            "all warpgroups to enter run_scoped",
            lambda: f"{scope.entered} of {scope.members} warpgroups have entered",
        )
        wg.execution.touch(Touch(inside, Kind.AWAIT))
        ordering.join(wg.clock, scope.clock)
    # Whether other CTAs may use its memory depends on that.
    if scope.key[0] is not cta.cluster.lasting:
        wg.execution.touch(Touch(("visits", cta.name), Kind.ADD))
    if scope.arrays:
        _require_read(wg)
    return scope, [scope.referent(i) for i in range(len(declared))]


def scope_of(cta: Cta, key: ScopeKey, declared: Sequence[Declared]) -> Scope:
    """Returns a scope of a CTA; the first call creates it."""
    scopes = scopes_of(cta)
    scope = scopes.open.get(key)
    if scope is None:
        if not scopes.open and not scopes.left:
            cta.at_end.append(functools.partial(_require_read, cta.warpgroups[0]))
        members = len(cta.warpgroups) if key[1] is None else 1
        scope = Scope(key, declared, {}, {}, {}, members)
        _allocate(cta, scope)
        scopes.open[key] = scope
    return scope


def _leave(wg: Warpgroup, scope: Scope) -> None:
    """Leaves a scope; the last one frees it.

    Asynchronous work may read SMEM until another scope begins, or the kernel ends.

    Raises:
      BarrierError: a copy or a barrier's phase is unfinished.
      KernelError: asynchronous work may still read TMEM, or another CTA the memory.
    """
    scopes = scopes_of(wg.cta)
    for place in (("visits", wg.cta.name), ("left", wg.cta.name, *scope.key[:2])):
        wg.execution.touch(Touch(place, Kind.ADD))
    scope.left += 1
    scopes.left_at[wg.actor] = wg.clock[wg.actor]
    wg.release()
    if scope.left < scope.members:
        return
    del scopes.open[scope.key]
    scopes.left[scope.key[:2]] = scope.key[2]
    if scope.key[0] is wg.cta.cluster.lasting:
        scopes.lasting = scope
    for array in scope.arrays.values():
        _require_unused(wg, array)
        if scopes.lasting is not scope:
            _require_no_guests(wg, array)
    for barriers in scope.barriers.values():
        # Copies of other CTAs may be pending: those barriers are checked when the
        # cluster ends.
        if not isinstance(barriers.declaration, types.ClusterBarrier):
            barriers.require_quiet()


def _allocate(cta: Cta, scope: Scope) -> None:
    for i, (var, name) in enumerate(scope.declared):
        match aval := var.aval:
            case types.SemaphoreRef():
                scope.of_launch[i] = semaphore.of_cta(cta, cta.work[var], name)
            case _ if var in cta.work:
                scope.of_launch[i] = cta.work[var]
            case types.BarrierRef():
                declaration = (*scope.key[:2], i)
                scope.barriers[i] = BarrierArray.of(
                    cta, aval.barrier, declaration, name
                )
            case types.AccumulatorRef():
                pass
            case _:
                scope.arrays[i] = _allocate_array(cta, var, (scope.key, i), name)
    _unite(cta, scope)


def _unite(cta: Cta, scope: Scope) -> None:
    """Makes the members of each union the same bytes."""
    refs = [declared.var for declared in scope.declared]
    for space, unit_bytes in ((types.SMEM, 1), (types.TMEM, union.COLUMN_BYTES)):
        placed, _ = resources.place(space, refs, 0)
        unions: dict[int, list[tuple[union.Member, resources.Allocation]]] = {}
        for i, allocation in enumerate(placed):
            memory = scope.arrays.get(i)
            if isinstance(memory, union.Member) and allocation is not None:
                overlay = refs[i].aval.storage.overlay
                unions.setdefault(overlay.union, []).append((memory, allocation))
        for members in unions.values():
            start = min(allocation.offset for _, allocation in members)
            end = max(allocation.offset + allocation.size for _, allocation in members)
            united = union.Union((end - start) * unit_bytes, cta.device.zeros)
            for memory, allocation in members:
                united.add(memory, (allocation.offset - start) * unit_bytes)


def _allocate_array(
    cta: Cta, var: Any, place: Any, name: str
) -> SharedArray | TensorArray:
    aval = var.aval
    if aval.memory_space not in (types.SMEM, types.TMEM):
        raise errors.NotModelledError(
            f"the emulator does not model scratch memory in {aval.memory_space.name}",
            expected="GMEM, SMEM, TMEM, a barrier or an accumulator",
            hint="declare it in another memory",
        )
    of = f" ({name}{cta.suffix})" if name else cta.suffix
    name = (
        f"{aval.memory_space.name} {jnp.dtype(aval.dtype).name}{list(aval.shape)}{of}"
    )
    shape, dtype = tuple(aval.shape), np.dtype(aval.dtype)
    data, written = fresh_elements(shape, dtype, cta.device.zeros)
    if aval.memory_space is types.TMEM:
        if aval.storage.overlay is None:
            return TensorArray(name, data, written, place)
        bits = types.itemsize_bits(aval.dtype)
        columns = union.Columns(aval.storage.layout, shape, bits)
        return union.TensorMember(name, data, written, place, placement=columns)
    layout = _layout(shape, aval.dtype, aval.transforms)
    if aval.storage.overlay is None:
        return SharedArray(name, data, written, place, layout, cta)
    inferred = var in cta.cluster.inferred_members
    return union.UnionMember(
        name, data, written, place, layout, cta, is_inferred=inferred
    )


@functools.lru_cache(maxsize=1024)
def _layout(shape: tuple[int, ...], dtype: Any, transforms: Any) -> SmemLayout:
    """Returns how an array is stored; cached, since all CTAs use the same."""
    return types.smem_layout(shape, dtype, transforms)


def _require_no_guests(wg: Warpgroup, memory: SharedArray | TensorArray) -> None:
    """Raises KernelError if threads of another CTA may still access an array."""
    cta = wg.cta
    if len(cta.cluster.ctas) == 1:
        return
    own = [*cta.warpgroups, *(warp for one in cta.warpgroups for warp in one.warps)]
    actors = {thread.actor for thread in own}
    for record in memory.history.live():
        if record.by_copy or record.actor in actors:
            continue
        if any(record.known_to(thread.clock) for thread in own):
            continue
        error = errors.KernelError(
            f"{memory.name} is freed while {record.what} may still access it",
            expected="a wait for the other CTA before the scope ends",
            got=f"an access to elements {ordering.box_text(record.box)}",
            hint=record.hint,
            where=record.where,
        )
        report(error.about(rule="freed-memory", buffer=memory.name))


def _require_read(wg: Warpgroup) -> None:
    """Raises KernelError if the memory of a scope that has ended is still read."""
    scopes = scopes_of(wg.cta)
    for array in scopes.read:
        for record in _unfinished(wg, array):
            report(_still_read(array, record))
    scopes.read.clear()


def _require_unused(wg: Warpgroup, memory: SharedArray | TensorArray) -> None:
    """Checks the memory of a scope that ends.

    Raises:
      BarrierError: asynchronous work still writes it.
      KernelError: asynchronous work still reads TMEM. Of SMEM this is checked later.
    """
    if wg.cta.device.like_upstream:
        return
    for record in _unfinished(wg, memory):
        if record.writes:
            error = errors.BarrierError(
                f"{memory.name} is freed while {record.what} is in flight: it "
                "has not been waited for",
                expected="a barrier_wait for every copy before the kernel or the scope "
                "ends",
                got=f"a copy to elements {ordering.box_text(record.box)}",
                hint=record.hint,
                where=record.where,
            )
            report(error.about(rule="unfinished-copy", buffer=memory.name))
            return
        if not isinstance(memory, SharedArray):
            report(_still_read(memory, record))
            return
        scopes_of(wg.cta).read.append(memory)


def _unfinished(
    wg: Warpgroup, memory: SharedArray | TensorArray
) -> Iterator[ordering.Access]:
    """Yields the asynchronous accesses that no thread of the CTA has waited for."""
    own = wg.cta.warpgroups
    threads = (wg, *own, *(warp for one in own for warp in one.warps))
    for record in memory.history.live():
        if record.hint == WAIT_LOAD and not scopes_of(wg.cta).open:
            continue  # the end of the kernel waits for loads from TMEM
        if record.by_copy and not any(record.known_to(t.clock) for t in threads):
            yield record


def _still_read(
    memory: SharedArray | TensorArray, record: ordering.Access
) -> errors.KernelError:
    return errors.KernelError(
        f"{memory.name} is freed while {record.what} may still read it",
        expected="a wait for it before the kernel ends or another scope begins",
        got=f"{record.what} reads elements {ordering.box_text(record.box)}",
        hint=record.hint,
        where=record.where,
    ).about(rule="freed-memory", buffer=memory.name, elements=record.box)

# SPDX-License-Identifier: Apache-2.0
"""mbarriers: phases, arrivals, bytes of copies, and the rules that use them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import numpy as np

from pallas_gpu import errors, types
from pallas_gpu.emulator.engine import ordering
from pallas_gpu.emulator.engine.execution import report
from pallas_gpu.emulator.engine.memory import Referent, Region
from pallas_gpu.emulator.engine.orders.choices import Kind, Touch
from pallas_gpu.emulator.engine.steps import Location
from pallas_gpu.emulator.engine.tables import Key
from pallas_gpu.emulator.engine.threads import Handover, Thread, names_of
from pallas_gpu.emulator.engine.waits import TURN, Run, Wait
from pallas_gpu.emulator.gpu.machine.cta import Cta, Warp, Warpgroup
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import mbarrier

_IN_ORDER = (
    "wait for every phase in order, and wait for the readers of the previous phase "
    "before arriving; if several arrive in a phase, declare num_arrivals; a warpgroup "
    "that waits for some of the phases needs barriers of its own"
)


class Shared(Protocol):
    """A copy to which several CTAs contribute.

    Attributes:
      known: the clocks of those that have issued their part.
    """

    known: list[ordering.Clock]

    def missing(self) -> list[str]:
        """Returns the names of the CTAs that have not."""


class Barrier:
    """One mbarrier.

    Attributes:
      name: the author's, with its index.
      actor: its number in clocks; its time is the number of completed phases.
      arrivals: number of arrivals that complete a phase.
      phase: number of completed phases.
      pending_arrivals: missing arrivals in the current phase.
      pending_bytes: bytes announced by copies in the current phase that have not
        arrived; negative if another CTA's part of a multicast arrived first.
      last_copy: the line of the latest copy on it.
      last_arrival: the line of the latest arrival.
      multicasts: those that its CTA has issued in the current phase.
      stores: the number in clocks of asynchronous stores of threads, which use the
        generic proxy; None without any. Its time is that of `actor`.
      note: what else a report of its state says.
      orders_tensor_core: whether arrivals release accesses to tensor memory, too.
      arrived: the threads that have arrived in the current phase.
      touches, place: where it reports what a step does to it, if anybody reads it, and
        as what.
    """

    __slots__ = (
        "_completed", "_first_wait", "_gathered", "_handover", "_waiters", "actor",
        "arrivals", "arrived", "last_arrival", "last_copy", "multicasts", "name",
        "note", "orders_tensor_core", "pending_arrivals", "pending_bytes", "phase",
        "place", "stores", "touches",
    )  # fmt: skip

    def __init__(
        self, name: str, arrivals: int, actor: int, initially_complete: bool = False
    ):
        self.name = name
        self._first_wait = -1 if initially_complete else 0
        self.actor = actor
        self.arrivals = arrivals
        self.phase = 0
        self.stores: int | None = None
        self.pending_arrivals = arrivals
        self.pending_bytes = 0
        self.last_copy: Location | None = None
        self.last_arrival: Location | None = None
        self.multicasts: list[Shared] = []
        self.note = ""
        self.orders_tensor_core = False
        # Who has waited for the previous phase: the thread's time, and its line.
        self._waiters: dict[Warpgroup, tuple[int, Location | None]] = {}
        self._gathered: ordering.Clock = {}
        self._completed: ordering.Clock = {}
        self.arrived: list[Thread] = []
        self._handover: Handover | None = None
        self.touches: list[Touch] | None = None
        self.place: Hashable = None

    def state(self) -> str:
        """Describes the barrier, for reports."""
        came = self.arrivals - self.pending_arrivals
        by = f" (of {names_of(self.arrived)})" if self.arrived else ""
        text = (
            f"{self.name}: {self.phase} phases complete; in the current one {came} of "
            f"{self.arrivals} arrivals{by}, {self.pending_bytes} bytes of copies "
            "pending"
        )
        missing = [name for copy in self.multicasts for name in copy.missing()]
        if missing:
            text += (
                "; a multicast is incomplete: its part has not been copied by "
                + ", ".join(missing)
            )
        return text + self.note

    def arrive(
        self,
        known: ordering.Clock,
        location: Location | None,
        announced_bytes: int = 0,
        count: int = 1,
    ) -> None:
        """Counts arrivals at a line, with the bytes that a copy announces.

        Raises:
          BarrierError: the phase has fewer arrivals, or more bytes than fit.
        """
        touch = self._touch(Kind.ADD)
        if self.pending_arrivals < count:
            came = self.arrivals - self.pending_arrivals
            error = errors.BarrierError(
                f"{self.name} receives more arrivals than it was declared with",
                expected=f"{self.arrivals} arrivals per phase",
                got=f"{'one' if count == 1 else count} more, after {came}"
                f"{self._latest()}, while {self.pending_bytes} bytes of the phase are "
                "pending",
                hint="raise num_arrivals, or wait before arriving for the next phase; "
                "a copy on the barrier counts as one arrival",
            )
            report(error.about(rule="too-many-arrivals", barrier=self.name))
            count = self.pending_arrivals
        self.pending_arrivals -= count
        self.last_arrival = location
        if announced_bytes:
            self.last_copy = location
        self._announce(announced_bytes)
        if not self.orders_tensor_core:
            known = ordering.without_tensor_core(known)
        ordering.join(self._gathered, known)
        self._maybe_complete(touch)

    def _latest(self) -> str:
        """Returns where the latest arrival is."""
        where = self.last_arrival.where if self.last_arrival is not None else None
        return f" (the latest arrival at {where})" if where is not None else ""

    def expect(self, count: int) -> None:
        """Counts bytes that the current phase has to wait for.

        Raises:
          BarrierError: more bytes than the hardware counts.
        """
        # Without it, others may complete the phase.
        self._touch(Kind.WRITE)
        self._announce(count)

    def _announce(self, count: int) -> None:
        self.pending_bytes += count
        self._require_countable()

    def complete_bytes(self, count: int, known: ordering.Clock | None = None) -> None:
        """Counts bytes that have arrived.

        Args:
          count: their number.
          known: what whoever waits for the phase knows by them.
        """
        touch = self._touch(Kind.ADD)
        self.pending_bytes -= count
        if known is not None:
            ordering.join(self._gathered, known)
        self._require_countable()
        self._maybe_complete(touch)

    def _require_countable(self) -> None:
        if abs(self.pending_bytes) <= types.MAX_PENDING_BYTES:
            return
        error = errors.BarrierError(
            f"{self.name} has more bytes pending than it can count",
            expected=f"at most {types.MAX_PENDING_BYTES:,} bytes in flight on a "
            "barrier (PTX ISA, tx-count)",
            got=f"{self.pending_bytes:,} bytes",
            hint="wait for a phase before more is copied, or use several barriers",
        )
        report(error.about(barrier=self.name))

    def _touch(self, kind: Kind, epoch: int | None = None) -> Touch | None:
        """Reports what a step does to a phase, the current one by default."""
        if self.touches is None:
            return None
        touch = Touch(self.place, kind, self.phase if epoch is None else epoch)
        self.touches.append(touch)
        return touch

    def _maybe_complete(self, touch: Touch | None) -> None:
        if self.pending_arrivals or self.pending_bytes:
            if touch is not None and not self.pending_arrivals:
                # Bytes that no arrival of the phase announces could complete it early.
                touch.kind = Kind.WRITE if self.pending_bytes < 0 else touch.kind
            return
        if touch is not None:
            touch.closes = True
        self._require_waiters()
        self.multicasts = []
        self.phase += 1
        self.pending_arrivals = self.arrivals
        self._completed = self._gathered
        self._completed[self.actor] = self.phase
        if self.stores is not None:
            self._completed[self.stores] = self.phase
        self._gathered = {}
        expected = (
            f"{self.arrivals} arrival{'s' if self.arrivals > 1 else ''} per phase"
        )
        self._handover = Handover(self.name, expected, self.arrived)
        self.arrived = []

    def wait(self, wg: Warpgroup) -> Run:
        """Waits for the warpgroup's next phase.

        Raises:
          BarrierError: the phase is too old: its parity is ambiguous.
        """
        awaited = self._awaited(wg)
        if self.phase == awaited:
            yield Wait(
                lambda: self.phase > awaited,
                f"phase {awaited} of {self.name}",
                self.state,
                barrier=self.name,
            )
            self._require_in_time(awaited)
        self._touch(Kind.AWAIT, awaited)
        self._observe(wg, awaited)

    def test(self, wg: Warpgroup) -> bool:
        """Returns whether the warpgroup's next phase is complete; if so, as `wait`.

        Raises:
          BarrierError: the phase is too old: its parity is ambiguous.
        """
        self._touch(Kind.READ)
        awaited = self._awaited(wg)
        if self.phase == awaited:
            return False
        self._observe(wg, awaited)
        return True

    def _awaited(self, wg: Warpgroup) -> int:
        """Returns the phase that a warpgroup, or a warp, waits for next."""
        each = [counts.get(self, self._first_wait) for counts in _counts(wg)]
        awaited = each[0]
        if each.count(awaited) < len(each):
            error = errors.BarrierError(
                f"{self.name}: the warps of {wg.name} wait for different phases",
                expected="as many waits by each of its warps, inside warp_map, before "
                "the warpgroup waits",
                got=", ".join(f"warp {i}: phase {n}" for i, n in enumerate(each)),
                hint="let all four warps wait, or use another barrier for the waits "
                "of the warpgroup",
            )
            report(error.about(barrier=self.name))
        self._require_in_time(awaited)
        return awaited

    def _observe(self, wg: Warpgroup, awaited: int) -> None:
        """Lets a warpgroup know what has been done before a phase was complete."""
        for counts in _counts(wg):
            counts[self] = awaited + 1
        ordering.join(wg.clock, self._completed)
        wg.handover = self._handover
        if wg.execution.detect_races:
            self._waiters[wg] = (wg.clock[wg.actor], wg.location)

    def _require_waiters(self) -> None:
        """Raises BarrierError unless the waits for the previous phase come first.

        They have, but nothing orders the two: in another schedule they are too late.
        """
        for wg, (time, location) in self._waiters.items():
            clocks = [self._gathered, *(c for m in self.multicasts for c in m.known)]
            if any(ordering.has_executed(clock, wg.actor, time) for clock in clocks):
                continue
            error = errors.BarrierError(
                f"{self.name}: a wait can miss its phase",
                expected=f"an order between the wait for phase {self.phase - 1} and "
                f"the arrivals that complete phase {self.phase}",
                got=f"arrivals{self._latest()} that do not know of the wait by "
                f"{wg.name}; if it waits later, its parity denotes another phase, and "
                "the GPU deadlocks or continues too early",
                hint=_IN_ORDER,
                where=location.where if location is not None else None,
            )
            report(error.about(rule="missed-phase", barrier=self.name))
        self._waiters = {}

    def _require_in_time(self, awaited: int) -> None:
        # PTX ISA, mbarrier.test_wait.parity: only the current and the immediately
        # preceding phase can be distinguished.
        if self.phase - awaited < 2:
            return
        error = errors.BarrierError(
            f"{self.name}: a wait missed its phase",
            expected=f"a wait for phase {awaited} before phase {awaited + 1} completes",
            got=f"{self.phase} phases are complete{self._latest()}; the parity of the "
            "wait now denotes another phase, and the GPU would deadlock or continue "
            "too early",
            hint=_IN_ORDER,
        )
        report(error.about(rule="missed-phase", barrier=self.name))

    def require_quiet(self) -> None:
        """Raises BarrierError when a copy is in flight.

        Arrivals that nobody waits for do no harm.
        """
        if self.pending_bytes == 0:
            return
        came = self.arrivals - self.pending_arrivals
        error = errors.BarrierError(
            f"{self.name} ends in the middle of a phase: a copy on it has not been "
            "waited for",
            expected="a barrier_wait for every copy before the end of the scope",
            got=f"{self.pending_bytes} bytes pending in phase {self.phase}, and {came} "
            f"of {self.arrivals} arrivals",
            hint="wait for the copy; num_arrivals must equal the arrivals per phase, "
            "and a copy on the barrier counts as one",
            where=self.last_copy.where if self.last_copy is not None else None,
        )
        report(error.about(rule="unfinished-copy", barrier=self.name))


def _initial_counts(thread: Thread) -> dict[Barrier, int]:
    if isinstance(thread, Warp):
        return dict(_AWAITED.of(thread.warpgroup))
    return {}


# How many phases of each barrier have been waited for. Each warp counts its own, in
# registers; before a warpgroup's first `warp_map` they are the same in all of them.
_AWAITED: Key[Thread, dict[Barrier, int]] = Key("awaited phases", _initial_counts)


def _counts(wg: Warpgroup) -> list[dict[Barrier, int]]:
    """Returns the counts that a wait reads and advances."""
    return [_AWAITED.of(thread) for thread in wg.warps or (wg,)]


class BarrierArray(Referent):
    """An allocation of barriers.

    Attributes:
      declaration: the declaration in the kernel.
    """

    def __init__(self, cta: Cta, declaration: types.Barrier, key: Any, name: str):
        super().__init__(_name(name, (), cta))
        self._author_name = name
        self.declaration = declaration
        self._cta = cta
        self._key = key
        self._barriers = np.empty(declaration.shape, object)
        arrivals = declaration.phase_arrivals(cta.mesh)
        for index in itertools.product(*(range(n) for n in self.shape)):
            self._barriers[index] = Barrier(
                _name(name, index, cta),
                arrivals,
                cta.device.execution.actors.other(),
                declaration.initially_complete,
            )
            barrier: Barrier = self._barriers[index]
            barrier.note = self._note()
            barrier.orders_tensor_core = declaration.orders_tensor_core
            barrier.touches = cta.device.execution.touches
            if barrier.touches is not None:
                barrier.place = ("barrier", cta.name, key, index)

    @classmethod
    def of(
        cls, cta: Cta, declaration: types.Barrier, key: Any, name: str
    ) -> BarrierArray:
        """Returns a CTA's barriers of a declaration.

        They exist from the start of the kernel; the first call creates them.

        Args:
          declaration: the declaration in the kernel.
          key: the declaration's key: (scope, position in it).
          name: the author's; may be empty.
        """
        arrays = _ARRAYS.of(cta)
        if key not in arrays:
            arrays[key] = cls(cta, declaration, key, name)
            if len(cta.cluster.ctas) > 1:
                # Copies of other CTAs are complete only when the cluster has ended.
                cta.at_end.append(arrays[key].require_quiet)
        return arrays[key]

    @property
    def shape(self) -> tuple[int, ...]:
        return self._barriers.shape

    def same_in(self, cta: Cta) -> BarrierArray:
        """Returns the barriers of the same declaration in another CTA."""
        return self.of(cta, self.declaration, self._key, self._author_name)

    @functools.cached_property
    def everywhere(self) -> list[BarrierArray]:
        """The barriers that an arrival reaches: this CTA's, and others'."""
        return [self.same_in(cta) for cta in self._reached]

    @property
    def _reached(self) -> list[Cta]:
        if not isinstance(self.declaration, types.ClusterBarrier):
            return [self._cta]
        groups = [self._cta.along(axes) for axes in self.declaration.groups]
        if self.declaration.leader_tracked:
            return groups[0][:1]
        return list(dict.fromkeys(itertools.chain.from_iterable(groups)))

    def _note(self) -> str:
        """Returns where arrivals go, if that is not this CTA."""
        if self._cta in self._reached:
            return ""
        return f"; arrivals on it go to its leader, {self._reached[0].name}"

    def one(self, region: Region) -> Barrier:
        """Returns the barrier of a region of one element.

        Raises:
          OutOfBoundsError: the index is out of bounds.
        """
        region.require_existing("used")
        return self._barriers[tuple(region.window.starts)]

    def require_quiet(self) -> None:
        """Raises BarrierError when a copy on one is in flight."""
        if self._cta.device.like_upstream:
            return
        for barrier in self._barriers.flat:
            barrier.require_quiet()


def _name(name: str, index: tuple[int, ...], cta: Cta) -> str:
    at = "".join(f"[{i}]" for i in index)
    return f"barrier {name}{at}{cta.suffix}" if name else f"the barrier{at}{cta.suffix}"


# The barriers of a CTA, by declaration.
_ARRAYS: Key[Cta, dict[Any, BarrierArray]] = Key("barriers", lambda cta: {})


def barrier_of(region: Region) -> Barrier:
    """Returns the barrier of an operand."""
    return region.memory.one(region)


def skipped(operands: dict[str, Any]) -> bool:
    """True when the operands contain a predicate that is False."""
    predicate = operands.get("predicate")
    return predicate is not None and not bool(predicate)


@registry.register(mbarrier.barrier_arrive_p, registry.RuleKind.EMULATE)
def _barrier_arrive(
    wg: Warpgroup,
    operands: dict[str, Any],
    num_arrivals: int,
    cta_axes: Sequence[str],
    **_: Any,
) -> None:
    if skipped(operands):
        return
    region, reached = operands["barrier"], None
    if operands["cta"] is not None:
        peer = wg.cta.at(cta_axes, operands["cta"])
        reached = [region.memory.same_in(peer)]
    known = wg.release()
    for barriers in reached or region.memory.everywhere:
        barrier = barriers.one(region)
        barrier.arrived.append(wg)
        barrier.arrive(known, wg.location, count=num_arrivals)


@registry.register(mbarrier.barrier_expect_p, registry.RuleKind.EMULATE)
def _barrier_expect(
    wg: Warpgroup, operands: dict[str, Any], num_bytes: int, **_: Any
) -> None:
    if not skipped(operands):
        barrier = barrier_of(operands["barrier"])
        barrier.expect(num_bytes)
        barrier.last_copy = wg.location


@registry.register(mbarrier.barrier_wait_p, registry.RuleKind.EMULATE)
def _barrier_wait(wg: Warpgroup, operands: dict[str, Any], **_: Any) -> Run:
    return barrier_of(operands["barrier"]).wait(wg)


@registry.register(mbarrier.barrier_test_p, registry.RuleKind.EMULATE)
def _barrier_test(wg: Warpgroup, operands: dict[str, Any], **_: Any) -> Run:
    # What the test finds depends on who runs first.
    yield TURN
    yield None
    if barrier_of(operands["barrier"]).test(wg):
        return np.True_
    # Time passes for work in flight also while a loop tests.
    failed = _FAILED.of(wg)
    failed.count += 1
    sampled = wg.execution.touches is None
    if sampled and failed.count % _PATIENCE == 0 and len(wg.group.in_flight):
        wg.group.in_flight.advance_one()
    return np.False_


# After how many tests that fail some work in flight advances.
_PATIENCE = 4


@dataclasses.dataclass
class _Failed:
    """How many tests of a warpgroup, or a warp, have failed."""

    count: int = 0


_FAILED: Key[Thread, _Failed] = Key("failed tests", lambda thread: _Failed())

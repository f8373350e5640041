# SPDX-License-Identifier: Apache-2.0
"""Semaphores: signals, waits and reads, of a CTA or of a launch.

An operation at gpu scope orders nothing between devices (PTX ISA, Morally strong
operations).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from pallas_gpu import errors
from pallas_gpu.emulator.engine import ordering
from pallas_gpu.emulator.engine.execution import report
from pallas_gpu.emulator.engine.memory import Region
from pallas_gpu.emulator.engine.operations.semaphores import Semaphore, Semaphores
from pallas_gpu.emulator.engine.orders.choices import Kind, Touch
from pallas_gpu.emulator.engine.race_report import too_early
from pallas_gpu.emulator.engine.tables import Key
from pallas_gpu.emulator.engine.waits import TURN, Run, Wait
from pallas_gpu.emulator.gpu.gmem import GlobalArray, MulticastArray, of_each
from pallas_gpu.emulator.gpu.machine.cta import Cta, Warpgroup
from pallas_gpu.emulator.gpu.machine.device import Device
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.sync import semaphore

_EMULATE = registry.RuleKind.EMULATE
_HINT = (
    "signal as often as it is waited for; a wait subtracts its value, unless "
    "decrement=False"
)
_OWN = (
    "each CTA has a semaphore of its own here; one that all CTAs share is "
    "plgpu.get_global(plgpu.SemaphoreType.REGULAR), in the body. Else "
)


class ScopedSemaphore(Semaphore):
    """A semaphore whose signals and waits have a scope."""

    __slots__ = ()

    def require_strong(self, reach: ordering.Reach, missing: int) -> None:
        """Reports the first signal that a wait needs and is not ordered with."""
        for one in self._signals:
            if missing > 0 and one.reach is not None and not reach.includes(one.reach):
                by, here = one.reach.inside[-1], reach.inside[-1]
                where = None if one.location is None else one.location.where
                error = errors.RaceError(
                    f"{self.name} is signalled by {by} and waited for by {here}, and "
                    "one of the two is at gpu scope",
                    expected='memory_scope="sys" for both: a scope of "gpu" includes '
                    "the threads of one device, and orders nothing for others",
                    got=f"a signal at {where} with memory_scope="
                    f'"{_scope_of(one.reach)}", a wait with "{_scope_of(reach)}"',
                    hint='leave memory_scope out, or pass memory_scope="sys"',
                )
                report(error.about(rule="race-between-ctas", barrier=self.name))
                return
            missing -= one.inc


def _scope_of(reach: ordering.Reach) -> str:
    return semaphore.SYSTEM if reach.group is None else semaphore.GPU


class SemaphoreArray(Semaphores):
    """The semaphores of a declaration.

    Args:
      name, suffix: for messages: the index of a semaphore stands between them.
      array: their elements.
      across_groups: whether several clusters share them.
      hint: for who waits forever.
      find: returns the semaphores of another array.
    """

    __slots__ = ("_array", "_find")

    def __init__(
        self,
        name: str,
        suffix: str,
        array: GlobalArray,
        across_groups: bool,
        hint: str,
        find: Callable[[GlobalArray], SemaphoreArray],
    ):
        self._array = array
        self._find = find

        def make(index: tuple[int, ...], at: str) -> ScopedSemaphore:
            # The ellipsis keeps a view of one element.
            key: Any = (*index, ...)
            place = "semaphore", array.place, index
            named = f"{name}{at}{suffix}"
            return ScopedSemaphore(named, array.data[key], across_groups, hint, place)

        super().__init__(name + suffix, array.shape, make)

    def owned_by(self, owner: int | None) -> Any:
        theirs = self._array.owned_by(owner)
        if isinstance(theirs, MulticastArray):
            return MulticastArray(self.name, [self._find(x) for x in theirs.each])
        return self._find(theirs)

    def require_started(self, wg: Warpgroup, region: Region) -> None:
        """Reports an access before its device may have started the kernel."""
        earlier = self._array.earlier
        if earlier is not None and wg.clock.get(earlier.actor, 0) < earlier.time:
            report(too_early(earlier, self.name, region.box(), wg.label, True))

    def require_zero(self) -> None:
        """Reports those that are not zero, as they were at first."""
        for one in self._semaphores.flat:
            one.require_zero("the kernel ends", "signals")


# The semaphores of an array in GMEM, for all CTAs that share it; none before the first
# use.
_SEMAPHORES: Key[GlobalArray, list[SemaphoreArray]] = Key(
    "semaphores", lambda array: []
)


def of_cta(cta: Cta, array: GlobalArray, name: str) -> SemaphoreArray:
    """Returns the semaphores of a scope, of which each CTA has its own.

    Args:
      array: their elements.
      name: the author's; may be empty.
    """
    prefix = f"semaphore {name}" if name else "the semaphore"
    hint = _OWN + _HINT if cta.axes else _HINT
    return _found(cta.device, array, prefix, f" of {cta.name_on_device}", False, hint)


def of_launch(cta: Cta, array: GlobalArray, where: str | None) -> SemaphoreArray:
    """Returns the semaphores of a `get_global`, which all CTAs share.

    Args:
      cta: one of them.
      array: their elements.
      where: the kernel's line.
    """
    # Without the function: reports name several lines in one.
    line = f" at {where.partition(' (')[0]}" if where is not None else ""
    name = "the semaphore"
    return _found(cta.device, array, name, f" of get_global{line}", True, _HINT)


def _found(
    device: Device,
    array: GlobalArray,
    name: str,
    of: str,
    across_groups: bool,
    hint: str,
    ends_at_zero: bool = True,
) -> SemaphoreArray:
    """Returns the semaphores of an array, which may be in another device's memory."""
    made = _SEMAPHORES.of(array)
    if not made:
        across_groups |= array.everywhere is not None
        find = functools.partial(
            _found,
            device,
            name=name,
            of=of,
            across_groups=across_groups,
            hint=hint,
            ends_at_zero=ends_at_zero,
        )
        suffix = of + array.suffix
        made.append(SemaphoreArray(name, suffix, array, across_groups, hint, find))
        if ends_at_zero and not device.like_upstream:
            device.at_end.append(made[0].require_zero)
        device.states.append(array.state)
    return made[0]


def _one(wg: Warpgroup, region: Region) -> Semaphore:
    memory = region.memory
    if isinstance(memory, GlobalArray):
        # They are the caller's, and outlive the launch.
        name = memory.name.removesuffix(memory.suffix)
        memory = _found(wg.cta.device, memory, name, "", True, _HINT, False)
    memory.require_started(wg, region)
    return memory.one(region)


@registry.register(semaphore.semaphore_signal_p, _EMULATE)
def _signal(
    wg: Warpgroup, operands: dict[str, Any], memory_scope: str, **_: Any
) -> Run:
    # Who signals first is a choice of the schedule, as is who continues first.
    yield TURN
    yield from _make(wg, [operands], memory_scope)


def _report_signal(wg: Warpgroup, one: Semaphore, inc: int) -> None:
    kind = Kind.ADD if inc > 0 else Kind.WRITE
    wg.execution.touch(Touch(one.place, kind, delta=inc))


@dataclasses.dataclass(slots=True, eq=False)
class _Signal:
    """One of several signals in any order.

    Attributes:
      known: what it releases to whom its scope includes.
      pending: those that have not been made.
    """

    wg: Warpgroup
    one: Semaphore
    inc: int
    known: ordering.Clock
    reach: ordering.Reach
    pending: list[_Signal]

    def advance(self) -> bool:
        """Makes the signal."""
        _report_signal(self.wg, self.one, self.inc)
        self.one.signal(self.known, self.inc, self.wg.location, self.reach)
        self.pending.remove(self)
        return True


@registry.register(semaphore.semaphore_signal_parallel_p, _EMULATE)
def _signal_parallel(wg: Warpgroup, operands: list[dict[str, Any]], **_: Any) -> Run:
    yield from _make(wg, operands, semaphore.SYSTEM)


def _make(wg: Warpgroup, operands: list[dict[str, Any]], scope: str) -> Run:
    """Makes signals in any order, each on one device or on all of them."""
    known, reach = wg.release(), wg.reach(scope)
    pending: list[_Signal] = []
    for operand in operands:
        inc = int(operand["inc"])
        for region in of_each(operand["semaphore"]):
            one = _one(wg, region)
            pending.append(_Signal(wg, one, inc, known, reach, pending))
    if len(pending) == 1:
        pending[0].advance()
        return
    if wg.execution.touches is None:
        signals = list(pending)
        wg.execution.choices.shuffle(signals)
        for signal in signals:
            yield TURN
            signal.advance()
        return
    # Whoever explores orders looks at work in flight, not at all permutations.
    for signal in list(pending):
        wg.group.in_flight.submit(signal)
    yield Wait(
        lambda: not pending,
        "its signals to be made",
        lambda: f"{len(pending)} are in flight",
    )


@registry.register(semaphore.semaphore_wait_p, _EMULATE)
def _wait(
    wg: Warpgroup,
    operands: dict[str, Any],
    decrement: bool,
    memory_scope: str,
    **_: Any,
) -> Run:
    yield TURN
    one, value = _one(wg, operands["semaphore"]), int(operands["value"])
    yield from one.wait(wg, value, decrement, wg.reach(memory_scope))


@registry.register(semaphore.semaphore_read_p, _EMULATE)
def _read(wg: Warpgroup, operands: dict[str, Any], **_: Any) -> Run:
    yield TURN
    one = _one(wg, operands["semaphore"])
    wg.execution.touch(Touch(one.place, Kind.READ))
    one.acquire(wg)
    return np.int32(one.value)

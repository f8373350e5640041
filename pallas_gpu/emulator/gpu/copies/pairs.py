# SPDX-License-Identifier: Apache-2.0
"""Loads of two CTAs that the leader's barrier tracks."""

from __future__ import annotations

import dataclasses

from pallas_gpu import errors
from pallas_gpu.emulator.engine import ordering
from pallas_gpu.emulator.engine.execution import report
from pallas_gpu.emulator.engine.memory import Region
from pallas_gpu.emulator.engine.steps import Location
from pallas_gpu.emulator.engine.tables import Key
from pallas_gpu.emulator.gpu.machine.cta import Cta, Warpgroup
from pallas_gpu.emulator.gpu.mbarrier import Barrier


class Shares:
    """The bytes that a leader's barrier expects of each CTA in its phase.

    The barrier itself counts one sum: it cannot tell bytes of the other CTA that belong
    to the next phase from those that it lacks.

    Args:
      barrier: the leader's.
    """

    def __init__(self, barrier: Barrier):
        self._barrier = barrier
        self._phase = barrier.phase
        self._missing: dict[Cta, int] = {}

    def add(self, cta: Cta, count: int) -> None:
        """Counts bytes expected of a CTA, or, if negative, copied by it."""
        self._missing[cta] = self._missing.get(cta, 0) + count

    def settle(self, location: Location | None) -> None:
        """Forgets a complete phase."""
        if self._barrier.phase == self._phase:
            return
        wrong = {cta: n for cta, n in self._missing.items() if n}
        self._phase, self._missing = self._barrier.phase, {}
        if not wrong:
            return
        error = errors.BarrierError(
            f"{self._barrier.name}: a phase is complete by bytes of another one",
            expected="as many bytes of each CTA as of the leader's copies",
            got=", ".join(
                f"{abs(n)} bytes too {'few' if n > 0 else 'many'} of {cta.name}"
                for cta, n in wrong.items()
            ),
            hint="the other CTA waits until the leader has waited for a phase, by a "
            "ClusterBarrier, before it copies for the next one",
            where=location.where if location is not None else None,
        )
        report(error.about(barrier=self._barrier.name))


_SHARES: Key[Cta, dict[Barrier, Shares]] = Key("shares of barriers", lambda cta: {})


@dataclasses.dataclass(frozen=True)
class Pair:
    """The two CTAs of a copy, as seen by one of them.

    Attributes:
      ctas: both; the leader is the first.
      barrier: the leader's.
      executed: how far threads have come when this CTA copies. The barrier's phase
        lacks the copy's bytes until then, so whoever waits for it comes after that.
    """

    cta: Cta
    ctas: tuple[Cta, ...]
    barrier: Barrier
    executed: ordering.Clock

    @classmethod
    def of(cls, wg: Warpgroup, barrier: Region, axes: tuple[str, ...]) -> Pair:
        """Returns the CTAs along an axis, with the leader's barrier."""
        ctas = tuple(wg.cta.along(axes))
        leaders = barrier.memory.same_in(ctas[0]).one(barrier)
        return cls(wg.cta, ctas, leaders, ordering.executed(wg.release()))

    @property
    def leads(self) -> bool:
        """Whether this CTA is the leader, which alone arrives."""
        return self.cta is self.ctas[0]

    @property
    def _shares(self) -> Shares:
        table = _SHARES.of(self.ctas[0])
        return table.setdefault(self.barrier, Shares(self.barrier))

    def arrive(self, wg: Warpgroup, count: int) -> None:
        """Arrives if this is the leader, and expects bytes of both CTAs."""
        if not self.leads:
            return
        shares = self._shares
        shares.settle(wg.location)
        for cta in self.ctas:
            shares.add(cta, count)
        self.barrier.arrive(wg.release(), wg.location, count * len(self.ctas))
        shares.settle(wg.location)

    def complete_bytes(self, count: int, location: Location | None) -> None:
        """Counts bytes that this CTA's copy has brought."""
        shares = self._shares
        shares.settle(location)
        shares.add(self.cta, -count)
        self.barrier.complete_bytes(count, self.executed)
        shares.settle(location)

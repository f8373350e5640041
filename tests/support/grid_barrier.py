# SPDX-License-Identifier: Apache-2.0
"""A barrier of all CTAs of a grid, as kernels write it with semaphores."""

from __future__ import annotations

import dataclasses
from typing import Any

import pallas_gpu as plgpu


@dataclasses.dataclass(frozen=True)
class GridBarrier:
    """The CTAs arrive at the first one, which lets all of them go.

    Attributes:
      ctas: number of CTAs.
      arrived: the first one's semaphore.
      go: a semaphore for each CTA.
    """

    ctas: int
    arrived: Any
    go: Any

    @classmethod
    def of(cls, ctas: int) -> GridBarrier:
        """Returns the barrier of a grid with some CTAs."""
        regular = plgpu.SemaphoreType.REGULAR
        arrived, go = plgpu.get_global(regular), plgpu.get_global(regular((ctas,)))
        return cls(ctas, arrived, go)

    def meet(self, cta: Any) -> None:
        """Waits for all CTAs; what they stored before is seen after it."""
        plgpu.semaphore_signal(self.arrived, memory_scope="gpu")

        @plgpu.when(cta == 0)
        def _():
            plgpu.semaphore_wait(self.arrived, self.ctas, memory_scope="gpu")
            everyone = map(
                plgpu.SemaphoreSignal, map(self.go.at.__getitem__, range(self.ctas))
            )
            plgpu.semaphore_signal_parallel(*everyone)

        plgpu.semaphore_wait(self.go.at[cta], memory_scope="gpu")

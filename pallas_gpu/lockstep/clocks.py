# SPDX-License-Identifier: Apache-2.0
"""What happens before what: vector clocks of warps and of asynchronous agents.

A warp's epoch grows whenever its lanes meet. An access carries the epoch of its warp;
others are behind it once they know of that epoch. Agents of the async proxy (copies
onto one mbarrier, one thread's bulk groups, a warp's wgmma groups) have epochs too.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

_ALL_LANES = np.uint32(2**32 - 1)
_LANE_BITS = 1 << np.arange(32, dtype=np.int64)


class Clocks:
    """The clocks of the clusters that run together.

    Attributes:
      known: [warps, agents] the latest epoch of each agent that each warp knows of.
      epoch: [warps] the running epoch of each warp.
      fences: [memories, warps] how many fence.proxy.async for SMEM, and for GMEM, each
        warp has executed.
      covered: [memories, warps] the latest epoch of each warp that another warp knew
        when it executed such a fence.
      touched: [warps] a bit for each lane that has loaded or stored in the running
        epoch.
      fenced: what a thread, by warp and lane, knew at its last fence.acq_rel.
    """

    def __init__(self, warps: int) -> None:
        self.known = np.zeros((warps, warps + 16), np.int32)
        self.epoch = np.ones(warps, np.int32)
        self.fences = np.ones((2, warps), np.int32)
        self.covered = np.zeros((2, warps), np.int32)
        self.touched = np.zeros(warps, np.uint32)
        self.fenced: dict[tuple[int, int], np.ndarray] = {}
        self._agents: dict[Hashable, int] = {}
        self._warps = warps

    def agent(self, key: Hashable) -> int:
        """The number of an asynchronous agent."""
        number = self._agents.setdefault(key, self._warps + len(self._agents))
        while number >= self.known.shape[1]:
            self.known = np.concatenate([self.known, np.zeros_like(self.known)], axis=1)
        return number

    def agents_of(self, ctas: Sequence[str]) -> list[int]:
        """The numbers of the asynchronous agents of some CTAs, by name."""
        named = {key: n for key, n in self._agents.items() if isinstance(key, tuple)}
        return [n for key, n in named.items() if key[1] in ctas]

    def meet(self, rows: Sequence[int] | np.ndarray, *, together: bool) -> np.ndarray:
        """The lanes of each warp meet; gives what they know then.

        Args:
          rows: the warps.
          together: they all meet each other.
        """
        rows = np.asarray(rows)
        self.known[rows, rows] = self.epoch[rows]
        self.epoch[rows] += 1
        self.touched[rows] = 0
        joint = self.known[rows].max(axis=0)
        if together:
            self.known[rows] = joint
        return joint

    def fence(self, rows: np.ndarray, memory: int) -> None:
        """The warps execute fence.proxy.async: for SMEM (0) or for GMEM (1)."""
        self.fences[memory, rows] += 1
        known = self.known[rows, : self._warps].max(axis=0)
        self.covered[memory] = np.maximum(self.covered[memory], known)

    def touch(self, rows: np.ndarray, mask: np.ndarray | None) -> None:
        """Active lanes of warps load or store."""
        if mask is None:
            self.touched[rows] = _ALL_LANES
        else:
            bits = mask.reshape(len(rows), -1) @ _LANE_BITS
            self.touched[rows] |= bits.astype(np.uint32)

    def released(self, row: int, lane: int) -> np.ndarray:
        """What a release by one thread makes known.

        That is what its warp knew when its lanes last met, and what the thread has done
        since, in program order. The latter counts if no other lane has done anything.
        """
        clock = self.known[row].copy()
        if self.touched[row] == 1 << lane:
            clock[row] = self.epoch[row]
            self.epoch[row] += 1
            self.touched[row] = 0
        return clock

    def of_agents(self, row: int) -> np.ndarray:
        """What a warp knows of asynchronous agents, and nothing of warps."""
        clock = self.known[row].copy()
        clock[: self._warps] = 0
        return clock

    def acquire(self, rows: np.ndarray, clock: np.ndarray | None) -> None:
        """The warps know what a clock says."""
        if clock is None:
            return
        width = len(clock)
        self.known[rows, :width] = np.maximum(self.known[rows, :width], clock)

    def learn(self, rows: np.ndarray | int, agent: int, epoch: int) -> None:
        """The warps know of an agent's epoch."""
        self.known[rows, agent] = np.maximum(self.known[rows, agent], epoch)


def join(a: np.ndarray | None, b: np.ndarray | None) -> np.ndarray | None:
    """What both clocks know."""
    if a is None or b is None:
        return b if a is None else a
    if len(a) < len(b):
        a, b = b, a
    result = a.copy()
    result[: len(b)] = np.maximum(result[: len(b)], b)
    return result

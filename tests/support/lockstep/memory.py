# SPDX-License-Identifier: Apache-2.0
"""Memories that 128 threads use together, for `lockstep`: bytes, and who had them.

Between a store and another thread's access to the same byte all threads must have met,
or those of the warp.
"""

from __future__ import annotations

import dataclasses

import numpy as np

THREADS = np.arange(128)
NOBODY = -1


@dataclasses.dataclass
class Meetings:
    """How often threads have met: those of the warpgroup, those of each warp."""

    warpgroup: int = 0
    warp: int = 0


class Memory:
    """Bytes, with who last stored and loaded each, and after how many meetings."""

    def __init__(self, data: np.ndarray, meetings: Meetings) -> None:
        self.data = data
        self.meetings = meetings
        self._stored = _Trace(data.size)
        self._loaded = _Trace(data.size)

    def load(self, places: np.ndarray, active: np.ndarray) -> np.ndarray:
        """Returns the bytes at some places of each thread; [128, n] of both."""
        self._check_bounds(places[active])
        data = np.zeros(places.shape, np.int64)
        data[active] = self.data[places[active]]
        self._stored.meet(places, active, self.meetings, "loaded")
        self._loaded.mark(places, active, self.meetings)
        return data

    def store(self, places: np.ndarray, data: np.ndarray, active: np.ndarray) -> None:
        """Puts bytes at some places of each thread."""
        self._check_bounds(places[active])
        self._stored.meet(places, active, self.meetings, "stored")
        self._loaded.meet(places, active, self.meetings, "stored")
        self._stored.mark(places, active, self.meetings)
        self.data[places[active]] = data[active]
        assert (self.data[places[active]] == data[active]).all(), "threads disagree"

    def _check_bounds(self, places: np.ndarray) -> None:
        assert ((places >= 0) & (places < self.data.size)).all(), "out of bounds"


class _Trace:
    def __init__(self, size: int) -> None:
        self.by = np.full(size, NOBODY)
        self.at = np.zeros((size, 2), int)

    def meet(self, places, active, meetings: Meetings, what: str) -> None:
        """Raises unless the threads have met since others had these bytes."""
        threads = np.broadcast_to(THREADS[:, None], places.shape)[active]
        others, when = self.by[places[active]], self.at[places[active]]
        met = when[..., 0] < meetings.warpgroup
        met |= (others // 32 == threads // 32) & (when[..., 1] < meetings.warp)
        met |= (others == NOBODY) | (others == threads)
        assert met.all(), f"bytes of SMEM are {what} before the threads have met"

    def mark(self, places, active, meetings: Meetings) -> None:
        """Enters an access."""
        threads = np.broadcast_to(THREADS[:, None], places.shape)[active]
        self.by[places[active]] = threads
        self.at[places[active]] = meetings.warpgroup, meetings.warp

# SPDX-License-Identifier: Apache-2.0
"""Memories: bytes, who had them, and whether that is known to who accesses them next.

Between a store and another thread's access to the same byte all must have met. Bytes
that an asynchronous operation reads or writes are busy until it completes. What threads
wrote is visible to the async proxy after fence.proxy.async of the writer, and what they
loaded from SMEM it overwrites after one of the reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pallas_gpu.lockstep.clocks import Clocks, join
from pallas_gpu.lockstep.engine import LANES, OutOfBoundsError, RaceError

# Who accessed last: the agent's number times 32, and the lane in it.
_NEVER = np.int32(0)
_ALWAYS = np.iinfo(np.int32).max


class Memory:
    """Bytes of a block's SMEM, or of a buffer in GMEM.

    Attributes:
      data: the bytes.
      name: what to call it in reports.
      proxy: which fences count: those for SMEM (0) or for GMEM (1).
      released: what an acquire that reads a word, by its byte, makes known.
      descriptors: the tensor maps that threads have made, by their first byte.
    """

    def __init__(
        self, data: np.ndarray, name: str, clocks: Clocks | None, proxy: int = 0
    ) -> None:
        self.data = data
        self.name = name
        self.proxy = proxy
        self.clocks = clocks
        self.released: dict[int, np.ndarray] = {}
        self.descriptors: dict[int, Any] = {}
        # Scopes of atomic operations and the CTAs that used them, by the first byte.
        self.scopes: dict[int, list[tuple[str, Any]]] = {}
        size = data.size
        if clocks is None:
            return
        self._writer = np.zeros(size, np.int32)
        self._written = np.zeros(size, np.int32)  # the writer's epoch
        self._fence = np.zeros(size, np.int32)  # fences the writer had executed
        self._atomic = np.zeros(size, bool)  # whether the last write was atomic
        self._reads: dict[int, np.ndarray] = {}  # by agent: epoch, and lane of a warp
        self._last_reads: dict[int, int] = {}  # by agent: the latest epoch in its table
        # By warp: the fences that it had executed when it read, and at its last read.
        self._read_fences: dict[int, np.ndarray] = {}
        self._last_read_fences: dict[int, int] = {}
        self._busy_reads = np.zeros(size, np.int16)
        self._busy_writes = np.zeros(size, np.int16)
        self._busy_updates = np.zeros(size, np.int16)  # of them those that are atomic
        self._busy = 0

    def written_by(self, agent: int) -> None:
        """All bytes have been written by an agent in its first epoch."""
        self._writer[:] = agent << 5
        self._written[:] = 1

    # --- threads ----------------------------------------------------------------------

    def load(self, strand: Any, places: np.ndarray) -> np.ndarray:
        """The bytes at some places of each active thread, [threads, bytes]."""
        self._check_bounds(places)
        data = self.data[places]
        if self.clocks is not None:
            self._check_busy(places, "loaded", self._busy_writes)
            lanes = _active_lanes(strand)
            self._check_written(places, lanes, "loaded")
            self.clocks.touch(strand.rows, strand.mask)
            epochs = self.clocks.epoch
            for row in strand.active_rows():
                mine = lanes[0] == row
                code = epochs[row] * LANES + lanes[1][mine]
                table = self._reads_of(int(row), int(epochs[row]))
                table[places[mine]] = code[:, None]
                self._note_fences(int(row), places[mine])
        return data

    def _note_fences(self, row: int, places: np.ndarray) -> None:
        """A warp reads SMEM, and has executed so many fences."""
        assert self.clocks is not None
        if self.proxy:
            return
        table = self._read_fences.get(row)
        if table is None:
            table = self._read_fences[row] = np.zeros(self.data.size, np.int32)
        fences = int(self.clocks.fences[self.proxy, row])
        table[places] = self._last_read_fences[row] = fences

    def store(self, strand: Any, places: np.ndarray, data: np.ndarray) -> None:
        """Puts bytes at some places of each active thread."""
        self._change(strand, places, "stored", atomic=False)
        self.data[places] = data
        if (self.data[places] != data).any():
            raise RaceError(
                f"threads store different bytes at one place of {self.name}"
            )

    def update(self, strand: Any, places: np.ndarray) -> None:
        """Records that each active thread updates bytes by an atomic operation.

        These do not race with each other, but with loads and stores.
        """
        self._change(strand, places, "updated", atomic=True)

    def _change(
        self, strand: Any, places: np.ndarray, what: str, *, atomic: bool
    ) -> None:
        """Checks and records that each active thread changes bytes."""
        self._check_bounds(places)
        if self.clocks is None:
            return
        for busy in (self._busy_writes, self._busy_reads):
            self._check_busy(places, what, busy)
        rows, lanes = _active_lanes(strand)
        plain = ~self._atomic[places].all(axis=1) if atomic else slice(None)
        self._check_written(places[plain], (rows[plain], lanes[plain]), what)
        self._check_read(places, rows, lanes)
        self.clocks.touch(strand.rows, strand.mask)
        self._writer[places] = (rows * LANES + lanes)[:, None]
        self._written[places] = self.clocks.epoch[rows][:, None]
        self._fence[places] = self.clocks.fences[self.proxy, rows][:, None]
        self._atomic[places] = atomic

    def observe(self, row: int, places: np.ndarray) -> None:
        """A thread of a warp reads bytes by a strong operation.

        That does not race with atomic operations, but with stores.
        """
        self._check_bounds(places)
        if self.clocks is None:
            return
        self._check_busy(places, "read", self._busy_writes)
        rows = np.full(len(places), row)
        plain = ~self._atomic[places].all(axis=1)
        self._check_written(places[plain], (rows[plain], rows[plain] * 0), "read")

    def release(self, offset: int, known: np.ndarray | None) -> None:
        """An atomic operation on a word releases what its thread knows.

        What others have released there before stays released.
        """
        joint = join(self.released.get(offset), known)
        if joint is not None:
            self.released[offset] = joint

    def _check_bounds(self, places: np.ndarray) -> None:
        if places.size and not 0 <= places.min() <= places.max() < self.data.size:
            raise OutOfBoundsError(f"an access out of bounds of {self.name}")

    def _check_busy(self, places: np.ndarray, what: str, busy: np.ndarray) -> None:
        if self._busy and busy[places].any():
            verb = "writes" if busy is self._busy_writes else "reads"
            raise RaceError(
                f"bytes of {self.name} are {what} while an asynchronous operation "
                f"still {verb} them"
            )

    def _check_written(self, places, lanes, what: str) -> None:
        assert self.clocks is not None
        rows, within = lanes
        when = self._written[places]
        if not when.any():
            return
        writer = self._writer[places]
        agent = writer >> 5
        fine = when <= self.clocks.known[rows[:, None], agent]
        fine |= writer == (rows * LANES + within)[:, None]
        if not fine.all():
            raise RaceError(
                f"bytes of {self.name} are {what} before the threads have met"
            )

    def _check_read(self, places, rows, lanes) -> None:
        assert self.clocks is not None
        for agent, table in self._reads.items():
            known = self.clocks.known[rows, agent]
            if self._last_reads[agent] <= known.min(initial=_ALWAYS):
                continue
            code = table[places]
            fine = code >> 5 <= known[:, None]
            mine = (rows == agent)[:, None] & ((code & 31) == lanes[:, None])
            if not (fine | mine).all():
                raise RaceError(
                    f"bytes of {self.name} are stored before the threads have met"
                )

    def _reads_of(self, agent: int, epoch: int) -> np.ndarray:
        """The table of an agent that reads in an epoch."""
        self._last_reads[agent] = max(epoch, self._last_reads.get(agent, 0))
        table = self._reads.get(agent)
        if table is None:
            table = self._reads[agent] = np.zeros(self.data.size, np.int32)
        return table

    def check_end(self, own: np.ndarray, agents: Sequence[int]) -> None:
        """The kernel has ended on the device that has the memory.

        Other devices have accessed it before, as that device's warps know.

        Args:
          own: the rows of these warps.
          agents: the asynchronous agents of other devices.
        """
        if self.clocks is None:
            return
        known = self.clocks.known[own].max(axis=0)
        others = np.setdiff1d(np.arange(len(self.clocks.epoch)), own)
        others = np.concatenate([others, np.array(agents, others.dtype)])
        writer = self._writer >> 5
        late = np.isin(writer, others) & (self._written > known[writer])
        for agent in {*others} & self._reads.keys():
            late |= self._reads[agent] >> 5 > known[agent]
        if late.any():
            raise RaceError(
                f"bytes of {self.name} may be accessed by another device after the "
                "kernel has ended on its own"
            )

    # --- the async proxy --------------------------------------------------------------

    def begin_read(self, rows: np.ndarray, places: np.ndarray, what: str) -> None:
        """An asynchronous operation that warps issue will read these bytes."""
        self._check_bounds(places)
        if self.clocks is None:
            return
        self._check_busy(places, f"read by {what}", self._busy_writes)
        self.check_visible(rows, places, f"{what} reads")
        self._busy += 1
        self._busy_reads[places] += 1

    def check_visible(self, rows: np.ndarray, places: np.ndarray, what: str) -> None:
        """What threads wrote to these bytes is visible to asynchronous operations."""
        if self.clocks is None:
            return
        writer, when = self._writer[places] >> 5, self._written[places]
        if (when > self.clocks.known[rows].min(axis=0)[writer]).any():
            raise RaceError(f"{what} bytes of {self.name} before the threads have met")
        fences = self.clocks.fences[self.proxy]
        by_threads = (writer < len(fences)) & (when > _NEVER)
        writer = np.where(by_threads, writer, 0)
        own = self._fence[places] < fences[writer]
        other = when <= self.clocks.covered[self.proxy, writer]
        if (by_threads & ~own & ~other).any():
            raise RaceError(
                f"{what} bytes of {self.name} that threads have written without "
                "fence.proxy.async"
            )

    def _check_reads_fenced(self, places: np.ndarray, what: str) -> None:
        """What threads read from these bytes is over for asynchronous operations."""
        assert self.clocks is not None
        for row, table in self._read_fences.items():
            fences = self.clocks.fences[self.proxy, row]
            if self._last_read_fences[row] < fences:
                continue
            when = self._reads[row][places] >> 5
            fine = (when == _NEVER) | (table[places] < fences)
            fine |= when <= self.clocks.covered[self.proxy, row]
            if not fine.all():
                raise RaceError(
                    f"{what} bytes of {self.name} that threads have read without "
                    "fence.proxy.async"
                )

    def end_read(self, places: np.ndarray, agent: int, epoch: int) -> None:
        """The bytes have been read; `places` has each byte once."""
        if self.clocks is None:
            return
        self._busy -= 1
        self._busy_reads[places] -= 1
        self._reads_of(agent, epoch)[places] = epoch << 5

    def begin_write(
        self,
        row: int,
        places: np.ndarray,
        what: str,
        *,
        fenced: bool = True,
        atomic: bool = False,
    ) -> None:
        """An asynchronous operation that a warp issues will write these bytes.

        Args:
          row: the warp.
          places: the bytes.
          what: the operation.
          fenced: whether it needs a fence after threads' accesses.
          atomic: it races with no other atomic operation.
        """
        self._check_bounds(places)
        if self.clocks is None:
            return
        alone = self._busy_writes
        if atomic:
            alone = self._busy_writes - self._busy_updates
        for busy in (alone, self._busy_reads):
            self._check_busy(places, f"overwritten by {what}", busy)
        known = self.clocks.known[row]
        unknown = self._written[places] > known[self._writer[places] >> 5]
        late = (unknown & ~(self._atomic[places] & atomic)).any()
        for agent, table in self._reads.items():
            if self._last_reads[agent] > known[agent]:
                late = late or (table[places] >> 5 > known[agent]).any()
        if late:
            raise RaceError(
                f"{what} overwrites bytes of {self.name} before the threads have met"
            )
        if fenced:
            self.check_visible(np.array([row]), places, f"{what} overwrites")
            self._check_reads_fenced(places, f"{what} overwrites")
        self._busy += 1
        self._busy_writes[places] += 1
        self._busy_updates[places] += atomic

    def end_write(
        self,
        places: np.ndarray,
        data: np.ndarray,
        agent: int,
        epoch: int,
        *,
        atomic: bool = False,
    ) -> None:
        """The bytes have arrived; they are seen by who knows of the agent's epoch."""
        self.data[places] = data
        if self.clocks is None:
            return
        self._busy -= 1
        self._busy_writes[places] -= 1
        self._busy_updates[places] -= atomic
        self._atomic[places] = atomic
        self._writer[places] = agent << 5
        self._written[places] = epoch

    def end_write_by_thread(
        self, places: np.ndarray, data: np.ndarray, writer: int, epoch: int, fences: int
    ) -> None:
        """As `end_write`, of a thread's own copy: it has stored them when it issued it.

        Args:
          places, data: the bytes.
          writer: the thread, as the number of its warp times 32 and its lane.
          epoch, fences: of its warp at that time.
        """
        self.data[places] = data
        if self.clocks is None:
            return
        self._busy -= 1
        self._busy_writes[places] -= 1
        self._writer[places] = writer
        self._written[places] = epoch
        self._fence[places] = fences
        self._atomic[places] = False

    @property
    def busy(self) -> bool:
        """True while an asynchronous operation reads or writes some bytes."""
        return self.clocks is not None and self._busy > 0


def _active_lanes(strand: Any) -> tuple[np.ndarray, np.ndarray]:
    """Of each active thread the row of its warp, and its lane."""
    rows, lanes = strand.row_of_lane, strand.threads % LANES
    if strand.mask is None:
        return rows, lanes.astype(np.int32)
    return rows[strand.mask], lanes[strand.mask].astype(np.int32)

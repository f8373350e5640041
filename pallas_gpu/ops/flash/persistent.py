# SPDX-License-Identifier: Apache-2.0
"""Attention's persistent blocks: the tiles of each, in the order of its visits."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

import pallas_gpu as plgpu
from pallas_gpu.ops.folded import divide, plus, times


@dataclasses.dataclass(frozen=True)
class Visits:
    """The tiles of a block, in the order in which all its warpgroups visit them.

    Attributes:
      tiles, workers: of the launch; as many of either: a block has one tile.
      worker: the number of this block.
      schedule: what `of_workers` returns, in GMEM; None: every worker takes each
        `workers`-th tile.
    """

    tiles: int
    worker: Any
    workers: int
    schedule: Any = None

    @property
    def count(self) -> Any:
        if self.schedule is not None:
            return self.schedule[self.worker, 0]
        left = self.tiles + self.workers - 1 - self.worker
        return divide(left, self.workers)

    def number(self, position: Any) -> Any:
        """Returns the position in the launch of one of them."""
        if self.schedule is not None:
            return self.schedule[self.worker, plus(position, 1)]
        return plus(self.worker, times(position, self.workers))

    def for_each(self, visit: Any, carry: Any, more: int = 0) -> Any:
        """Calls `visit(position, number, following, carry)`; it returns the next carry.

        The number of the following tile is loaded before this one is visited; behind
        the last tile it is the number of any tile.

        Args:
          more: how many tiles of any number to visit behind the last one, of a
            schedule: 0 or 1.
        """
        if self.workers == self.tiles:
            return visit(np.int32(0), self.worker, self.worker, carry)
        start = self.number(np.int32(0)), carry

        @plgpu.loop(0, plus(self.count, more), init_carry=start)
        def found(position, carried):
            number, carry = carried
            following = self.number(plus(position, 1))
            return following, visit(position, number, following, carry)

        return found[1]


def of_workers(
    numbers: Sequence[int], costs: Sequence[float], workers: int
) -> np.ndarray:
    """Returns the tiles of each worker, for tiles of different costs.

    Each tile, in the order of the launch, is given to the worker that is free first, as
    the hardware would do it with a block for each tile.

    Returns:
      (workers, most tiles + 3), int32: a worker's number of tiles, its tiles, and at
      least two 0.
    """
    own: list[list[int]] = [[] for _ in range(workers)]
    free = [(0.0, worker) for worker in range(workers)]
    for number, cost in zip(numbers, costs, strict=True):
        time, worker = heapq.heappop(free)
        own[worker].append(number)
        heapq.heappush(free, (time + cost, worker))
    most = max(map(len, own)) + 2
    rows = [[len(tiles), *tiles, *[0] * (most - len(tiles))] for tiles in own]
    return np.array(rows, np.int32)

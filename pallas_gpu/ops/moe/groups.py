# SPDX-License-Identifier: Apache-2.0
"""Groups of rows and their tiles: a table in SMEM that each block computes for itself.

Rows lie group after group. A group is cut into tiles from its first row on, so that no
tile has rows of two groups; the last tile of a group may be partly empty. The number of
tiles is known on the device alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.ops.gemm.problem import Problem
from pallas_gpu.ops.memory import Memory


@dataclasses.dataclass(frozen=True)
class GroupedProblem(Problem):
    """Products of the rows of each group.

    Attributes:
      groups: number of groups of rows.
      matrices: groups that have a matrix, or a result.
      gathered: whether the rows of A are those that an array of indices names.
    """

    groups: int = 0
    matrices: int = 0
    gathered: bool = False

    @property
    def of_groups(self) -> tuple[str, ...]:
        """Names of a kernel's operands that say what the groups are."""
        return "sizes", "offset", *(("indices",) if self.gathered else ())


def table(groups: int, warpgroups: int) -> Any:
    """Declares the SMEM of a table for each warpgroup of a block."""
    return plgpu.SMEM((warpgroups, 2, groups), jnp.int32)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows in GMEM, or those of an array that indices name.

    Attributes:
      index: the row of the array for each row; None for the array's own rows.
    """

    index: Any = None

    def part(self, start: Any, number: int) -> Any:
        """Returns what names `number` rows; behind the last one the first is meant."""
        if self.index is None:
            return plgpu.ds(start, number)
        position = start + jnp.arange(number, dtype=jnp.int32)
        inside = position < self.index.shape[0]
        return plgpu.load(self.index, (position,), mask=inside, other=0)


@dataclasses.dataclass(frozen=True)
class Groups:
    """The groups, as one warpgroup sees them.

    Attributes:
      number: how many groups there are.
      rows: rows of the array; what groups have beyond it is cut off.
      first, matrices: the first group that has a matrix, and how many have one. The
        others have no tiles.
      ends, tile_ends: SMEM references: the end of each group's rows, and of its tiles.
    """

    number: int
    rows: int
    first: Any
    matrices: int
    ends: Any
    tile_ends: Any

    @classmethod
    def of(cls, mem: Memory, matrices: int, rows: int, tile: int, wg: Any):
        """Computes the table of this warpgroup, of tiles of so many rows."""
        (number,), own = mem.sizes.shape, mem.tables.at[wg]
        last = np.int32(number - matrices)
        first = lax.max(lax.min(mem.offset[0], last), np.int32(0))
        size = lax.max(lax.min(mem.sizes[...], np.int32(rows)), np.int32(0))
        sums = jnp.cumsum(size)
        ends = lax.min(sums, np.int32(rows))
        starts = lax.min(lax.sub(sums, size), np.int32(rows))
        rounded = lax.add(lax.sub(ends, starts), np.int32(tile - 1))
        tiles = lax.div(rounded, np.int32(tile))
        if number > matrices:
            position = lax.sub(jnp.arange(number, dtype=jnp.int32), first)
            has_matrix = (position >= 0) & (position < matrices)
            tiles = jnp.where(has_matrix, tiles, 0)
        groups = cls(number, rows, first, matrices, own.at[0], own.at[1])
        groups.ends[...] = ends
        groups.tile_ends[...] = jnp.cumsum(tiles)
        return groups

    @property
    def tiles(self) -> Any:
        return self.tile_ends[self.number - 1]

    @property
    def span(self) -> tuple[Any, Any]:
        """The first row of the groups that have matrices, and the end of their rows."""
        last = lax.add(self.first, np.int32(self.matrices - 1))
        return self._before(self.ends, self.first), self.ends[last]

    def rows_of(self, group: Any) -> tuple[Any, Any]:
        """Returns the first row of a group, and the end of its rows."""
        return self._before(self.ends, group), self.ends[group]

    def tiles_of(self, group: Any) -> tuple[Any, Any]:
        """Returns the first tile of a group, and the end of its tiles."""
        return self._before(self.tile_ends, group), self.tile_ends[group]

    def group_of(self, tile: Any) -> Any:
        """Returns the group of a tile.

        A binary search for the number of groups that end at the tile or before.
        """
        group = jnp.int32(0)
        step = plgpu.next_power_of_2(self.number)
        while step := step // 2:
            last = lax.min(
                lax.add(group, np.int32(step - 1)), np.int32(self.number - 1)
            )
            ends = self.tile_ends[last] <= tile
            group = lax.select(ends, lax.add(group, np.int32(step)), group)
        return group

    @staticmethod
    def _before(ends: Any, group: Any) -> Any:
        before = ends[lax.max(lax.sub(group, np.int32(1)), np.int32(0))]
        return lax.select(group > 0, before, jnp.zeros_like(before))

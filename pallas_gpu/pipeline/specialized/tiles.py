# SPDX-License-Identifier: Apache-2.0
"""The tiles of a persistent kernel: which CTA computes which, in which order."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax

from pallas_gpu import errors, expect
from pallas_gpu.entry.integers import cdiv
from pallas_gpu.pipeline.loops import nd_loop, planar_snake


@expect.arguments(
    shape=expect.integers(0),
    tile=expect.integers(1),
    cluster=expect.integers(1),
    batch=expect.integer(1),
    minor=expect.choice_of(0, 1),
    strip=expect.integer(1),
)
@dataclasses.dataclass(frozen=True)
class TileSchedule:
    """Tiles of a result, visited by the clusters of a persistent kernel.

    Cluster i of n has the tiles at positions i, i + n, i + 2n ... of an order in which
    neighbours share rows and columns, see `planar_snake`; each CTA of a cluster has one
    of the tiles that lie beside each other. The last tiles may reach over the edge.

    PTX: integer arithmetic. Since: sm_90.

    Attributes:
      shape: rows and columns of the result.
      tile: rows and columns of a CTA's tile.
      cluster: CTAs of a cluster along rows and along columns; one of them is 1.
      batch: number of results.
      minor: dimension that is cut into strips.
      strip: width of a strip, in tiles of clusters.
      axis: name of the grid's axis, of clusters.
      cluster_axis: name of the cluster's axis.

    Raises:
      ArgumentError: a size is out of range, the dimension is not 0 or 1, there are not
        two sizes each, or the cluster has several CTAs along both.

    Example:
      >>> tiles = plgpu.TileSchedule((m, n), (128, 256), cluster=(2, 1))
      >>> tiles.for_each(lambda batch, i, j, number: ...)
    """

    shape: tuple[int, int]
    tile: tuple[int, int]
    cluster: tuple[int, int] = (1, 1)
    batch: int = 1
    minor: int = 0
    strip: int = 8
    axis: str = "worker"
    cluster_axis: str = "pair"

    def __post_init__(self):
        sizes = self.shape, self.tile, self.cluster
        if {len(x) for x in sizes} != {2} or min(self.cluster) > 1:
            raise errors.ArgumentError(
                "TileSchedule: the sizes are not those of a plane of tiles",
                expected="two each, and a cluster along one dimension",
                got=f"shape={sizes[0]}, tile={sizes[1]}, cluster={sizes[2]}",
                hint="pass (rows, columns), and cluster=(2, 1) or (1, 2)",
            )

    @property
    def plane(self) -> tuple[int, int]:
        """Tiles of clusters along rows and columns of one result."""
        m, n = (cdiv(*x) for x in zip(self.shape, self.cluster_tile, strict=True))
        return m, n

    @property
    def cluster_tile(self) -> tuple[int, int]:
        """Rows and columns of a cluster's tiles."""
        m, n = (x * y for x, y in zip(self.tile, self.cluster, strict=True))
        return m, n

    @property
    def extent(self) -> tuple[int, int]:
        """Rows and columns of all tiles: those of the result, and more."""
        m, n = (x * y for x, y in zip(self.plane, self.cluster_tile, strict=True))
        return m, n

    @property
    def count(self) -> int:
        """Tiles of clusters of all results."""
        return self.batch * math.prod(self.plane)

    def clusters(self, ctas: int) -> int:
        """Returns the clusters of a launch of so many CTAs: no more than have work."""
        return min(ctas // math.prod(self.cluster), self.count)

    def position(self, linear: Any) -> tuple[Any, Any, Any]:
        """Returns (batch, row, column) of this CTA's tile, in tiles.

        Args:
          linear: position of the cluster's tile in the order, an i32 scalar.
        """
        plane = np.int32(math.prod(self.plane))
        batch: Any = np.int32(0)
        if self.batch > 1:
            batch, linear = lax.div(linear, plane), lax.rem(linear, plane)
        mi, ni = planar_snake(linear, self.plane, self.minor, self.strip)
        along_m, along_n = self.cluster
        if along_m > 1:
            mi = _beside(mi, along_m, self.cluster_axis)
        elif along_n > 1:
            ni = _beside(ni, along_n, self.cluster_axis)
        return batch, mi, ni

    def for_each(self, visit: Callable[[Any, Any, Any, Any], None]) -> None:
        """Visits the tiles of this CTA.

        PTX: a loop. Since: sm_90. Issued by all warpgroups of a CTA, or in its role by
        each: the loops of all have the same tiles.

        Args:
          visit: `visit(batch, row, column, number)`: the position in tiles, and the
            number of tiles that the CTA has visited before.
        """

        @nd_loop((self.count,), collective_axes=self.axis)
        def _(info: Any) -> None:
            visit(*self.position(info.index[0]), info.local_index)


def _beside(position: Any, ctas: int, axis: str) -> Any:
    # lax's operations, as jnp's take several times as long to trace.
    return lax.add(lax.mul(position, np.int32(ctas)), lax.axis_index(axis))

# SPDX-License-Identifier: Apache-2.0
"""The shape of a launch: grid, cluster, warpgroups, and the names of their axes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

from pallas_gpu import errors, expect
from pallas_gpu.types.completion import shows

WARPGROUP_THREADS = 128
# CUDA programming guide: at most 1024 threads a block, 2**31 - 1 blocks along x.
MAX_WARPGROUPS = 8
MAX_BLOCKS = 2**31 - 1
# The axes of a `pallas_call`'s grid, which have numbers, have this and the number.
NUMBERED_AXIS = "grid_axis_"


def _sizes(value: Any, what: str) -> tuple[Any, ...]:
    """Accepts a size or a sequence of sizes, which `Mesh` checks."""
    value = value if expect.is_sequence(value) else (value,)
    numbers = [expect.index(n) for n in value]
    return tuple(x if n is None else n for n, x in zip(numbers, value, strict=True))


@expect.arguments(
    grid=_sizes,
    cluster=_sizes,
    num_threads=expect.optional(
        expect.integer(hint="num_threads counts warpgroups, not CUDA threads")
    ),
)
@shows("warpgroups", "blocks", "axes")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh:
    """The shape of a launch.

    The CUDA grid has `grid` x `cluster` blocks (CTAs); a block has `num_threads`
    warpgroups of 128 CUDA threads. The last grid axis varies fastest.

    Attributes:
      grid: sizes of the grid axes; with a size of 0, nothing is launched.
      grid_names: a name for each, for `lax.axis_index`.
      cluster: sizes of the cluster axes (at most three).
      cluster_names: a name for each. A name that is a tuple serves `collective_axes`
        alone: `lax.axis_index` takes a tuple as several axes.
      num_threads: warpgroups a block; None is one warpgroup without a name.
      thread_name: axis name of the warpgroups.
      kernel_name: name of the kernel, unless `kernel` gets one.

    Raises:
      ArgumentError: sizes and names that do not match each other or the hardware.
    """

    # Whose rules run a kernel, and where: what each machine's meshes have.
    machine: ClassVar[str] = "gpu"
    platforms: ClassVar[tuple[str, ...]] = ("gpu", "cuda")
    groups: ClassVar[str] = "CTAs"
    grid: Sequence[int] = ()
    grid_names: Sequence[str] = ()
    cluster: Sequence[int] = ()
    cluster_names: Sequence[str] = ()
    num_threads: int | None = None
    thread_name: str | None = None
    kernel_name: str | None = None

    def __post_init__(self):
        self._check_axes("grid", self.grid, self.grid_names, 0)
        self._check_axes("cluster", self.cluster, self.cluster_names, 1)
        self._check_threads()
        names = [name for name, _ in self.axes]
        if len(set(names)) != len(names):
            raise errors.ArgumentError(
                "two axes have the same name",
                expected="different names for grid, cluster and thread axes",
                got=names,
                hint="rename one of them",
            )
        if len(self.cluster) > 3:
            raise errors.ArgumentError(
                "a cluster has too many axes",
                expected="at most 3",
                got=self.cluster,
                hint="merge axes, and split their index in the body",
            )
        if math.prod(self.grid) * math.prod(self.cluster) > MAX_BLOCKS:
            raise errors.ArgumentError(
                "the grid has too many blocks",
                expected=f"at most {MAX_BLOCKS}",
                got=math.prod(self.grid) * math.prod(self.cluster),
                hint="let each block loop over several tiles",
            )

    def _check_axes(
        self, what: str, sizes: Sequence[int], names: Sequence[str], least: int
    ) -> None:
        numbers = [expect.index(n) for n in sizes]
        if any(n is None or n < least for n in numbers):
            raise errors.ArgumentError(
                f"{what} needs {'positive ' if least else ''}static sizes",
                expected=f"Python integers, {least} or more",
                got=tuple(sizes),
                hint="sizes have to be known when the kernel is traced",
            )
        if len(sizes) != len(names):
            raise errors.ArgumentError(
                f"{what} and {what}_names have different lengths",
                expected=f"one name for each of the {len(sizes)} axes",
                got=tuple(names),
                hint=f"pass {what}_names=(…) with {len(sizes)} names",
            )

    def _check_threads(self) -> None:
        if (self.num_threads is None) != (self.thread_name is None):
            raise errors.ArgumentError(
                "num_threads and thread_name belong together",
                expected="both or neither",
                got=f"num_threads={self.num_threads}, thread_name={self.thread_name!r}",
                hint="name the warpgroups with thread_name='wg'",
            )
        if self.num_threads is not None and not 1 <= self.num_threads <= MAX_WARPGROUPS:
            raise errors.ArgumentError(
                "num_threads is out of range",
                expected=f"1 to {MAX_WARPGROUPS} warpgroups "
                f"({MAX_WARPGROUPS * WARPGROUP_THREADS} CUDA threads)",
                got=self.num_threads,
                hint="num_threads counts warpgroups, not CUDA threads",
            )

    @property
    def warpgroups(self) -> int:
        """Number of warpgroups a block."""
        return self.num_threads or 1

    @property
    def blocks(self) -> int:
        """Number of CTAs of the launch, without batch axes."""
        return math.prod(self.grid) * math.prod(self.cluster)

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """All axes as (name, size): grid, cluster, threads."""
        threads: tuple[tuple[str, int], ...] = ()
        if self.thread_name is not None:
            threads = ((self.thread_name, self.warpgroups),)
        return (
            *zip(self.grid_names, self.grid, strict=True),
            *zip(self.cluster_names, self.cluster, strict=True),
            *threads,
        )


_CUDA_AXES = ("z", "y", "x")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CudaMesh(Mesh):
    """A launch whose grid, clusters and blocks lie on CUDA's axes: z, y and x.

    Its body reads positions from the hardware's registers. A `Mesh` lies on x alone.

    Attributes:
      block: CUDA threads of a block along each axis, x first.
    """

    block: tuple[int, int, int] = (WARPGROUP_THREADS, 1, 1)

    @classmethod
    def of(
        cls,
        grid: Sequence[int],
        cluster: Sequence[int],
        block: Sequence[int],
        name: str,
    ) -> CudaMesh:
        """Returns the mesh of a launch: blocks, and threads, along each axis, x first.

        The grid is a multiple of the cluster, and the threads are whole warpgroups.
        """
        clusters = [n // c for n, c in zip(grid, cluster, strict=True)]
        x, y, z = block
        return cls(
            grid=tuple(clusters[::-1]),
            grid_names=tuple(f"grid_{a}" for a in _CUDA_AXES),
            cluster=tuple(cluster[::-1]),
            cluster_names=tuple(f"cluster_{a}" for a in _CUDA_AXES),
            num_threads=math.prod(block) // WARPGROUP_THREADS,
            thread_name="warpgroup",
            kernel_name=name,
            block=(x, y, z),
        )

    def along_axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the blocks of the grid and those of a cluster, x first."""
        pairs = zip(self.grid, self.cluster, strict=True)
        return tuple(n * c for n, c in pairs)[::-1], tuple(self.cluster)[::-1]


@expect.arguments()
@shows()
@dataclasses.dataclass(frozen=True, kw_only=True)
class WarpMesh:
    """The four warps of a warpgroup, as the `mesh` of a `kernel` inside a kernel.

      >>> @plgpu.kernel(mesh=plgpu.WarpMesh(axis_name="warp"))
      ... def in_each_warp():
      ...     @plgpu.when(lax.axis_index("warp") == 0)
      ...     def _(): ...
      >>> in_each_warp()

    It is `warp_map` with a name for the warp's index.

    Attributes:
      axis_name: the name of the axis, for `lax.axis_index`.

    Raises:
      ArgumentTypeError: the name is not a string.
    """

    axis_name: str

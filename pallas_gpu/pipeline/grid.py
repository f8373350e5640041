# SPDX-License-Identifier: Apache-2.0
"""The grid of a `pallas_call`: axes of the launch, and loops in each CTA."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from pallas_gpu import _jax, arch, errors, types
from pallas_gpu.pipeline.loops import grid_sizes, nd_loop, unravel
from pallas_gpu.pipeline.specialized.tiles import TileSchedule
from pallas_gpu.pipeline.team import Team
from pallas_gpu.types.mesh import NUMBERED_AXIS

# JAX's names of axes whose steps run one after another.
_SEQUENTIAL = ("arbitrary", "sequential")
# Registers per thread of the memory warpgroup, which computes addresses only.
_MEMORY_REGISTERS = 40
# The axis of a launch whose CTAs take positions in an order of their own.
_TILES = f"{NUMBERED_AXIS}tiles"


@dataclasses.dataclass(frozen=True)
class Grid:
    """The axes of a grid.

    Attributes:
      sizes: of all axes; that of a sequential axis may be a traced scalar.
      sequential: the axes that are loops in each CTA. The others are axes of the
        launch.
      strip: width of the strips in which positions on the last two parallel axes follow
        each other; None: in row-major order.
      ctas: number of CTAs that share the positions; None: each has one.
      tile: of a CTA with several, the number of the position at hand.
    """

    sizes: tuple[Any, ...]
    sequential: tuple[int, ...]
    strip: int | None = None
    ctas: int | None = None
    tile: Any = None

    @classmethod
    def of(cls, sizes: Any, params: types.CompilerParams, name: str) -> Grid:
        sizes = grid_sizes(sizes, f"pallas_call {name}: grid")
        sequential = _sequential_axes(params, sizes, name)
        ctas = int(params.persistent) or None
        if params.persistent is True:
            ctas = arch.target(params.target or arch.DEFAULT_TARGET.name).sm_count
        grid = cls(sizes, sequential, params.strip, ctas)
        for a in grid.parallel:
            if not isinstance(sizes[a], int):
                raise errors.UnsupportedError(
                    f"pallas_call {name}: the size of a parallel grid axis is traced",
                    expected="a Python integer: it is a size of the launch, which is "
                    "compiled",
                    got=f"{sizes[a]} for axis {a}",
                    hint="make the axis sequential, dimension_semantics 'arbitrary': "
                    "such a size may be traced",
                    where=_jax.where_now(),
                )
        grid._require_use_of(params, name)
        return grid

    def _require_use_of(self, params: types.CompilerParams, name: str) -> None:
        lacking, instead = None, ""
        if params.persistent and not self.sequential:
            lacking = (
                "persistent",
                "an 'arbitrary' axis: its copies run ahead of a tile",
            )
            instead = "; or split an axis: the steps of an 'arbitrary' one copy ahead"
        elif params.strip and len(self.parallel) < 2:
            lacking = "strip", "two parallel axes or more"
        if lacking is not None:
            raise errors.ArgumentError(
                f"pallas_call {name}: {lacking[0]} has no effect on this grid",
                expected=lacking[1],
                got=f"grid={self.sizes}, "
                f"dimension_semantics={params.dimension_semantics}",
                hint=f"leave {lacking[0]} out{instead}",
                where=_jax.where_now(),
            )

    @property
    def parallel(self) -> list[int]:
        return [a for a in range(len(self.sizes)) if a not in self.sequential]

    @property
    def steps(self) -> list[Any]:
        return [self.sizes[a] for a in self.sequential]

    @property
    def is_empty(self) -> bool:
        return any(isinstance(n, int) and n == 0 for n in self.sizes)

    @functools.cached_property
    def several(self) -> list[int]:
        return [a for a in self.parallel if self.sizes[a] > 1]

    def mesh(self, name: str, team: Team | None) -> types.Mesh:
        """Returns the launch; an empty grid is traced as one of one position."""
        sizes = [max(self.sizes[a], 1) for a in self.parallel]
        names = [_axis_name(a) for a in self.parallel]
        if self._linear:
            sizes, names = [min(self.count, self.ctas or self.count)], [_TILES]
        return types.Mesh(
            grid=tuple(sizes),
            grid_names=tuple(names),
            num_threads=None if team is None else team.warpgroups,
            thread_name=None if team is None else team.axis,
            kernel_name=name,
        )

    @property
    def _linear(self) -> bool:
        """Whether the launch has one axis, of tiles in an order of their own."""
        return self.strip is not None or self.ctas is not None

    @property
    def count(self) -> int:
        return math.prod(max(self.sizes[a], 1) for a in self.parallel)

    @property
    def repeats(self) -> bool:
        return self.ctas is not None and self.count > self.ctas

    @property
    def first(self) -> Grid:
        """The grid at the first position of this CTA."""
        tile = lax.axis_index(_TILES) if self._linear else None
        return dataclasses.replace(self, tile=tile)

    def for_each(self, visit: Callable[[Grid], None]) -> None:
        @nd_loop((self.count,), collective_axes=_TILES)
        def _(info: Any) -> None:
            visit(dataclasses.replace(self, tile=info.index[0]))

    def position(self, *steps: Any) -> list[Any]:
        following = iter(steps)
        parallel = iter(self._parallel_position())
        return [
            next(following) if a in self.sequential else next(parallel)
            for a in range(len(self.sizes))
        ]

    def _parallel_position(self) -> Sequence[Any]:
        if self.tile is None:
            return [lax.axis_index(_axis_name(a)) for a in self.parallel]
        sizes = [max(self.sizes[a], 1) for a in self.parallel]
        if self.strip is None:
            return unravel(self.tile, sizes)
        *batch, rows, columns = sizes
        plane, each = (rows, columns), math.prod(batch)
        tiles = TileSchedule(plane, (1, 1), batch=each, minor=1, strip=self.strip)
        outer, *place = tiles.position(self.tile)
        return (*unravel(outer, batch), *place)


def team_of(count: int | None, axis: str | None, grid: Grid, name: str) -> Team | None:
    """Returns the warpgroups of a block: `count` that compute; None: one alone."""
    if count is None and axis is None:
        return None
    if count is None or axis is None:
        raise errors.ArgumentError(
            f"pallas_call {name}: num_threads and thread_name belong together",
            expected="both, or none of them",
            got=f"num_threads={count}, thread_name={axis!r}",
            hint="pass both: the body tells its warpgroups apart by "
            "lax.axis_index(thread_name)",
            where=_jax.where_now(),
        )
    registers = _MEMORY_REGISTERS if grid.sequential else None
    return Team(count, axis, count, registers, last=True, again=grid.repeats)


def _axis_name(axis: int) -> str:
    return f"{NUMBERED_AXIS}{axis}"


def _sequential_axes(
    params: types.CompilerParams, grid: Sequence[Any], name: str
) -> tuple[int, ...]:
    """Returns the axes of the grid whose steps run one after another in a CTA."""
    given = params.dimension_semantics
    if given is None:
        return ()
    if len(given) != len(grid):
        raise errors.ArgumentError(
            f"pallas_call {name}: dimension_semantics does not match the grid",
            expected=f"{len(grid)} entries, one for each grid axis",
            got=given,
            hint="write 'parallel' or 'arbitrary' for each axis, or leave it out",
            where=_jax.where_now(),
        )
    unknown = [kind for kind in given if kind not in ("parallel", *_SEQUENTIAL)]
    if unknown:
        raise errors.ArgumentError(
            f"pallas_call {name}: unknown dimension_semantics",
            expected="'parallel' or 'arbitrary' for each axis",
            got=given,
            hint="'arbitrary' axes run one step after another in each CTA",
            where=_jax.where_now(),
        )
    return tuple(a for a, kind in enumerate(given) if kind in _SEQUENTIAL)

# SPDX-License-Identifier: Apache-2.0
"""The part of a pipeline's grid that each subcore runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_gpu import errors, expect
from pallas_gpu.entry import scope

PARALLEL, ARBITRARY = "parallel", "arbitrary"


def semantics(value: Any, what: str) -> tuple[str, ...]:
    """Accepts `plsc.PARALLEL` and `plsc.ARBITRARY`, one for each axis."""
    names = tuple(str(getattr(x, "value", x)).lower() for x in value)
    if set(names) <= {PARALLEL, ARBITRARY}:
        return names
    raise errors.ArgumentError(
        f"{what} has an unknown entry",
        expected="plsc.PARALLEL or plsc.ARBITRARY for each axis",
        got=expect.shown(value),
        hint="steps of a parallel axis may run on different subcores",
    )


def part_of_grid(
    grid: Sequence[Any], kinds: Sequence[str], axis_name: Any
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns the sizes of the grid of this subcore, and its first indices.

    An axis that the number of subcores divides is split evenly; otherwise the largest
    one, and the first subcores run a step more.

    Args:
      grid: sizes of the axes.
      kinds: `parallel` or `arbitrary` for each.
      axis_name: the axis of the mesh whose subcores share the grid, or several; None:
        each subcore runs all of it.

    Raises:
      ArgumentError: no axis is parallel.
      UnsupportedError: the sizes of all parallel axes are known at run time only.
    """
    first = (0,) * len(grid)
    if axis_name is None:
        return tuple(grid), first
    names = axis_name if isinstance(axis_name, (tuple, list)) else (axis_name,)
    mesh = scope.current_mesh("emit_pipeline")
    sizes = dict(mesh.axes)
    unknown = [name for name in names if name not in sizes]
    if unknown:
        raise errors.AxisNameError(
            f"emit_pipeline: the kernel has no axis named {unknown[0]!r}",
            expected=f"some of {list(sizes)}",
            got=f"core_axis_name={axis_name!r}",
            hint="name the axes of the mesh",
        )
    count = math.prod(sizes[name] for name in names)
    axis = _axis(grid, kinds, count)
    position = lax.axis_index(names[0])
    for name in names[1:]:
        position = position * sizes[name] + lax.axis_index(name)
    start, size = _share(grid[axis], count, position)
    return (
        (*grid[:axis], size, *grid[axis + 1 :]),
        (*first[:axis], start, *first[axis + 1 :]),
    )


def _axis(grid: Sequence[Any], kinds: Sequence[str], count: int) -> int:
    parallel = [i for i, kind in enumerate(kinds) if kind == PARALLEL]
    if not parallel:
        raise errors.ArgumentError(
            "emit_pipeline: subcores share a grid without a parallel axis",
            expected="dimension_semantics with plsc.PARALLEL for an axis",
            got=str(tuple(kinds)),
            hint="dimension_semantics=(plsc.PARALLEL,), if steps of the axis may run "
            "in any order",
        )
    static = [i for i in parallel if isinstance(grid[i], int)]
    even = [i for i in static if grid[i] % count == 0]
    if even:
        return even[0]
    return max(static, key=lambda i: grid[i]) if static else parallel[0]


def _share(size: Any, count: int, position: Any) -> tuple[Any, Any]:
    """Returns the first index and the number of steps of a subcore on an axis."""
    if isinstance(size, int) and size % count == 0:
        each = size // count
        return position * each, each
    if isinstance(size, int):
        each, rest = divmod(size, count)
    else:
        each, rest = lax.div(size, jnp.int32(count)), lax.rem(size, jnp.int32(count))
    return (
        position * each + jnp.minimum(position, rest),
        each + jnp.where(position < rest, 1, 0),
    )

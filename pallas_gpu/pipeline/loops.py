# SPDX-License-Identifier: Apache-2.0
"""Loops over tiles: a static persistent schedule, and an L2-friendly tile order."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gpu import _jax, errors, expect
from pallas_gpu.checks.jax_operations import require_axis_name
from pallas_gpu.entry import scope
from pallas_gpu.entry.control import counted_loop
from pallas_gpu.primitives.registers import promised
from pallas_gpu.types import values

# Indices are i32.
_MOST = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class NDLoopInfo:
    """The position of a step of `nd_loop`.

    Attributes:
      index: position on the loop's grid, one i32 scalar per axis.
      local_index: index of this step among those of this instance.
      num_local_steps: number of steps of this instance.
    """

    index: tuple[jax.Array, ...]
    local_index: jax.Array | int
    num_local_steps: jax.Array | int | None

    def __getitem__(self, axis: Any) -> Any:
        """Refuses an index: the position is an attribute."""
        raise errors.ArgumentTypeError(
            "the argument of a loop's body is indexed",
            expected="an attribute: index, local_index or num_local_steps",
            got=f"info[{expect.shown(axis)}]",
            hint="the position is a tuple: info.index[0], or i, j = info.index",
        )

    def __iter__(self) -> Any:
        """Refuses to be unpacked, as `__getitem__`."""
        return self[:]


def grid_sizes(value: Any, what: str) -> tuple[Any, ...]:
    """Accepts sizes: static ones as ints, traced ones as i32 scalars."""
    value = value if expect.is_sequence(value) else (value,)
    who = what.partition(":")[0]
    sizes = tuple(grid_size(n, who) for n in value)
    steps = math.prod(n for n in sizes if isinstance(n, int))
    if steps > _MOST and 0 not in sizes:
        raise _too_large(f"{who}: the grid has too many steps", steps)
    return sizes


# An annotation of a parameter, with its rule.
Grid = Annotated[Sequence[Any], grid_sizes]


def _too_large(what: str, size: int) -> errors.ArgumentError:
    return errors.ArgumentError(
        what,
        expected=f"at most {_MOST:,}: positions are i32",
        got=f"{size:,}",
        hint="use larger blocks, or divide the work among several calls",
        where=_jax.where_now(),
    )


def grid_size(n: Any, who: str) -> Any:
    if isinstance(n, int) and not isinstance(n, bool) and n > _MOST:
        raise _too_large(f"{who}: a size of the grid is too large", n)
    try:
        size = values.index(n, f"{who}: a size of the grid")
    except errors.ArgumentTypeError:
        raise errors.ArgumentTypeError(
            f"{who}: a size of the grid is not an integer",
            expected="an int, or a scalar integer of the kernel",
            got=expect.shown(n),
            hint="divide with plgpu.cdiv or //"
            if not callable(n)
            else "call the function, or write its result: block sizes are Python "
            "values here; plgpu.autotune passes those of a configuration",
            where=_jax.where_now(),
        ) from None
    if isinstance(size, int) and size < 0:
        raise errors.ArgumentError(
            f"{who}: a size of the grid is negative",
            expected="0 or more",
            got=size,
            hint="check the sizes",
            where=_jax.where_now(),
        )
    return size if isinstance(size, int) else size.astype(jnp.int32)


@expect.arguments(tiling=expect.optional(expect.integers(1)))
def nd_loop(
    grid: Grid,
    *,
    collective_axes: str | Sequence[str],
    tiling: Sequence[int] | None = None,
    init_carry: values.Values = None,
) -> Callable[[Callable[..., Any]], Any]:
    """Runs the decorated function over a grid that several instances share.

    Instance i of n along `collective_axes` executes the steps i, i + n, i + 2n … of the
    grid in row-major order: a persistent kernel with one instance per SM and any number
    of tiles.

    PTX: a loop over integer indices. Since: sm_90. Issued by a warpgroup; the step
    counts of two instances differ by at most one.

    Args:
      grid: sizes of the loop's axes: integers, or i32 scalars of the kernel, equal in
        all instances.
      collective_axes: names of the axes that share it, most significant first.
      tiling: iterate over the grid by tiles; one size per axis, each divides its axis.
        That it divides a traced size is a promise, which the emulator checks.
      init_carry: pytree of values passed from step to step as `carry=`.

    Returns:
      The carry after the last step.

    Raises:
      ArgumentError: a tiling of a different rank, or one that does not divide the grid.
      ArgumentTypeError: a size is not an integer.
      AxisNameError: the kernel has no such axis.

    Example:
      >>> @plgpu.nd_loop((m_tiles, n_tiles), collective_axes="sm")
      ... def _(loop_info):
      ...     mi, ni = loop_info.index
    """
    axes, sizes = collective_axes, tuple(grid)
    if tiling is not None:
        sizes = _tiled(sizes, tuple(tiling))
    mesh = scope.current_mesh("nd_loop")
    for axis in axes:
        require_axis_name(axis, mesh)

    def run(body: Callable[..., Any]) -> Any:
        expect.function(body, "nd_loop: the body")
        instances = math.prod(lax.axis_size(a) for a in axes)
        first = _position(axes)
        steps = math.prod(sizes)
        local_steps = (
            steps // instances
            if isinstance(steps, int) and steps % instances == 0
            else _steps_from(first, steps, instances)
        )

        def iteration(i: Any, carry: Any) -> Any:
            # lax's operations, as jnp's take several times as long to trace.
            step = lax.add(first, lax.mul(i, np.int32(instances)))
            index = unravel(step, sizes, tiling)
            info = NDLoopInfo(index, i, local_steps)
            named = {} if init_carry is None else {"carry": carry}
            return scope.call("nd_loop", body, info, **named)

        with _jax.trace_without_ref_rules():
            return counted_loop(local_steps, iteration, init_carry)

    return scope.decorator("nd_loop", run)


def _position(axes: Sequence[str]) -> Any:
    """Returns the row-major position on axes of the launch, as an i32 scalar."""
    if not axes:
        return jnp.int32(0)
    first = lax.axis_index(axes[0])
    for axis in axes[1:]:
        scaled = lax.mul(first, np.int32(lax.axis_size(axis)))
        first = lax.add(scaled, lax.axis_index(axis))
    return first


def _steps_from(first: Any, steps: Any, instances: int) -> Any:
    rounded = lax.sub(jnp.asarray(steps, jnp.int32), first)
    return lax.div(lax.add(rounded, np.int32(instances - 1)), np.int32(instances))


def _tiled(grid: tuple[Any, ...], tiling: tuple[int, ...]) -> tuple[Any, ...]:
    """Returns the sizes of a grid, of which those that are traced promise to fit."""
    hint = "use divisors, or omit tiling"
    fits = len(tiling) == len(grid) and not any(
        n % t for n, t in zip(grid, tiling, strict=True) if isinstance(n, int)
    )
    if not fits:
        sizes = ", ".join(str(n) if isinstance(n, int) else "traced" for n in grid)
        raise errors.ArgumentError(
            "nd_loop: the tiling does not divide the grid",
            expected=f"{len(grid)} sizes that divide ({sizes})",
            got=tiling,
            hint=hint,
        )
    return tuple(
        n
        if isinstance(n, int)
        else promised(n, t, what=f"nd_loop: size {axis} of the grid", hint=hint)
        for axis, (n, t) in enumerate(zip(grid, tiling, strict=True))
    )


def unravel(linear: Any, grid: Sequence[Any], tiling: Any = None) -> tuple[Any, ...]:
    """Converts a row-major position to indices, by tiles if there are tiles."""
    if not grid:
        return ()
    if tiling is None:
        return _digits(linear, grid)
    outer = [
        n // t if isinstance(n, int) else lax.div(n, np.int32(t))
        for n, t in zip(grid, tiling, strict=True)
    ]
    digits = _digits(linear, (*outer, *tiling))
    return tuple(
        o * t + i
        for o, i, t in zip(
            digits[: len(grid)], digits[len(grid) :], tiling, strict=True
        )
    )


def _digits(linear: Any, sizes: Sequence[int]) -> tuple[Any, ...]:
    digits: list[Any] = []
    for size in reversed(sizes[1:]):
        # A NumPy scalar is a literal of the trace; JAX's takes a conversion to be one.
        divisor = np.int32(size) if isinstance(size, int) else jnp.int32(size)
        digits.append(lax.rem(linear, divisor))
        linear = lax.div(linear, divisor)
    return (linear, *reversed(digits))


@expect.arguments(lin_idx=values.indices, shape=expect.integers(1, _MOST))
def planar_snake(
    lin_idx: Any, shape: tuple[int, int], minor_dim: int, tile_width: int
) -> tuple[Any, Any]:
    """Converts a linear index to a position on a plane, with locality.

    The plane is split into strips of `tile_width` along `minor_dim`. A strip is visited
    row by row, every second strip in reverse, so that consecutive positions share rows
    and columns, and the data they read stays in the L2 cache.

    PTX: integer arithmetic. Since: sm_90. Issued by a warpgroup.

    Args:
      lin_idx: scalar i32 from 0 to the size of the plane.
      shape: sizes of the plane.
      minor_dim: 0 or 1, the dimension that is split.
      tile_width: width of a strip; the last one may be narrower.

    Returns:
      The position, two scalars.

    Raises:
      ArgumentError: the dimension is invalid, or the width is below 1.

    Example:
      >>> mi, ni = plgpu.planar_snake(i, (m_tiles, n_tiles), 1, 8)
    """
    if minor_dim not in (0, 1) or tile_width < 1:
        raise errors.ArgumentError(
            "planar_snake: invalid strips",
            expected="minor_dim 0 or 1 and a positive tile_width",
            got=f"minor_dim={minor_dim}, tile_width={tile_width}",
            hint="tile_width is a number of tiles, e.g. 8",
        )
    if len(shape) != 2:
        raise errors.ArgumentError(
            "planar_snake: the shape is not that of a plane",
            expected="two sizes",
            got=shape,
            hint="pass (rows, columns), in tiles",
        )
    if math.prod(shape) > _MOST:
        raise errors.ArgumentError(
            "planar_snake: the plane is too large",
            expected=f"at most {_MOST} positions",
            got=shape,
            hint="split the plane",
        )
    minor_size, major_size = shape[minor_dim], shape[1 - minor_dim]
    tile_width = min(tile_width, minor_size)
    lin_idx = jnp.asarray(lin_idx, jnp.int32)
    whole = np.int32(tile_width * major_size)
    strip = lax.div(lin_idx, whole)
    within = lax.rem(lin_idx, whole)
    rest = minor_size % tile_width
    width: Any = np.int32(tile_width)
    if rest:
        is_last = lax.eq(strip, np.int32(minor_size // tile_width))
        width = lax.select(is_last, jnp.int32(rest), jnp.int32(tile_width))
    major = lax.div(within, width)
    minor = lax.add(lax.mul(strip, np.int32(tile_width)), lax.rem(within, width))
    in_order = lax.eq(lax.rem(strip, np.int32(2)), np.int32(0))
    major = lax.select(in_order, major, lax.sub(np.int32(major_size - 1), major))
    return (major, minor) if minor_dim == 1 else (minor, major)

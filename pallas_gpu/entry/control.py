# SPDX-License-Identifier: Apache-2.0
"""Control flow and positions inside a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_gpu import _jax, errors
from pallas_gpu.entry import scope


def when(condition: Any) -> Callable[[Callable[[], None]], None]:
    """Runs the decorated function if the condition holds.

    PTX: a branch; the condition is uniform in the warpgroup. Since: sm_90.

    Args:
      condition: scalar bool. A Python bool is evaluated at trace time.

    Raises:
      KernelError: the function returns a value.

    Example:
      >>> @plgpu.when(lax.axis_index("wg") == 0)
      ... def _():
      ...     plgpu.barrier_wait(barrier)
    """

    def run(body: Callable[[], None]) -> None:
        if isinstance(condition, bool):
            if condition:
                require_none("when", body, body())
            return
        with _jax.trace_without_ref_rules():
            lax.cond(
                condition, lambda: require_none("when", body, body()), lambda: None
            )

    return run


def require_none(who: str, body: Callable[..., Any], result: Any) -> None:
    if result is not None:
        raise errors.KernelError(
            f"{who}: the body returns a value",
            expected="None",
            got=repr(result),
            hint="store to a reference, or carry it: lax.cond, loop(init_carry=...)",
            where=scope.location(body),
        )


def loop(
    lower: Any,
    upper: Any,
    *,
    init_carry: Any = None,
    step: Any = 1,
    unroll: int | bool | None = None,
) -> Callable[[Callable[..., Any]], Any]:
    """Runs the decorated function for each index of a range.

    PTX: a backward branch. Since: sm_90.

    Args:
      lower: first index.
      upper: end of the range, not included.
      init_carry: pytree of values passed from iteration to iteration as `carry`;
        without it the function's only argument is the index.
      step: increment of the index, positive.
      unroll: number of iterations per branch; it must divide a static number of
        iterations.

    Returns:
      The carry after the last iteration.

    Raises:
      ArgumentError: the step is static and not positive.
      KernelError: without `init_carry` the function returns a value.

    Example:
      >>> @plgpu.loop(0, 8, init_carry=0.0)
      ... def total(i, carry):
      ...     return carry + ref[i]
    """
    if isinstance(step, int) and step < 1:
        raise errors.ArgumentError(
            "loop: the step is not positive",
            expected="1 or more",
            got=step,
            hint="count up, and index with the end minus the index",
            where=_jax.where_now(),
        )

    def run(body: Callable[..., Any]) -> Any:
        trips = _trips(lower, upper, step)

        def iteration(i, carry):
            index = lower + i * step
            if init_carry is None:
                return require_none("loop", body, body(index))
            return body(index, carry)

        with _jax.trace_without_ref_rules():
            return counted_loop(trips, iteration, init_carry, unroll=unroll)

    return run


def counted_loop(trips: Any, iteration: Any, init_carry: Any, **options: Any) -> Any:
    """`lax.fori_loop` from 0 with an i32 index, also where JAX counts in i64 (x64)."""

    def counted(i: Any, carry: Any) -> Any:
        return iteration(i if i.dtype == jnp.int32 else i.astype(jnp.int32), carry)

    return lax.fori_loop(0, trips, counted, init_carry, **options)


def _trips(lower: Any, upper: Any, step: Any) -> Any:
    if all(isinstance(x, int) for x in (lower, upper, step)):
        return max(0, -(-(upper - lower) // step))
    span = jnp.asarray(upper, jnp.int32) - jnp.asarray(lower, jnp.int32)
    return jnp.maximum(lax.div(span + (step - 1), jnp.asarray(step, jnp.int32)), 0)


def program_id(axis: int) -> jax.Array:
    """Returns the position of this instance on a grid axis.

    PTX: %ctaid. Since: sm_90.

    Args:
      axis: index of the grid axis.

    Raises:
      ArgumentError: the axis does not exist.
    """
    mesh = scope.current_mesh("program_id")
    _require_axis(mesh, axis, "program_id")
    return lax.axis_index(mesh.grid_names[axis])


def num_programs(axis: int) -> int:
    """Returns the size of a grid axis.

    PTX: none, it is a constant. Since: sm_90.

    Args:
      axis: index of the grid axis.

    Raises:
      ArgumentError: the axis does not exist.
    """
    mesh = scope.current_mesh("num_programs")
    _require_axis(mesh, axis, "num_programs")
    return mesh.grid[axis]


def _require_axis(mesh: Any, axis: int, who: str) -> None:
    if not isinstance(axis, int) or not 0 <= axis < len(mesh.grid):
        raise errors.ArgumentError(
            f"{who}: invalid grid axis",
            expected=f"0 to {len(mesh.grid) - 1}"
            if mesh.grid
            else "a kernel with a grid",
            got=axis,
            hint="specify a grid; its axes are numbered from 0",
            where=_jax.where_now(),
        )


def cdiv(a: Any, b: Any) -> Any:
    """Returns `a / b` rounded up, for integers."""
    return -(-a // b)

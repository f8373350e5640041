# SPDX-License-Identifier: Apache-2.0
"""Control flow and positions inside a kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gpu import _jax, errors, expect
from pallas_gpu.entry import jax_errors, scope
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.types import values

# A loop with `num_stages`: operands are those of a scan over the indices, and the
# number of iterations. `entry.plain` replaces it before all checks: it has no rules.
staged_loop_p = _jax.Primitive("staged_loop")
staged_loop_p.multiple_results = True
staged_loop_p.def_effectful_abstract_eval(
    lambda *_, jaxpr, **__: (
        [v.aval for v in jaxpr.outvars],
        {registry.KERNEL_EFFECT},
    )
)
staged_loop_p.def_impl(lambda *_, **__: scope.current_mesh("loop"))
registry.refuse_vmap(
    staged_loop_p, "plgpu.loop(num_stages=...)", "leave num_stages out"
)


@expect.arguments(condition=values.condition)
def when(condition: Any) -> Callable[[Callable[[], None]], None]:
    """Runs the decorated function if the condition holds.

    PTX: a branch; the condition is uniform in the warpgroup. Since: sm_90.

    Args:
      condition: scalar bool, or a scalar integer that is not 0. A Python bool is
        evaluated at trace time.

    Returns:
      A decorator, which runs the function at once.

    Raises:
      ArgumentTypeError: the condition is not a scalar.
      KernelError: the function returns a value.

    Example:
      >>> @plgpu.when(lax.axis_index("wg") == 0)
      ... def _():
      ...     plgpu.barrier_wait(barrier)
    """

    def run(body: Callable[[], None]) -> None:
        expect.function(body, "when: the body")

        def once() -> None:
            scope.require_none("when", body, scope.call("when", body))

        if isinstance(condition, bool):
            if condition:
                once()
            return
        with _jax.trace_without_ref_rules():
            lax.cond(condition, once, _nothing)

    return scope.decorator("when", run)


def _nothing() -> None:
    """The other branch of a `when`; JAX traces one function only once."""


def _unroll(value: Any, what: str) -> int | bool:
    if isinstance(value, bool):
        return value
    return expect.integer(1, unit="iterations")(value, what)


@overload
def loop(
    lower: Any,
    upper: Any,
    *,
    step: Any = 1,
    unroll: int | bool | None = None,
    num_stages: int | None = None,
) -> Callable[[Callable[[jax.Array], None]], None]: ...


@overload
def loop[T](
    lower: Any,
    upper: Any,
    *,
    init_carry: T,
    step: Any = 1,
    unroll: int | bool | None = None,
    num_stages: int | None = None,
) -> Callable[[Callable[[jax.Array, T], T]], T]: ...


@expect.arguments(
    init_carry=values.values,
    step=values.step,
    unroll=expect.optional(_unroll),
    num_stages=expect.optional(
        expect.integer(1, hint="1 loads each array where the body does")
    ),
)
def loop(
    lower: values.Index,
    upper: values.Index,
    *,
    init_carry: Any = None,
    step: Any = 1,
    unroll: int | bool | None = None,
    num_stages: int | None = None,
) -> Callable[[Callable[..., Any]], Any]:
    """Runs the decorated function for each index of a range.

    PTX: a backward branch; with `num_stages`, cp.async or cp.async.bulk in place of the
    body's ld.global. Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp.

    Args:
      lower: first index: an integer, static or a scalar.
      upper: end of the range, not included.
      init_carry: pytree of values passed from iteration to iteration as `carry`;
        without it the function's only argument is the index.
      step: increment of the index, positive.
      unroll: number of iterations per branch; it must divide a static number of
        iterations. True: all of them.
      num_stages: None: that of `CompilerParams`. 1: none of the following. Above 1,
        arrays that the body loads from GMEM are copied to SMEM
        `num_stages - 1` iterations ahead, each to a ring of so many buffers: parts of
        references, also under a mask, and rows that an array of indices names. What
        such a load is indexed with may depend on the loop's index, on values from
        before the loop and on values that the body loads, but not on the carry; and
        nothing in the loop writes the reference or waits for what writes it. Other
        loads stay as they are, as do those of scalars, those in branches and inner
        loops, and those of a `jax.Ref` that the kernel closes over. With one warpgroup,
        TMA carries parts that it can address of references that the kernel does not
        write, cp.async all others; each of several warpgroups has a ring of its own.

    Returns:
      The carry after the last iteration.

    Raises:
      ArgumentError: the step is static and not positive.
      UnsupportedError: unroll, where the number of iterations is not static, or not a
        multiple of it; num_stages, where no load can be a copy ahead: the message says
        why.
      OutOfResources: the buffers do not fit the target.
      ArgumentTypeError: a bound is not an integer.
      KernelError: without `init_carry` the function returns a value; with `num_stages`
        it is called outside a kernel.

    Example:
      >>> @plgpu.loop(0, 8, init_carry=0.0)
      ... def total(i, carry):
      ...     return carry + ref[i]
    """
    times = trips(lower, upper, step)
    if unroll not in (None, False, 1):
        _check_unroll(times, int(unroll))

    def run(body: Callable[..., Any]) -> Any:
        expect.function(body, "loop: the body")

        def iteration(i, carry):
            index = _index(lower, i, step)
            return called("loop", body, index, carry, has_carry=init_carry is not None)

        with _jax.trace_without_ref_rules():
            if num_stages is None:
                return counted_loop(times, iteration, init_carry, unroll=unroll)
            return bound_loop(
                staged_loop_p, "loop", body, iteration, init_carry, (times,),
                length=times if isinstance(times, int) else None,
                num_stages=num_stages, unroll=unroll,
            )  # fmt: skip

    return scope.decorator("loop", run)


def called(who: str, body: Any, index: Any, carry: Any, *, has_carry: bool) -> Any:
    """Calls the body of a loop; returns the next carry, None without one."""
    if has_carry:
        return scope.call(who, body, index, carry)
    return scope.require_none(who, body, scope.call(who, body, index))


def _index(lower: Any, i: Any, step: Any) -> Any:
    """Returns `lower + i * step`, without the operations that change nothing."""
    scaled = i if isinstance(step, int) and step == 1 else i * step
    if not isinstance(lower, int):
        return lower + scaled
    return lax.add(scaled, np.int32(lower)) if lower else scaled


def counted_loop(trips: Any, iteration: Any, init_carry: Any, **options: Any) -> Any:
    """`lax.fori_loop` from 0 with an i32 index, also where JAX counts in i64 (x64)."""

    def counted(i: Any, carry: Any) -> Any:
        return iteration(i if i.dtype == jnp.int32 else i.astype(jnp.int32), carry)

    return _loop(lax.fori_loop, 0, trips, counted, init_carry, **options)


def bound_loop(
    primitive: Any,
    who: str,
    body: Callable[..., Any],
    iteration: Callable[[Any, Any], Any],
    init_carry: Any,
    bounds: Sequence[Any],
    **params: Any,
) -> Any:
    """Binds a loop with the operands and the parameters of a scan, and more of both.

    Args:
      primitive: the operation: its operands are consts, carries and the bounds; those
        of its `jaxpr` consts, carries and the index.
      who: the public function.
      body: the author's function, for messages.
      iteration: `iteration(index, carry)` returns the next carry.
      init_carry: pytree of values.
      bounds: integers.
      **params: other parameters.

    Returns:
      The last carry.
    """
    leaves, tree = jax.tree.flatten(init_carry)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    index = _jax.ShapedArray((), jnp.dtype(jnp.int32))

    def flat(index: Any, *carried: Any) -> Any:
        return iteration(index, jax.tree.unflatten(tree, carried))

    avals = [*map(jax.typeof, leaves)]
    closed, out_tree = _jax.trace(flat, [index, *avals])
    # As in loops of JAX, a Python number gets the type that the body makes of it.
    promoted = [*map(_promoted, leaves, closed.out_avals)]
    if out_tree == tree and [*map(id, promoted)] != [*map(id, leaves)]:
        leaves, avals = promoted, [*map(jax.typeof, promoted)]
        closed, out_tree = _jax.trace(flat, [index, *avals])
    _require_carry(who, body, tree, out_tree, avals, closed.out_avals)
    inner, n = _jax.convert_constvars_jaxpr(closed.jaxpr), len(closed.consts)
    ins = inner.invars
    inner = inner.replace(
        invars=[*ins[:n], *ins[n + 1 :], ins[n]], debug_info=inner.debug_info
    )
    with _jax.trace_without_ref_rules():
        results = primitive.bind(
            *closed.consts, *leaves, *(jnp.asarray(x, jnp.int32) for x in bounds),
            jaxpr=inner, num_consts=n, num_carry=len(leaves), **params,
        )  # fmt: skip
    return jax.tree.unflatten(tree, results)


def _promoted(first: jax.Array, after: Any) -> jax.Array:
    if not first.weak_type or first.dtype == after.dtype:
        return first
    return first.astype(jnp.result_type(first, after.dtype))


def _require_carry(
    who: str,
    body: Any,
    tree: Any,
    out_tree: Any,
    before: Sequence[Any],
    after: Sequence[Any],
) -> None:
    got = [(x.shape, x.dtype) for x in after]
    if out_tree == tree and got == [(x.shape, x.dtype) for x in before]:
        return
    raise errors.KernelError(
        f"{who}: the body returns another carry",
        expected=", ".join(x.str_short() for x in before) or "nothing",
        got=", ".join(x.str_short() for x in after) or "nothing",
        hint="return values of the structure, shapes and types of the first carry",
        where=scope.location(body),
    )


def while_loop(condition: Any, body: Any, init: Any) -> Any:
    """`lax.while_loop`, for bodies of the author's."""
    return _loop(lax.while_loop, condition, body, init)


def _loop(loop: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Calls a loop of JAX; a carry that changes its type is a KernelError."""
    try:
        return loop(*args, **options)
    except TypeError as error:
        changed = jax_errors.carry(error)
        if changed is None:
            raise
        raise changed.with_location(scope.called_at()) from None


def _check_unroll(trips: Any, unroll: int) -> None:
    if not isinstance(trips, int):
        raise errors.UnsupportedError(
            "loop: unroll needs a static number of iterations",
            expected="lower, upper and step as Python integers",
            got=expect.shown(trips),
            hint="leave unroll out",
        )
    if trips % unroll:
        raise errors.UnsupportedError(
            "loop: unroll does not divide the number of iterations",
            expected=f"a divisor of {trips}",
            got=unroll,
            hint="choose another unroll",
        )


def trips(lower: Any, upper: Any, step: Any) -> Any:
    """Returns the number of iterations of a range, a number if it is static."""
    if all(isinstance(x, int) for x in (lower, upper, step)):
        return max(0, -(-(upper - lower) // step))
    # Operations of lax: jnp's take several times as long to trace.
    starts_at_0 = isinstance(lower, int) and lower == 0
    lower, upper, step = map(_i32, (lower, upper, step))
    times = upper if starts_at_0 else lax.sub(upper, lower)
    if not isinstance(step, np.int32):
        times = lax.div(lax.add(times, lax.sub(step, np.int32(1))), step)
    elif step != 1:
        times = lax.div(lax.add(times, np.int32(step - 1)), step)
    return times  # none if it is negative


def _i32(x: Any) -> Any:
    """Returns an integer as int32, a number as one of NumPy's."""
    return np.int32(x) if isinstance(x, int) else jnp.asarray(x, jnp.int32)


@expect.arguments(axis=expect.anything)
def program_id(axis: int) -> jax.Array:
    """Returns the position of this instance on a grid axis.

    PTX: %ctaid; for a sequential axis of `pallas_call`, the index of a loop. Since:
    sm_90.

    Args:
      axis: index of the grid axis.

    Raises:
      ArgumentError: the axis does not exist.
    """
    indices, sizes = _grid("program_id")
    return indices[_require_axis(sizes, axis, "program_id")]


@expect.arguments(axis=expect.anything)
def num_programs(axis: int) -> int:
    """Returns the size of a grid axis.

    PTX: none, it is a constant. Since: sm_90.

    Args:
      axis: index of the grid axis.

    Raises:
      ArgumentError: the axis does not exist.
    """
    _, sizes = _grid("num_programs")
    return sizes[_require_axis(sizes, axis, "num_programs")]


def _grid(who: str) -> tuple[Sequence[Any], Sequence[int]]:
    """Returns the indices and sizes of the grid: parallel and sequential axes."""
    mesh = scope.current_mesh(who)
    if (position := scope.position()) is not None:
        return position
    return [lax.axis_index(name) for name in mesh.grid_names], mesh.grid


def _require_axis(sizes: Sequence[int], axis: Any, who: str) -> int:
    number = expect.index(axis)
    if number is None or not 0 <= number < len(sizes):
        raise errors.ArgumentError(
            f"{who}: invalid grid axis",
            expected=f"0 to {len(sizes) - 1}" if sizes else "a kernel with a grid",
            got=expect.shown(axis) if number is None else number,
            hint="specify a grid; its axes are numbered from 0",
        )
    return number

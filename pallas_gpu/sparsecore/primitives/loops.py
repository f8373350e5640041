# SPDX-License-Identifier: Apache-2.0
"""Loops whose iterations are independent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import _jax, errors, expect
from pallas_gpu.entry import scope
from pallas_gpu.sparsecore.primitives._define import define
from pallas_gpu.types import values

__all__ = ["parallel_loop"]

# Operands and parameters are those of a scan over the indices; behind the consts and
# the carries come the bounds and the step.
parallel_loop_p = define(
    "parallel_loop",
    "loops",
    results=lambda *_, jaxpr, **__: [v.aval for v in jaxpr.outvars],
)


@expect.arguments(step=values.step, unroll=expect.integer(1), carry=values.values)
def parallel_loop(
    lower: values.Index,
    upper: values.Index,
    step: Any = 1,
    *,
    unroll: int = 1,
    carry: Any = None,
) -> Callable[[Callable[..., Any]], Any]:
    """Runs the decorated function for each index of a range, in no order of memory.

    The iterations must not access memory that another one writes: the compiler runs
    them interleaved, and the emulator reports those that conflict. A carry is passed
    from one to the next in order.

    Issued by: a subcore.

    Args:
      lower: first index: int32 scalar.
      upper: end of the range, not included.
      step: increment of the index, positive.
      unroll: iterations per branch.
      carry: pytree of values that iterations pass on; without it the function's only
        argument is the index.

    Returns:
      A decorator, which runs the loop and returns the last carry.

    Raises:
      ArgumentError: the step is static and not positive.
      ArgumentTypeError: a bound is not an integer scalar; a carry is a reference.
      KernelError: the function returns a value without `carry`, or one of another
        structure or type than `carry`.

    Example:
      >>> @plsc.parallel_loop(0, 1024, step=16, unroll=4)
      ... def _(i):
      ...     y_vmem[plsc.ds(i, 16)] = 2 * x_vmem[plsc.ds(i, 16)]
    """
    bounds = (lower, upper, step)
    leaves, tree = jax.tree.flatten(carry)
    for leaf in leaves:
        if isinstance(values.abstract(leaf), _jax.AbstractRef):
            raise expect.wrong_type(
                "parallel_loop: carry", "values", "pytrees of values", leaf,
                "use the reference in the body: it is captured",
            )  # fmt: skip
    leaves = [jnp.asarray(leaf) for leaf in leaves]

    def run(body: Callable[..., Any]) -> Any:
        expect.function(body, "parallel_loop: the body")

        def iteration(index: Any, *carried: Any) -> Any:
            if carry is None:
                result = scope.call("parallel_loop", body, index)
                return scope.require_none("parallel_loop", body, result)
            given = jax.tree.unflatten(tree, carried)
            return scope.call("parallel_loop", body, index, given)

        index = _jax.ShapedArray((), jnp.dtype(jnp.int32))
        avals = [_jax.ShapedArray(x.shape, x.dtype) for x in leaves]
        closed, out_tree = _jax.trace(iteration, [index, *avals])
        _require_carry(body, tree, out_tree, avals, closed.out_avals)
        results = _bind(closed, leaves, bounds, unroll)
        return None if carry is None else jax.tree.unflatten(tree, results)

    return scope.decorator("parallel_loop", run)


def _bind(closed: Any, carry: list[Any], bounds: Any, unroll: int) -> list[Any]:
    """Binds the loop: its body gets consts, carries and the index, as in a scan."""
    inner = _jax.convert_constvars_jaxpr(closed.jaxpr)
    n = len(closed.consts)
    ins = inner.invars
    inner = inner.replace(
        invars=[*ins[:n], *ins[n + 1 :], ins[n]], debug_info=inner.debug_info
    )
    length = None
    if all(isinstance(x, int) for x in bounds):
        lower, upper, step = bounds
        length = max(0, -(-(upper - lower) // step))
    with _jax.trace_without_ref_rules():
        return parallel_loop_p.bind(
            *closed.consts, *carry, *(jnp.asarray(x, jnp.int32) for x in bounds),
            jaxpr=inner, num_consts=n, num_carry=len(carry), length=length,
            unroll=unroll,
        )  # fmt: skip


def _require_carry(
    body: Any, tree: Any, out_tree: Any, before: list[Any], after: Any
) -> None:
    got = [(x.shape, x.dtype) for x in after]
    if out_tree == tree and got == [(x.shape, x.dtype) for x in before]:
        return
    raise errors.KernelError(
        "parallel_loop: the body returns another carry",
        expected=", ".join(x.str_short() for x in before) or "nothing",
        got=", ".join(x.str_short() for x in after) or "nothing",
        hint="return values of the structure, shapes and types of `carry`",
        where=scope.location(body),
    )

# SPDX-License-Identifier: Apache-2.0
"""Loops whose iterations are independent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from pallas_gpu import _jax, expect
from pallas_gpu.entry import control, scope
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
    for leaf in jax.tree.leaves(carry):
        if isinstance(values.abstract(leaf), _jax.AbstractRef):
            raise expect.wrong_type(
                "parallel_loop: carry", "values", "pytrees of values", leaf,
                "use the reference in the body: it is captured",
            )  # fmt: skip

    is_static = all(isinstance(x, int) for x in bounds)
    length = control.trips(*bounds) if is_static else None

    def run(body: Callable[..., Any]) -> Any:
        expect.function(body, "parallel_loop: the body")

        def iteration(index: Any, given: Any) -> Any:
            has_carry = carry is not None
            return control.called(
                "parallel_loop", body, index, given, has_carry=has_carry
            )

        return control.bound_loop(
            parallel_loop_p, "parallel_loop", body, iteration, carry, bounds,
            length=length, unroll=unroll,
        )  # fmt: skip

    return scope.decorator("parallel_loop", run)

# SPDX-License-Identifier: Apache-2.0
"""`measure`: a function that returns the times of its kernels with its results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from pallas_gpu import _jax, errors, expect
from pallas_gpu.runtime import cupti
from pallas_gpu.testing import calling


@expect.arguments(iterations=expect.integer(1, 1_000_000, unit="iterations"))
def measure(
    f: Callable[..., Any], *, aggregate: bool = True, iterations: int = 1
) -> Callable[..., tuple[Any, Any]]:
    """Returns a function that measures `f` on the device and returns its results, too.

    Issued by: the host. Since: any GPU of JAX. CUPTI records the times. `f` is jitted
    if it is not; each call of the function calls it once more, to compile it.

    Args:
      f: a function of arrays.
      aggregate: whether to add up the kernels of a call.
      iterations: how often to call it.

    Returns:
      A function of the arguments of `f`. It returns the results and milliseconds: of
      all kernels of a call, or a list of pairs of a kernel's name and its time; of
      several iterations a list of those; None if no kernel is launched.

    Raises:
      ArgumentError: iterations are less than 1.
      NoGpuError: in the call: JAX has no CUDA device.
      MeasurementError: in the call: the iterations launch different kernels.
    """
    compiled = isinstance(f, jax.stages.Wrapped | jax.stages.Compiled)
    function = f if compiled else jax.jit(f)

    @functools.wraps(f)
    def measured(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        results: list[Any] = []

        def run() -> list[Any]:
            results.extend(function(*args, **kwargs) for _ in range(iterations))
            return results

        with errors.at(_jax.where_now):
            cupti.require_gpu()
            jax.block_until_ready(calling.call("measure", function, *args, **kwargs))
            times = _times(cupti.kernel_times(run), aggregate, iterations)
        return results[0], times

    return measured


def _times(times: list[tuple[str, float]], aggregate: bool, iterations: int) -> Any:
    """Returns the times of one iteration, or a list of those of several."""
    if not times:
        return None
    each = len(times) // iterations
    parts = [times[i : i + each] for i in range(0, len(times), each)] if each else []
    named = [[name for name, _ in part] for part in parts]
    if len(parts) != iterations or any(names != named[0] for names in named):
        raise errors.MeasurementError(
            "measure: the iterations launch different kernels",
            expected=f"{iterations} times the same kernels",
            got=f"{len(times)} launches of {sorted({name for name, _ in times})}",
            hint="measure a function that does the same in each call, with "
            "iterations=1 if it does not",
        )
    found = [sum(ms for _, ms in part) if aggregate else part for part in parts]
    return found[0] if iterations == 1 else found

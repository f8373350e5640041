# SPDX-License-Identifier: Apache-2.0
"""Several runs of a kernel, each with a schedule of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_gpu import errors, types
from pallas_gpu.emulator.engine import race_report
from pallas_gpu.emulator.engine.orders.choices import Directed
from pallas_gpu.emulator.engine.orders.explore import Explored, explore


def run_all(
    params: types.InterpretParams,
    run: Callable[[types.InterpretParams], list[np.ndarray]],
    names: Sequence[str],
) -> list[np.ndarray]:
    """Runs all schedules until one fails; returns the results, equal in all.

    Args:
      params: parameters with a number of schedules.
      run: runs the kernel with one.
      names: of the results.

    Raises:
      RaceError: the results depend on the schedule.
      Errors of the runs, with the schedule.
    """
    first: list[np.ndarray] = []
    each = params.each_schedule()
    for number, schedule in enumerate(each, start=1):
        try:
            results = run(schedule)
            if number == 1:
                first = results
            for name, a, b in zip(names, first, results, strict=True):
                _require_equal(name, a, b, each[0], schedule)
        except errors.PallasGpuError as error:
            raise error.with_schedule(
                f"{number} of {len(each)}; {schedule} repeats it"
            ) from error.__cause__
    return first


def run_orders(
    run: Callable[[Directed], list[np.ndarray]], names: Sequence[str], **limits: Any
) -> Explored[list[np.ndarray]]:
    """Runs every order up to equivalence; integers are to be equal in all.

    The order of floating-point sums changes their rounding, which is no mistake.

    Args:
      run: runs the kernel with some choices.
      names: of the results.
      limits: as of `orders.explore`.
    """
    first: list[np.ndarray] = []

    def execute(choices: Directed) -> list[np.ndarray]:
        results = run(choices)
        if not first:
            first.extend(results)
        for name, a, b in zip(names, first, results, strict=True):
            if not jnp.issubdtype(a.dtype, jnp.inexact):
                _require_equal(name, a, b, "the first order", "another one")
        return results

    return explore(execute, **limits)


def _require_equal(*compared: Any) -> None:
    error = race_report.schedule_dependent(*compared)
    if error is not None:
        raise error

# SPDX-License-Identifier: Apache-2.0
"""Kernels without one of their waits or barriers, run in the emulator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import pallas_gpu as plgpu
from pallas_gpu import errors
from pallas_gpu.emulator import launches
from pallas_gpu.emulator.coverage import Coverage
from pallas_gpu.emulator.engine import scheduler
from pallas_gpu.emulator.engine.plan import Plan
from pallas_gpu.emulator.engine.steps import ControlStep, EffectStep
from pallas_gpu.entry.call import CallParams
from pallas_gpu.program.nodes import Op
from pallas_gpu.sparsecore.emulator import launch
from pallas_gpu.sparsecore.primitives.copies import copy_wait_p
from pallas_gpu.sparsecore.primitives.sync import semaphore_wait_p, subcore_barrier_p
from tests.support.sparsecore import whole

DROPPED = (copy_wait_p, semaphore_wait_p, subcore_barrier_p)
SCHEDULES = [
    plgpu.InterpretParams(seed=seed, asynchrony=mode)
    for seed in range(3)
    for mode in ("late", "eager", "random")
]


@dataclasses.dataclass
class Mutant:
    """A plan without a step.

    Attributes:
      plan: what is left.
      dropped: the operation that is missing.
    """

    plan: Plan
    dropped: Op


def mutants(plan: Plan) -> Iterator[Mutant]:
    """Yields the plan without each of its waits and barriers in turn."""
    for i, step in enumerate(plan.steps):
        others = plan.steps[:i], plan.steps[i + 1 :]
        if isinstance(step, EffectStep) and step.location.op.primitive in DROPPED:
            left = dataclasses.replace(plan, steps=[*others[0], *others[1]])
            yield Mutant(left, step.location.op)
        if not isinstance(step, ControlStep):
            continue
        for k, inner in enumerate(step.plans):
            for mutant in mutants(inner):
                plans = (*step.plans[:k], mutant.plan, *step.plans[k + 1 :])
                other = dataclasses.replace(step, plans=plans)
                steps = [*others[0], other, *others[1]]
                left = dataclasses.replace(plan, steps=steps)
                yield Mutant(left, mutant.dropped)


def survivors(
    function: Callable[..., Any], *args: Any, target: str = "tpu7x"
) -> tuple[int, list[str]]:
    """Runs the kernels that a function calls without each of their waits and barriers.

    Returns:
      How many mutants there are, of what is executed; and what those lack that no
      schedule notices.
    """
    counts, unseen = [], []

    def run(params: dict[str, Any], arrays: Sequence[Any]) -> list[np.ndarray]:
        call = CallParams(**params)
        given = [np.asarray(x) for x in arrays]
        plan = launches.planned(call)
        coverage = Coverage(plan)
        right = _results(call, given, coverage.plan, SCHEDULES[0])
        idle = [op for op, _ in coverage.missing()]
        for mutant in mutants(plan):
            if mutant.dropped in idle:
                continue
            counts.append(mutant)
            if not any(_is_seen(call, given, mutant.plan, s, right) for s in SCHEDULES):
                unseen.append(f"{mutant.dropped.name}: {mutant.dropped.equation}")
        return right

    whole.evaluated(function, *args, target=target, run=run)
    return len(counts), unseen


def _results(
    params: CallParams,
    arrays: Sequence[Any],
    plan: Plan,
    schedule: plgpu.InterpretParams,
) -> list[np.ndarray]:
    run = launch.SPARSECORES.launch(params, [arrays], plan, schedule, None)
    try:
        with np.errstate(all="ignore"):
            scheduler.run(run.execution, run.pools())
        run.finish()
        return run.results()
    finally:
        run.dissolve()


def _is_seen(*run: Any) -> bool:
    *mutant, right = run
    try:
        results = _results(*mutant)
    except errors.PallasGpuError:
        return True
    pairs = zip(results, right, strict=True)
    return any(a.tobytes() != b.tobytes() for a, b in pairs)

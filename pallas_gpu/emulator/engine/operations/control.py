# SPDX-License-Identifier: Apache-2.0
"""JAX's loops and branches with effects in their bodies."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax

from pallas_gpu import _jax
from pallas_gpu.emulator.engine import evaluate, poison
from pallas_gpu.emulator.engine.execution import report
from pallas_gpu.emulator.engine.steps import ControlStep
from pallas_gpu.emulator.engine.threads import Thread
from pallas_gpu.emulator.engine.waits import ITERATION, Run
from pallas_gpu.primitives import _registry as registry

_EMULATE = registry.RuleKind.EMULATE


def begin_iteration(thread: Thread, step: ControlStep, number: int) -> None:
    """Records that a loop of a thread begins an iteration."""
    thread.location = step.location
    thread.around = ((step.location, number), *thread.around[1:])
    thread.execution.tick()


def decided(value: Any) -> Any:
    """Returns a value that decides what is executed, which must not be poison."""
    if isinstance(value, poison.Poisoned):
        report(value.origin.error())
        return value.value
    return value


@registry.register(lax.scan_p, _EMULATE)
def _scan(thread: Thread, step: ControlStep, ins: list[Any]) -> Run:
    params = step.params
    num_consts, num_carry = _jax.scan_arity(params)
    (body,), length = step.plans, params["length"]
    consts, carry = ins[:num_consts], ins[num_consts : num_consts + num_carry]
    arrays = ins[num_consts + num_carry :]
    steps = range(length)
    stacked: dict[int, list[Any]] = {}
    for i in reversed(steps) if params["reverse"] else steps:
        begin_iteration(thread, step, i)
        parts = [_pure(lambda x, i=i: x[i], [array]) for array in arrays]
        results = yield from evaluate.run(thread, body, [*consts, *carry, *parts])
        carry, stacked[i] = results[:num_carry], results[num_carry:]
    ys = zip(*(stacked[i] for i in steps), strict=True)
    return [*carry, *(_pure(lambda *xs: np.stack(xs), list(xs)) for xs in ys)]


def _pure(function: Callable[..., Any], operands: list[Any]) -> Any:
    if any(isinstance(x, poison.Poisoned) for x in operands):
        return poison.apply(function, operands)
    return function(*operands)


@registry.register(lax.while_p, _EMULATE)
def _while(thread: Thread, step: ControlStep, ins: list[Any]) -> Run:
    params = step.params
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    condition, body = step.plans
    cond_consts = ins[:num_cond]
    body_consts = ins[num_cond : num_cond + num_body]
    carry, loop = ins[num_cond + num_body :], object()
    for number in itertools.count():
        begin_iteration(thread, step, number)
        (more,) = yield from evaluate.run(thread, condition, [*cond_consts, *carry])
        if not bool(decided(more)):
            break
        # The loop may wait for another thread, of this group or another one.
        thread.iteration = (loop, carry)
        yield ITERATION
        carry = yield from evaluate.run(thread, body, [*body_consts, *carry])
    return carry


@registry.register(lax.cond_p, _EMULATE)
def _cond(thread: Thread, step: ControlStep, ins: list[Any]) -> Run:
    which = min(max(int(decided(ins[0])), 0), len(step.plans) - 1)
    results = yield from evaluate.run(thread, step.plans[which], ins[1:])
    return results

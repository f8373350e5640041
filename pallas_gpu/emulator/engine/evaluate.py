# SPDX-License-Identifier: Apache-2.0
"""The equation loop: a thread executes a plan.

Everything here is a generator, because an effect can block. Where threads share memory,
each effect is also a point at which another may run.
"""

from __future__ import annotations

import types as python_types
from collections.abc import Sequence
from typing import Any

from pallas_gpu import errors
from pallas_gpu.emulator.engine import poison
from pallas_gpu.emulator.engine.execution import report
from pallas_gpu.emulator.engine.poison import Poisoned
from pallas_gpu.emulator.engine.steps import (
    ArithmeticStep,
    ControlStep,
    EffectStep,
    FailStep,
    Plan,
    bound,
    slots_read,
)
from pallas_gpu.emulator.engine.threads import Thread
from pallas_gpu.emulator.engine.waits import Run


def run(thread: Thread, plan: Plan, args: Sequence[Any]) -> Run:
    """Runs a plan; the generator returns the list of results."""
    if plan.work:
        thread.execution.tick(plan.work)
    alone = thread.alone
    env: list[Any] = [None] * plan.size
    env[: len(args)] = args
    for step in plan.steps:
        # Cheaper than a match: this is the innermost loop of the emulator.
        kind = type(step)
        if kind is ArithmeticStep:
            try:
                env[step.out] = step.run(env)
            except (errors.UninitializedReadError, AttributeError, TypeError):
                env[step.out] = _poisoned(step, env)
        elif kind is EffectStep:
            if not alone:
                yield None
            thread.location = step.location
            try:
                result = step.rule(thread, step.bind(env), **step.params)
                if type(result) is python_types.GeneratorType:
                    result = yield from result
            except errors.UninitializedReadError as error:
                result = yield from _again(error, thread, step, env)
            if step.single:
                env[step.outs[0]] = result
            elif step.outs:
                for out, value in zip(step.outs, result, strict=True):
                    env[out] = value
        elif kind is ControlStep:
            thread.location, around = step.location, thread.around
            thread.around = ((step.location, None), *around)
            ins = bound(step.op.inputs, env)
            results = yield from step.rule(thread, step, ins)
            thread.around = around
            for out, value in zip(step.op.results, results, strict=True):
                env[out.index] = value
        elif kind is FailStep:
            raise type(step.error)(step.error.what, **_details(step.error))
        else:
            raise errors.InternalError(f"a plan has an unknown step {step!r}")
    return bound(plan.outs, env)


def _again(
    error: errors.PallasGpuError, thread: Thread, step: EffectStep, env: list[Any]
) -> Run:
    """Executes an operation that refuses poison with the contents of the poison."""
    poisoned = [i for i in slots_read(step) if isinstance(env[i], Poisoned)]
    if not poisoned:
        raise error
    report(error)
    for i in poisoned:
        env[i] = env[i].value
    result = step.rule(thread, step.bind(env), **step.params)
    if type(result) is python_types.GeneratorType:
        result = yield from result
    return result


def guarded(thread: Thread, inner: Run) -> Run:
    """Adds the line and the thread to errors."""
    try:
        yield from inner
    except errors.PallasGpuError as error:
        raise located(error, thread) from error.__cause__
    except Exception as error:
        internal = errors.InternalError(
            "the emulator failed",
            got=f"{type(error).__name__}: {error}",
            hint="please report it with the kernel",
        )
        raise located(internal, thread) from error


def located(error: errors.PallasGpuError, thread: Thread) -> errors.PallasGpuError:
    """Adds the line and the thread to an error."""
    here = thread.where()
    error.with_location(here)
    lines = [error.where] if error.where is not None else []
    if isinstance(error, errors.UninitializedReadError) and here != error.where:
        lines.append(f"used at {here}")
        error.about(other=thread.here())
    error.about(who=thread.name, position=thread.position, loops=thread.loops())
    error.where = "\n".join([*lines, f"in {thread.name}"])
    return error


def _details(error: errors.PallasGpuError) -> dict[str, Any]:
    # A plan is kept; the error it holds must not collect tracebacks of many calls.
    return {
        "expected": error.expected,
        "got": error.got,
        "hint": error.hint,
        "where": error.where,
    }


def _poisoned(step: ArithmeticStep, env: list[Any]) -> Any:
    """Evaluates a step that has failed, if its operands are poisoned."""
    operands = bound(step.ins, env)
    if not any(isinstance(x, Poisoned) for x in operands):
        return step.fn(*operands)
    return poison.apply(step.fn, operands)

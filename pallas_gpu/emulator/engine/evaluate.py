# SPDX-License-Identifier: Apache-2.0
"""The equation loop: a warpgroup runs a plan.

Everything here is a generator, because an effect can block. With several warpgroups
each effect is also a place where another may run.
"""

from __future__ import annotations

import types as python_types
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from pallas_gpu import _jax, errors
from pallas_gpu.emulator.engine import ordering
from pallas_gpu.emulator.engine import plan as plans
from pallas_gpu.emulator.engine.scheduler import Run, Wait
from pallas_gpu.emulator.engine.steps import (
    ControlStep,
    EffectStep,
    FailStep,
    Plan,
    PureStep,
    ScalarStep,
    bind_operands,
)
from pallas_gpu.emulator.gpu import scoped
from pallas_gpu.emulator.gpu.machine import Warp, Warpgroup
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.scoped import run_scoped_p
from pallas_gpu.primitives.warp import WARPS, warp_map_p

_EMULATE = registry.RuleKind.EMULATE


def run(wg: Warpgroup, plan: Plan, args: Sequence[Any]) -> Run:
    """Runs a plan to its end; the generator's value is the list of results."""
    env: list[Any] = [None] * plan.size
    env[: len(args)] = args
    for step in plan.steps:
        match step:
            case ScalarStep():
                env[step.out] = step.fn(*[x.bind(env) for x in step.ins])
            case PureStep():
                _pure(wg, step, env)
            case EffectStep():
                if not wg.sole:
                    yield None
                wg.machine.tick()
                wg.location = step.location
                yield from _effect(wg, step, env)
            case ControlStep():
                wg.location = step.location
                ins = [x.bind(env) for x in step.ins]
                results = yield from step.rule(wg, step, ins)
                for out, value in zip(step.outs, results, strict=True):
                    env[out] = value
            case FailStep():
                raise type(step.error)(step.error.what, **_details(step.error))
            case _:
                raise errors.InternalError(f"a plan has an unknown step {step!r}")
    return [x.bind(env) for x in plan.outs]


def guarded(wg: Warpgroup, inner: Run) -> Run:
    """Adds line, CTA, warpgroup and warp to what goes wrong."""
    try:
        yield from inner
    except errors.PallasGpuError as error:
        raise _located(error, wg) from error.__cause__
    except Exception as error:
        internal = errors.InternalError(
            "the emulator failed",
            got=f"{type(error).__name__}: {error}",
            hint="please report it with the kernel",
        )
        raise _located(internal, wg) from error


def _located(error: errors.PallasGpuError, wg: Warpgroup) -> errors.PallasGpuError:
    error.with_location(wg.where())
    position = f"in {wg.name}"
    error.where = position if error.where is None else f"{error.where}\n{position}"
    return error


def _details(error: errors.PallasGpuError) -> dict[str, Any]:
    # A plan is kept; the error it holds must not collect tracebacks of many calls.
    return {
        "expected": error.expected,
        "got": error.got,
        "hint": error.hint,
        "where": error.where,
    }


def _pure(wg: Warpgroup, step: PureStep, env: list[Any]) -> None:
    wg.location = step.location
    try:
        results = step.fn(*[env[i] for i in step.ins])
    except errors.PallasGpuError:
        raise
    except Exception as error:
        raise errors.NotModelledError(
            "the emulator's CPU cannot evaluate a computation of the kernel",
            got=f"{type(error).__name__}: {error}",
            hint="run the kernel on a GPU",
        ) from error
    for out, scalar, value in zip(step.outs, step.scalar_outs, results, strict=True):
        env[out] = np.asarray(value)[()] if scalar else value


def _effect(wg: Warpgroup, step: EffectStep, env: list[Any]) -> Run:
    operands = bind_operands(step.operands, env)
    result = step.rule(wg, operands, used=step.used, **step.params)
    if isinstance(result, python_types.GeneratorType):
        result = yield from result
    if step.single:
        env[step.outs[0]] = result
        return
    for out, value in zip(step.outs, result or (), strict=True):
        env[out] = value


# --- loops and branches ---------------------------------------------------------------


def _turn(wg: Warpgroup, step: ControlStep) -> None:
    wg.machine.tick()
    wg.location = step.location


@registry.register(lax.scan_p, _EMULATE)
def _scan(wg: Warpgroup, step: ControlStep, ins: list[Any]) -> Run:
    # The check pass refuses arrays to slice or to stack: what is left carries values.
    num_consts, num_carry = _jax.scan_arity(step.params)
    body = plans.plan_of(step.params["jaxpr"])
    consts, carry = ins[:num_consts], ins[num_consts:]
    if len(carry) != num_carry or len(step.outs) != num_carry:
        raise errors.NotModelledError(
            "the emulator has no model of a scan over arrays",
            hint="index a reference with the loop's counter",
        )
    for _ in range(step.params["length"]):
        _turn(wg, step)
        carry = yield from run(wg, body, [*consts, *carry])
    return carry


@registry.register(lax.while_p, _EMULATE)
def _while(wg: Warpgroup, step: ControlStep, ins: list[Any]) -> Run:
    params = step.params
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    condition = plans.plan_of(params["cond_jaxpr"])
    body = plans.plan_of(params["body_jaxpr"])
    cond_consts = ins[:num_cond]
    body_consts = ins[num_cond : num_cond + num_body]
    carry = ins[num_cond + num_body :]
    while True:
        _turn(wg, step)
        (more,) = yield from run(wg, condition, [*cond_consts, *carry])
        if not bool(more):
            return carry
        if not wg.sole:
            # A loop without effects in its body must not keep the others from running.
            yield None
        carry = yield from run(wg, body, [*body_consts, *carry])


@registry.register(lax.cond_p, _EMULATE)
def _cond(wg: Warpgroup, step: ControlStep, ins: list[Any]) -> Run:
    branches = step.params["branches"]
    which = min(max(int(ins[0]), 0), len(branches) - 1)
    results = yield from run(wg, plans.plan_of(branches[which]), ins[1:])
    return results


@registry.register(run_scoped_p, _EMULATE)
def _run_scoped(wg: Warpgroup, step: ControlStep, ins: list[Any]) -> Run:
    jaxpr = step.params["jaxpr"]
    declared = [v.aval for v in jaxpr.invars[len(ins) :]]
    shared = bool(step.params["collective_axes"])
    scope, refs = yield from scoped.enter(wg, id(jaxpr), declared, shared)
    results = yield from run(wg, plans.plan_of(jaxpr), [*ins, *refs])
    wg.location = step.location
    scoped.leave(wg, scope)
    return results


# --- warps ----------------------------------------------------------------------------


@registry.register(warp_map_p, _EMULATE)
def _warp_map(wg: Warpgroup, step: ControlStep, ins: list[Any]) -> Run:
    """Lets the four warps of a warpgroup run, and waits until all have ended.

    The barriers around the region order them: what the warpgroup did comes before all
    of them, what they do comes before what the warpgroup does next. Among each other
    they have no order but the one that they make.
    """
    body = plans.plan_of(step.params["jaxpr"])
    if not wg.warps:
        wg.warps = [Warp(wg, number) for number in range(WARPS)]
    warps, threads, known = wg.warps, wg.machine.threads, wg.release()
    for warp in warps:
        body_run = run(warp, body, [*ins, np.int32(warp.number)])
        warp.start(known, guarded(warp, body_run), step.location)
    threads.extend(warps)
    yield Wait(
        lambda: all(warp.done for warp in warps),
        "its four warps to end",
        lambda: f"{sum(warp.done for warp in warps)} of {WARPS} warps have ended",
        for_threads=True,
    )
    for warp in warps:
        threads.remove(warp)
        ordering.join(wg.clock, warp.release())
    return []

# SPDX-License-Identifier: Apache-2.0
"""Semaphores of JAX's Pallas in received bodies, memory of a launch, and delays."""

from __future__ import annotations

from typing import Any

import jax

from pallas_gpu import _jax, errors, types
from pallas_gpu.bridge import scratch
from pallas_gpu.bridge.references import view
from pallas_gpu.bridge.rules import Evaluation, rule
from pallas_gpu.entry import scoped
from pallas_gpu.primitives.sync import delay, semaphore


def _arguments(eqn: _jax.JaxprEqn, operands: list[Any]) -> tuple[Any, ...]:
    """Returns the semaphore, and the other arguments of the function."""
    ref, steps, *rest = jax.tree.unflatten(eqn.params["args_tree"], operands)
    return view(ref, steps), *rest


@rule("semaphore_signal")
def _signal(_: Evaluation, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    ref, inc, device_id, core_index = _arguments(eqn, operands)
    if core_index is not None:
        raise errors.UnsupportedError(
            "semaphore_signal: core_index is not supported",
            expected="None, the default",
            got="a core",
            hint="leave it out: a GPU has no cores in this sense",
        )
    memory_scope = eqn.params.get("memory_scope", semaphore.SYSTEM)
    semaphore.semaphore_signal(
        ref,
        inc,
        device_id=device_id,
        device_id_type=types.DeviceIdType[eqn.params["device_id_type"].name],
        memory_scope=memory_scope,
    )
    return []


@rule("semaphore_wait")
def _wait(_: Evaluation, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    ref, value, decrement = _arguments(eqn, operands)
    memory_scope = eqn.params.get("memory_scope", semaphore.SYSTEM)
    semaphore.semaphore_wait(
        ref, value, decrement=bool(decrement), memory_scope=memory_scope
    )
    return []


@rule("semaphore_read")
def _read(_: Evaluation, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    (ref,) = _arguments(eqn, operands)
    return [semaphore.semaphore_read(ref)]


@rule("get_global")
def _get_global(_: Evaluation, eqn: _jax.JaxprEqn, __: list[Any]) -> list[Any]:
    return [scoped.get_global(scratch.declaration(eqn.params["what"]))]


@rule("delay")
def _delay(_: Evaluation, __: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    (nanos,) = operands
    delay.delay(nanos)
    return []

# SPDX-License-Identifier: Apache-2.0
"""Positions on the grid, hints to the compiler, and small functions of JAX's Pallas."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gpu import _jax, errors
from pallas_gpu.bridge.rules import Evaluation, rule
from pallas_gpu.entry import control
from pallas_gpu.primitives import debug, registers


@rule("program_id")
def _program_id(body: Evaluation, eqn: _jax.JaxprEqn, _: list[Any]) -> list[Any]:
    return [control.program_id(body.axes[eqn.params["axis"]])]


@rule("num_programs")
def _num_programs(body: Evaluation, eqn: _jax.JaxprEqn, _: list[Any]) -> list[Any]:
    return [jnp.asarray(control.num_programs(body.axes[eqn.params["axis"]]), jnp.int32)]


@rule("multiple_of")
def _multiple_of(_: Evaluation, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,), promised = operands, eqn.params["values"]
    if x.shape:
        return [x]
    return [registers.multiple_of(x, math.lcm(*promised))]


@rule("debug_print")
def _debug_print(_: Evaluation, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    for x in operands:
        debug.refuse_reference(x)
    return _jax.bind_again(eqn, operands)


@rule("check")
def _check(_: Evaluation, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    """A `pl.debug_check`; its message is a part of the type of JAX's error."""
    fails, code, *values = operands
    if values or not eqn.params["debug"]:
        raise errors.UnsupportedError(
            "a check with values in its message"
            if values
            else "checkify.check, whose error is a result of the call",
            expected="pl.debug_check(condition, message)",
            got="a message with placeholders" if values else "checkify.check",
            hint="print the values with plgpu.debug_print"
            if values
            else "use plgpu.debug_check",
        )
    holds = [np.bool_(True), np.asarray(code)]
    error = jax.tree.unflatten(eqn.params["err_tree"], holds)
    message = str(error.get()).removesuffix(" (`check` failed)")
    debug.debug_check(jnp.logical_not(fails), message)
    return []


@rule("broadcast_to")
def _broadcast_to(_: Evaluation, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    return [jnp.broadcast_to(operands[0], eqn.params["shape"])]


@rule("reciprocal")
def _reciprocal(_: Evaluation, __: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    return [1 / operands[0]]


@rule("add_any")
def _add_any(_: Evaluation, __: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    """The sum in a derivative that JAX has taken of a body."""
    return [operands[0] + operands[1]]

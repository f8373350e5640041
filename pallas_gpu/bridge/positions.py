# SPDX-License-Identifier: Apache-2.0
"""Positions on the grid, hints to the compiler, and small functions of JAX's Pallas."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

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
    static = dict(eqn.params["static_args"])
    leaves = iter(operands)
    count = len(static) + len(operands)
    given = [static[i] if i in static else next(leaves) for i in range(count)]
    args, named = jax.tree.unflatten(eqn.params["in_tree"], given)
    if named:
        raise errors.UnsupportedError(
            "debug_print: values with names",
            expected="one {} for each value",
            got=", ".join(named),
            hint="pass the values by position",
            where=_jax.where_now(),
        )
    debug.debug_print(eqn.params["fmt"], *args)
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

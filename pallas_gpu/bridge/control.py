# SPDX-License-Identifier: Apache-2.0
"""Calls, branches, loops and scopes in received bodies.

References are closed over, not operands: a block is a view of a ring of buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_gpu import _jax, errors, types
from pallas_gpu.bridge import scratch
from pallas_gpu.bridge.rules import Evaluation, rule
from pallas_gpu.entry.scoped import scoped


@rule(
    "jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call",
    "checkpoint", "remat2",
)  # fmt: skip
def _call(body: Evaluation, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    """A call is replaced by its function: kernels have no calls."""
    called = eqn.params.get("call_jaxpr", eqn.params.get("jaxpr"))
    return body.evaluate(called, operands)


@rule("cond")
def _cond(body: Evaluation, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    which, *values = operands
    branches = [_branch(body, jaxpr, values) for jaxpr in eqn.params["branches"]]
    if not _jax.is_tracer(which):
        return branches[int(which)]()
    with _jax.trace_without_ref_rules():
        if len(branches) == 2:
            return lax.cond(which != 0, branches[1], branches[0])
        return lax.switch(which, branches)


def _branch(
    body: Evaluation, jaxpr: Any, values: Sequence[Any]
) -> Callable[[], list[Any]]:
    return lambda: body.evaluate(jaxpr, values)


@rule("scan")
def _scan(body: Evaluation, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    n_consts, n_carry = _jax.scan_arity(eqn.params)
    consts = operands[:n_consts]
    init, xs = operands[n_consts:][:n_carry], operands[n_consts + n_carry :]
    _require_values(init, "scan")

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        results = body.evaluate(eqn.params["jaxpr"], [*consts, *carry, *x])
        return results[:n_carry], results[n_carry:]

    with _jax.trace_without_ref_rules():
        carry, ys = lax.scan(
            step,
            _arrays(init),
            xs,
            length=eqn.params["length"],
            reverse=eqn.params["reverse"],
            unroll=eqn.params["unroll"],
        )
    return [*carry, *ys]


@rule("while")
def _while(body: Evaluation, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond_consts = operands[:n_cond]
    body_consts = operands[n_cond:][:n_body]
    init = operands[n_cond + n_body :]
    _require_values(init, "while")

    def condition(carry: list[Any]) -> Any:
        (result,) = body.evaluate(eqn.params["cond_jaxpr"], [*cond_consts, *carry])
        return result

    def step(carry: list[Any]) -> list[Any]:
        return body.evaluate(eqn.params["body_jaxpr"], [*body_consts, *carry])

    with _jax.trace_without_ref_rules():
        return list(lax.while_loop(condition, step, _arrays(init)))


def _arrays(values: Sequence[Any]) -> list[Any]:
    return [jnp.asarray(x) for x in values]


def _require_values(carry: Sequence[Any], name: str) -> None:
    refs = [x for x in carry if types.base_aval(x) is not None]
    if refs:
        raise errors.UnsupportedError(
            f"{name}: a reference is part of a loop's carry",
            expected="values as the carry",
            got=types.describe(refs[0]),
            hint="use the reference in the loop's body without passing it",
            where=_jax.where_now(),
        )


@rule("run_scoped")
def _run_scoped(body: Evaluation, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    jaxpr = eqn.params["jaxpr"]
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    declared = [scratch.declaration(var.aval) for var in jaxpr.invars]

    def with_refs(*refs: Any) -> list[Any]:
        return body.evaluate(_jax.convert_constvars_jaxpr(jaxpr), [*operands, *refs])

    names = scratch.names(jaxpr, len(declared))
    axes = tuple(eqn.params["collective_axes"])
    return list(scoped(with_refs, declared, {}, axes, names))

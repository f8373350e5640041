# SPDX-License-Identifier: Apache-2.0
"""Branches, loops and scopes in received bodies."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from jax import lax

from pallas_gpu import _jax, errors, types
from pallas_gpu.bridge import scratch
from pallas_gpu.bridge.rules import rule
from pallas_gpu.entry.scoped import scoped
from pallas_gpu.program.rewrite import Retrace


@rule("cond")
def _cond(body: Retrace, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    """References are closed over, not operands: a block is a view of a ring."""
    which, *values = operands
    branches = [
        functools.partial(body.run, jaxpr, values) for jaxpr in eqn.params["branches"]
    ]
    if not _jax.is_tracer(which):
        return branches[int(which)]()
    if len(branches) == 2:
        return lax.cond(which != 0, branches[1], branches[0])
    return lax.switch(which, branches)


def require_values(eqn: _jax.JaxprEqn, operands: Sequence[Any]) -> None:
    """Raises UnsupportedError for a loop whose carry has a reference."""
    match eqn.primitive.name:
        case "scan":
            n_consts, n_carry = _jax.scan_arity(eqn.params)
            carry = operands[n_consts : n_consts + n_carry]
        case "while":
            carry = operands[len(operands) - len(eqn.outvars) :]
        case _:
            return
    refs = [x for x in carry if types.base_aval(x) is not None]
    if refs:
        raise errors.UnsupportedError(
            f"{eqn.primitive.name}: a reference is part of a loop's carry",
            expected="values as the carry",
            got=types.describe(refs[0]),
            hint="use the reference in the loop's body without passing it",
        )


@rule("run_scoped")
def _run_scoped(body: Retrace, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    jaxpr = eqn.params["jaxpr"]
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    declared = [scratch.declaration(var.aval) for var in jaxpr.invars]

    def with_refs(*refs: Any) -> list[Any]:
        return body.run(_jax.convert_constvars_jaxpr(jaxpr), [*operands, *refs])

    names = scratch.names(jaxpr, len(declared))
    axes = tuple(eqn.params["collective_axes"])
    return list(scoped(with_refs, declared, {}, axes, names))

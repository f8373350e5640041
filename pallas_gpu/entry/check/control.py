# SPDX-License-Identifier: Apache-2.0
"""Loops: their carries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pallas_gpu import _jax, errors, types
from pallas_gpu.primitives import _registry as registry


@registry.checks(_jax.primitive_by_name("scan"))
def _check_scan(eqn: _jax.JaxprEqn, mesh: types.Mesh) -> None:
    consts, carries = _jax.scan_arity(eqn.params)
    body = eqn.params["jaxpr"].jaxpr
    carried = body.invars[consts : consts + carries]
    _check_carried_refs(carried, body.outvars[:carries])


@registry.checks(_jax.primitive_by_name("while"))
def _check_while(eqn: _jax.JaxprEqn, mesh: types.Mesh) -> None:
    body, consts = eqn.params["body_jaxpr"].jaxpr, eqn.params["body_nconsts"]
    _check_carried_refs(body.invars[consts:], body.outvars)


def _check_carried_refs(before: Sequence[Any], after: Sequence[Any]) -> None:
    for old, new in zip(before, after, strict=True):
        if isinstance(old.aval, _jax.AbstractRef) and new is not old:
            raise errors.UnsupportedError(
                "a loop changes which reference it carries",
                expected="the same reference in each iteration",
                got=f"a reference other than the initial {types.describe(old.aval)}",
                hint="index one reference with the loop's counter",
            )

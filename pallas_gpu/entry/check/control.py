# SPDX-License-Identifier: Apache-2.0
"""Loops: their carries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pallas_gpu import _jax, errors, types
from pallas_gpu.primitives import _registry as registry


@registry.checks(_jax.primitive_by_name("scan"))
def _check_scan(eqn: _jax.JaxprEqn, mesh: types.Mesh) -> None:
    """Checks a scan: arrays to slice or stack have no registers."""
    consts, carries = _jax.scan_arity(eqn.params)
    sliced, stacked = len(eqn.invars) - consts - carries, len(eqn.outvars) - carries
    if sliced or stacked:
        raise errors.UnsupportedError(
            "lax.scan over arrays is not supported in a kernel",
            expected="a loop that carries values: lax.fori_loop, plgpu.loop",
            got=f"a scan with {sliced} arrays to slice and {stacked} to stack",
            hint="index a reference with the loop's counter",
        )
    body = eqn.params["jaxpr"].jaxpr
    _check_carried_refs(body.invars[consts:], body.outvars)
    length, unroll = eqn.params["length"], int(eqn.params["unroll"])
    if length % max(unroll, 1):
        raise errors.UnsupportedError(
            "a loop's unroll does not divide its length",
            expected=f"a divisor of {length}",
            got=unroll,
            hint="choose another unroll",
        )


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


@registry.checks(_jax.primitive_by_name("platform_index"))
def _check_platforms(eqn: _jax.JaxprEqn, mesh: types.Mesh) -> None:
    if _jax.code_for_cuda(eqn) is not None:
        return
    raise errors.UnsupportedError(
        "lax.platform_dependent has no code for CUDA",
        expected="cuda=, or default=",
        got=", ".join(name for names in eqn.params["platforms"] for name in names),
        hint="pass default=",
    )

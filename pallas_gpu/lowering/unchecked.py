# SPDX-License-Identifier: Apache-2.0
"""Kernels without their `debug_check`s, and without what only those read."""

from __future__ import annotations

from typing import Any

from pallas_gpu import _jax
from pallas_gpu.primitives.debug import debug_check_p
from pallas_gpu.primitives.indexed import load_indexed_p
from pallas_gpu.primitives.registers import load_p
from pallas_gpu.walk import walk

# Reads that nobody would miss: their effect only keeps JAX from moving them.
_READS = (_jax.get_p, load_p, load_indexed_p)


def without_checks(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Returns a body without checks, and without the equations that only they use."""
    if not any(site.eqn.primitive is debug_check_p for site in walk(jaxpr)):
        return jaxpr
    return _stripped(jaxpr, {})


def _stripped(jaxpr: _jax.Jaxpr, done: dict[_jax.Jaxpr, _jax.Jaxpr]) -> _jax.Jaxpr:
    # A function that is called twice stays one jaxpr: its scopes are allocated once.
    if jaxpr not in done:
        done[jaxpr] = jaxpr.replace(eqns=_kept(jaxpr, done))
    return done[jaxpr]


def _kept(jaxpr: _jax.Jaxpr, done: dict[_jax.Jaxpr, _jax.Jaxpr]) -> list[Any]:
    used = {v for v in jaxpr.outvars if not isinstance(v, _jax.Literal)}
    kept = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.primitive is debug_check_p or _is_unused(eqn, used):
            continue
        params = {name: _without(value, done) for name, value in eqn.params.items()}
        kept.append(eqn.replace(params=params))
        used |= {v for v in eqn.invars if not isinstance(v, _jax.Literal)}
    return kept[::-1]


def _is_unused(eqn: _jax.JaxprEqn, used: set[Any]) -> bool:
    only_computes = not eqn.effects or eqn.primitive in _READS
    return only_computes and not used.intersection(eqn.outvars)


def _without(param: Any, done: dict[_jax.Jaxpr, _jax.Jaxpr]) -> Any:
    if isinstance(param, _jax.ClosedJaxpr):
        return param.replace(jaxpr=_stripped(param.jaxpr, done))
    if isinstance(param, _jax.Jaxpr):
        return _stripped(param, done)
    if isinstance(param, tuple | list):
        inner = [_without(x, done) for x in param]
        same = all(a is b for a, b in zip(inner, param, strict=True))
        return param if same else type(param)(inner)
    return param

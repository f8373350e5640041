# SPDX-License-Identifier: Apache-2.0
"""References of JAX that a kernel's body closes over become references in GMEM.

The body is traced before it is known that it uses them, so that its jaxpr has plain
references, also as inputs of the jaxprs of its loops, branches and functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pallas_gpu import _jax, types
from pallas_gpu.walk import bodies, with_bodies


def in_gmem(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Returns a jaxpr in which the references among its constants are in GMEM."""
    refs = [v for v in jaxpr.constvars if isinstance(v.aval, _jax.AbstractRef)]
    return _retyped(jaxpr, {v: _gmem_var(v) for v in refs}, {}) if refs else jaxpr


def _gmem_var(var: _jax.Var) -> _jax.Var:
    return _jax.Var(types.KernelRef(var.aval.inner_aval, types.GMEM))


def _retyped(
    jaxpr: _jax.Jaxpr, new: Mapping[Any, _jax.Var], known: dict[Any, _jax.Jaxpr]
) -> _jax.Jaxpr:
    """Replaces variables, and those of inner jaxprs that stand for the same reference.

    Args:
      jaxpr: the jaxpr.
      new: its variables that are replaced.
      known: inner jaxprs that are done. A function that is called twice stays one, as
        its scopes are allocated once.
    """
    now = dict(new)

    def renamed(variables: Any) -> list[Any]:
        return [x if isinstance(x, _jax.Literal) else now.get(x, x) for x in variables]

    eqns = []
    for eqn in jaxpr.eqns:
        if any(not isinstance(x, _jax.Literal) and x in now for x in eqn.invars):
            eqn = _equation(eqn, now, known)
            eqn = eqn.replace(
                invars=renamed(eqn.invars),
                outvars=renamed(eqn.outvars),
                effects=_jax.effects_on(eqn.effects, now),
            )
        eqns.append(eqn)
    return jaxpr.replace(
        constvars=renamed(jaxpr.constvars),
        invars=renamed(jaxpr.invars),
        outvars=renamed(jaxpr.outvars),
        eqns=eqns,
        effects=_jax.effects_on(jaxpr.effects, now),
        consts=jaxpr.consts,
    )


def _equation(eqn: Any, now: dict[Any, _jax.Var], known: dict[Any, Any]) -> Any:
    """Replaces the jaxprs of an equation; adds the references it returns to `now`."""
    inner = {}
    for body in bodies(eqn):
        passed = {
            var: _gmem_var(var)
            for var, operand in zip(body.jaxpr.invars, body.inputs, strict=True)
            if isinstance(operand, _jax.Var) and operand in now
        }
        key = body.jaxpr, tuple(var in passed for var in body.jaxpr.invars)
        if key not in known:
            known[key] = _retyped(body.jaxpr, passed, known)
        inner[body.jaxpr] = known[key]
    for result in eqn.outvars:
        if type(result.aval) is _jax.AbstractRef:
            now[result] = _gmem_var(result)
    return with_bodies(eqn, inner)

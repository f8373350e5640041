# SPDX-License-Identifier: Apache-2.0
"""`get_global`: what bodies ask for becomes scratch memory of the whole kernel."""

from __future__ import annotations

from typing import Any

from pallas_gpu import _jax, errors
from pallas_gpu.entry.scoped import scoped
from pallas_gpu.primitives.scoped import get_global_p
from pallas_gpu.program.bodies import bodies, equations
from pallas_gpu.program.rewrite import Retrace, at_line_of, is_followed
from pallas_gpu.sparsecore.types import declaration


class _Bound(Retrace):
    """A body whose requests have references."""

    def __init__(self, refs: dict[Any, Any]):
        super().__init__()
        self._refs = refs

    def is_replaced(self, eqn: _jax.JaxprEqn) -> bool:
        return eqn.primitive is get_global_p

    def results(self, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any] | None:
        if self.is_replaced(eqn):
            return [self._refs[eqn.outvars[0]]]
        if not is_followed(eqn) and any(map(self.replaces_in, _inner(eqn))):
            raise errors.UnsupportedError(
                f"get_global in a {eqn.primitive.name}",
                expected="a call outside of it",
                got="a call in its body",
                hint="the memory is the same for all iterations: call it before",
            )
        return None


def _inner(eqn: _jax.JaxprEqn) -> list[Any]:
    return [body.jaxpr for body in bodies(eqn)]


def allocated(jaxpr: _jax.Jaxpr, axes: Any) -> _jax.Jaxpr:
    """Returns a body in a scope with an array, or semaphores, for each request."""
    asked = [e for e in equations(jaxpr) if e.primitive is get_global_p]
    found = {eqn.outvars[0]: eqn for eqn in asked}
    if not found:
        return jaxpr
    whats = [declaration(eqn.params["what"]) for eqn in found.values()]

    def again(*given: Any) -> None:
        def within(*refs: Any) -> None:
            _Bound(dict(zip(found, refs, strict=True))).run(jaxpr, given)

        with at_line_of(asked[0]):
            scoped(within, whats, {}, (), ["get_global"] * len(whats))

    avals = [v.aval.update() for v in jaxpr.invars]
    return _jax.trace(again, avals, axes)[0].jaxpr

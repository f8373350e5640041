# SPDX-License-Identifier: Apache-2.0
"""Memory that a body asks for by a call: `get_global`, `jax.empty_ref`.

Either becomes a scope, around the body or around the rest of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pallas_gpu import _jax, errors
from pallas_gpu.entry.scoped import scoped
from pallas_gpu.primitives.scoped import get_global_p
from pallas_gpu.program.bodies import bodies, equations
from pallas_gpu.program.rewrite import Retrace, at_line_of, is_followed

_EMPTY_REF = "empty_ref"  # JAX's


class _Scopes(Retrace):
    """A body whose requests have references.

    Args:
      refs: those of `get_global`, by the variables of its calls.
      declared: see `allocated`.
    """

    def __init__(self, refs: dict[Any, Any], declared: Callable[[Any], Any]):
        super().__init__()
        self._refs, self._declared = refs, declared

    def is_replaced(self, eqn: _jax.JaxprEqn) -> bool:
        return eqn.primitive is get_global_p or eqn.primitive.name == _EMPTY_REF

    def results(self, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any] | None:
        if self.is_replaced(eqn):
            return [self._refs[eqn.outvars[0]]]
        inner = (each for body in bodies(eqn) for each in equations(body.jaxpr))
        asked = next(filter(self.is_replaced, inner), None)
        if asked is not None and not is_followed(eqn):
            raise errors.UnsupportedError(
                f"{asked.primitive.name} in a {eqn.primitive.name}",
                expected="a call outside of it",
                got="a call in its body",
                hint="allocate the memory before: its iterations overlap",
            )
        return None

    def evaluated(self, listed: Any, known: dict[Any, Any], outs: Any) -> list[Any]:
        names = [eqn.primitive.name for eqn in listed]
        if _EMPTY_REF not in names:
            return super().evaluated(listed, known, outs)
        at = names.index(_EMPTY_REF)
        self.evaluate(listed[:at], known)
        (var,) = listed[at].outvars

        def within(ref: Any) -> list[Any]:
            return self.evaluated(listed[at + 1 :], {**known, var: ref}, outs)

        with at_line_of(listed[at]):
            return scoped(within, [self._declared(listed[at])], names=[_EMPTY_REF])


def allocated(
    jaxpr: _jax.Jaxpr,
    consts: Sequence[Any],
    axes: Any,
    declared: Callable[[Any], Any],
) -> _jax.Jaxpr:
    """Returns a body in which scopes allocate what is asked for.

    Args:
      jaxpr: the body.
      consts: what stands for its constants.
      axes: with which it is traced.
      declared: returns the declaration for a call's equation, or raises.
    """
    if not consts and not _Scopes({}, declared).replaces_in(jaxpr):
        return jaxpr
    asked = [e for e in equations(jaxpr) if e.primitive is get_global_p]
    found = {eqn.outvars[0]: eqn for eqn in asked}

    def again(*given: Any) -> None:
        def within(*refs: Any) -> None:
            scopes = _Scopes(dict(zip(found, refs, strict=True)), declared)
            scopes.run(jaxpr, given, consts)

        if not found:
            within()
            return
        with at_line_of(asked[0]):
            whats = list(map(declared, found.values()))
            scoped(within, whats, names=["get_global"] * len(whats))

    avals = [v.aval.update() for v in jaxpr.invars]
    return _jax.trace(again, avals, axes)[0].jaxpr

# SPDX-License-Identifier: Apache-2.0
"""The one iterator over the equations of a jaxpr, those of nested jaxprs included.

Checks, planner and lowering all visit a kernel's equations in this order: depth first,
each equation before those of the jaxprs that it runs.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pallas_gpu import _jax


@dataclasses.dataclass(frozen=True)
class Body:
    """A jaxpr that an equation runs.

    Attributes:
      jaxpr: the jaxpr, open.
      inputs: for each of its inputs the corresponding operand, the initial value for a
        loop's carry; None for what the equation creates, such as the references that a
        scope allocates, and where unknown.
    """

    jaxpr: _jax.Jaxpr
    inputs: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Site:
    """An equation and its context in the walk.

    Attributes:
      eqn: the equation.
      enclosing: the sites of the equations that run it, outermost first.
      within: the jaxprs around it, outermost first, without the walked one.
      origins: for inputs of the equation's jaxpr, the corresponding outer variables.
      bodies: the jaxprs that the equation runs.
    """

    eqn: _jax.JaxprEqn
    enclosing: tuple[Site, ...]
    within: tuple[_jax.Jaxpr, ...]
    origins: Mapping[Any, Any]
    bodies: Sequence[Body]

    @property
    def where(self) -> str | None:
        """The line of the equation, or of the innermost enclosing call that has one.

        Functions of jax.numpy are jitted: their equations have no line of the kernel's.
        """
        lines = (_jax.where(site.eqn) for site in (self, *reversed(self.enclosing)))
        return next((line for line in lines if line is not None), None)

    def origin(self, atom: Any) -> Any:
        """Returns the variable in the outermost jaxpr to which a variable corresponds.

        For a reference, that is an input of the walked jaxpr, or of the scope that
        allocates it: loops and branches pass references unchanged.
        """
        return atom if isinstance(atom, _jax.Literal) else self.origins.get(atom, atom)


def bodies(eqn: _jax.JaxprEqn) -> list[Body]:
    """Returns the jaxprs that an equation runs."""
    operands = list(eqn.invars)
    if eqn.primitive.name == "while":
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        carry = operands[n_cond + n_body :]
        consts = operands[n_cond : n_cond + n_body]
        return [
            _body(eqn.params["cond_jaxpr"].jaxpr, [*operands[:n_cond], *carry]),
            _body(eqn.params["body_jaxpr"].jaxpr, [*consts, *carry]),
        ]
    if eqn.primitive.name == "cond":
        operands = operands[1:]
    elif eqn.primitive.name == "scan":
        operands = operands[: sum(_jax.scan_arity(eqn.params))]
    return [_body(inner, operands) for inner in _jax.jaxprs_in_params(eqn.params)]


def _body(jaxpr: _jax.Jaxpr, operands: Sequence[Any]) -> Body:
    made = len(jaxpr.invars) - len(operands)
    if made < 0:  # a primitive unknown to this module, which encloses a kernel
        return Body(jaxpr, (None,) * len(jaxpr.invars))
    return Body(jaxpr, (*operands, *(None,) * made))


# A site does not refer to the walked jaxpr, so that its entry disappears with it.
_WALKS: weakref.WeakKeyDictionary[_jax.Jaxpr, tuple[Site, ...]]
_WALKS = weakref.WeakKeyDictionary()


def walk(jaxpr: _jax.Jaxpr) -> tuple[Site, ...]:
    """Returns the equations of a jaxpr and of all that they run, in order."""
    result = _WALKS.get(jaxpr)
    if result is None:
        result = _WALKS[jaxpr] = tuple(_visit(jaxpr, (), (), {}))
    return result


def _visit(
    jaxpr: _jax.Jaxpr,
    enclosing: tuple[Site, ...],
    within: tuple[_jax.Jaxpr, ...],
    outer: Mapping[Any, Any],
) -> Iterator[Site]:
    origins = dict(outer)
    for eqn in jaxpr.eqns:
        site = Site(eqn, enclosing, within, origins, bodies(eqn))
        yield site
        for body in site.bodies:
            inner = {
                var: site.origin(operand)
                for var, operand in zip(body.jaxpr.invars, body.inputs, strict=True)
                if operand is not None
            }
            around = (*enclosing, site), (*within, body.jaxpr)
            yield from _visit(body.jaxpr, *around, inner)
        origins |= _carried_references(site)


def _carried_references(site: Site) -> dict[Any, Any]:
    """Maps the references that a loop returns to its operands, which are the same."""
    eqn = site.eqn
    match eqn.primitive.name:
        case "scan":
            n_consts, n_carry = _jax.scan_arity(eqn.params)
            carried = eqn.invars[n_consts : n_consts + n_carry]
        case "while":
            carried = eqn.invars[len(eqn.invars) - len(eqn.outvars) :]
        case _:
            return {}
    return {
        result: site.origin(operand)
        for result, operand in zip(eqn.outvars, carried, strict=False)
        if isinstance(result.aval, _jax.AbstractRef)
    }

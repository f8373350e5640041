# SPDX-License-Identifier: Apache-2.0
"""The jaxprs that equations run, and the equations in them."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from pallas_gpu import _jax


def kept[T](make: Callable[..., T]) -> Callable[..., T]:
    """Decorates a function whose results are kept as long as its first argument.

    A result must not refer to that, unless it is that.
    """
    store: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()

    @functools.wraps(make)
    def found(body: Any, *key: Hashable) -> T:
        results = store.setdefault(body, {})
        if key not in results:
            result = make(body, *key)
            results[key] = _ITSELF if result is body else result
        return body if results[key] is _ITSELF else results[key]

    return found


# A body that its own entry holds would stay for ever.
_ITSELF = object()


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
    elif eqn.primitive.name in ("scan", "parallel_loop", "staged_loop"):
        operands = operands[: sum(_jax.scan_arity(eqn.params))]
    return [_body(inner, operands) for inner in _jax.jaxprs_in_params(eqn.params)]


def _body(jaxpr: _jax.Jaxpr, operands: Sequence[Any]) -> Body:
    made = len(jaxpr.invars) - len(operands)
    if made < 0:  # a primitive unknown to this module, which encloses a kernel
        return Body(jaxpr, (None,) * len(jaxpr.invars))
    return Body(jaxpr, (*operands, *(None,) * made))


@kept
def equations(jaxpr: _jax.Jaxpr) -> tuple[_jax.JaxprEqn, ...]:
    """Returns the equations of a jaxpr, each before those of what it runs."""
    found: list[_jax.JaxprEqn] = []
    for eqn in jaxpr.eqns:
        found.append(eqn)
        for body in bodies(eqn):
            found += equations(body.jaxpr)
    return tuple(found)


class Equations:
    """The equations of one body, and which of them make and read its variables.

    Attributes:
      listed: the equations.
      made: for each variable that an equation makes, the position of that equation.
    """

    def __init__(self, jaxpr: _jax.Jaxpr):
        self.listed = list(jaxpr.eqns)
        self.made = {v: i for i, eqn in enumerate(self.listed) for v in eqn.outvars}
        self._readers: dict[Any, list[int]] = {}
        reading = [*(eqn.invars for eqn in self.listed), jaxpr.outvars]
        for i, atoms in enumerate(reading):
            for x in atoms:
                if not isinstance(x, _jax.Literal):
                    self._readers.setdefault(x, []).append(i)

    def readers(self, var: Any) -> list[int]:
        """Returns the positions that read a variable; a result is read at the end."""
        return self._readers.get(var, [])

    def position(self, atom: Any) -> int | None:
        """Returns the position of the equation that makes a value, None without one."""
        return None if isinstance(atom, _jax.Literal) else self.made.get(atom)


def line_of_use(jaxpr: _jax.Jaxpr, var: Any) -> str | None:
    """Returns the first line that uses a variable, also in what the jaxpr runs.

    Functions of jax.numpy are jitted: their equations have no line of the kernel's.
    """
    passed = None
    for eqn in jaxpr.eqns:
        if not any(operand is var for operand in eqn.invars):
            continue
        inside = bodies(eqn)
        if not inside:
            return _jax.where(eqn)
        for body in inside:
            for inner, operand in zip(body.jaxpr.invars, body.inputs, strict=True):
                line = line_of_use(body.jaxpr, inner) if operand is var else None
                if line is not None:
                    return line
        passed = passed or _jax.where(eqn)
    return passed

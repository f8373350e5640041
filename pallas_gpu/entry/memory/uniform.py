# SPDX-License-Identifier: Apache-2.0
"""Scalars of a kernel that depend on the index of the warpgroup alone."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pallas_gpu import _jax, walk

# A body that runs at a site, or that of the kernel.
Context = tuple[walk.Site | None, _jax.Jaxpr]

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "min": min,
    "max": max,
    "convert_element_type": int,
    "clamp": lambda low, x, high: min(max(x, low), high),
}
_LOGICAL: dict[str, Callable[..., Any]] = {
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "not": operator.not_,
}


class Values:
    """The scalars that are known in one warpgroup.

    Args:
      tree: the sites of each body of the kernel.
      axis_name: the name of the axis of warpgroups, if it has one.
      warpgroup: the index.
    """

    def __init__(
        self,
        tree: Mapping[Context, Sequence[walk.Site]],
        axis_name: Any,
        warpgroup: int,
    ):
        self._tree = tree
        self._axis_name = axis_name
        self._warpgroup = warpgroup
        self._makers: dict[Context, dict[Any, walk.Site]] = {}
        self._known: dict[tuple[Context, Any], int | None] = {}

    def of_operand(self, site: walk.Site, atom: Any) -> int | None:
        """Returns the value of a scalar operand of a site; None if it is not known."""
        return self._value(self._context(site), atom)

    def _context(self, site: walk.Site) -> Context:
        if not site.enclosing:
            return None, self._root
        return site.enclosing[-1], site.within[-1]

    @property
    def _root(self) -> _jax.Jaxpr:
        return next(body for parent, body in self._tree if parent is None)

    def _value(self, context: Context, atom: Any) -> int | None:
        if isinstance(atom, _jax.Literal):
            return _number(atom.val, atom.aval)
        key = context, atom
        if key not in self._known:
            self._known[key] = self._compute(context, atom)
        return self._known[key]

    def _compute(self, context: Context, var: Any) -> int | None:
        if context not in self._makers:
            self._makers[context] = {
                out: site
                for site in self._tree.get(context, ())
                for out in site.eqn.outvars
            }
        maker = self._makers[context].get(var)
        if maker is None:
            return self._input(context, var)
        eqn = maker.eqn
        name = eqn.primitive.name
        if name == "axis_index":
            own = eqn.params["axis_name"] == self._axis_name
            return self._warpgroup if own and self._axis_name is not None else None
        if name in ("jit", "pjit"):
            (body,) = maker.bodies
            result = body.jaxpr.outvars[list(eqn.outvars).index(var)]
            return self._value((maker, body.jaxpr), result)
        return self._result(name, context, eqn)

    def _result(self, name: str, context: Context, eqn: _jax.JaxprEqn) -> int | None:
        logical = name in _LOGICAL
        function = (_LOGICAL if logical else _FUNCTIONS).get(name)
        (out,) = eqn.outvars if len(eqn.outvars) == 1 else (None,)
        if function is None or out is None or getattr(out.aval, "shape", None) != ():
            return None
        if logical and out.aval.dtype != bool:
            return None
        operands = [self._value(context, atom) for atom in eqn.invars]
        if any(x is None for x in operands):
            return None
        return _number(function(*operands), out.aval)

    def _input(self, context: Context, var: Any) -> int | None:
        """The value of an input of a body, if it is the same in all iterations."""
        site, jaxpr = context
        if site is None:
            return None
        body = next(body for body in site.bodies if body.jaxpr is jaxpr)
        if var not in body.jaxpr.invars:
            return None
        position = list(body.jaxpr.invars).index(var)
        operand = body.inputs[position]
        if operand is None or position >= _invariant(site.eqn, body):
            return None
        return self._value(self._context(site), operand)


def _invariant(eqn: _jax.JaxprEqn, body: walk.Body) -> int:
    """Returns how many inputs of a body are the same in all iterations."""
    match eqn.primitive.name:
        case "scan":
            return _jax.scan_arity(eqn.params)[0]
        case "while":
            is_body = body.jaxpr is eqn.params["body_jaxpr"].jaxpr
            return eqn.params["body_nconsts" if is_body else "cond_nconsts"]
    return len(body.jaxpr.invars)


def _number(value: Any, aval: Any) -> int | None:
    """Returns a scalar integer or bool within its type, else None."""
    if getattr(aval, "shape", None) != () or aval.dtype.kind not in "iub":
        return None
    number = int(value)
    if aval.dtype == bool:
        return number
    bits = 8 * aval.dtype.itemsize
    low = -(1 << (bits - 1)) if aval.dtype.kind == "i" else 0
    return number if low <= number < low + (1 << bits) else None

# SPDX-License-Identifier: Apache-2.0
"""The variables of a kernel on which its indices depend.

JAX's integers wrap, and an index that has wrapped is out of bounds or, after a
division, silently another one. What can be shown to wrap is an error of the trace; the
emulator reports the rest. Bitwise operations end the search: what they compute from may
be a hash, which wraps on purpose; so do selections, which may drop what has wrapped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import _jax, errors
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.walk import Site, walk

# Operations whose result wraps if it is too large.
WRAPPING = ("add", "sub", "mul", "neg")
# Operations of which an index that depends on the result depends on the operands.
_PASSING = (*WRAPPING, "div", "rem", "max", "min", "convert_element_type", "copy")
# Functions of jax.numpy that do, whatever they consist of.
_PASSING_CALLS = ("floor_divide", "remainder")

Marks = Mapping[_jax.Jaxpr, frozenset[Any]]

# Of the kernels that the emulator has run.
_MARKED: weakref.WeakKeyDictionary[_jax.Jaxpr, frozenset[Any]] = (
    weakref.WeakKeyDictionary()
)


def overflow(what: str, got: Any, where: str | None) -> errors.OutOfBoundsError:
    """Returns the error for an index that does not fit its type."""
    return errors.OutOfBoundsError(
        f"the computation of an index overflows {what}",
        expected="results that fit: indices of references have 32 bits",
        got=got,
        hint="divide before you multiply, or use an axis of the grid for each "
        "dimension of the array",
        where=where,
    )


def mark(jaxpr: _jax.Jaxpr) -> None:
    """Finds the variables of a kernel that indices depend on, for `is_index`."""
    if jaxpr not in _MARKED:
        for body, found in find(jaxpr, lambda site: True).items():
            # A jitted function may be a part of several kernels.
            _MARKED[body] = _MARKED.get(body, frozenset()) | found


def is_index(jaxpr: _jax.Jaxpr, var: Any) -> bool:
    """True if an index depends on a variable of a marked kernel's jaxpr."""
    return var in _MARKED.get(jaxpr, ())


def find(jaxpr: _jax.Jaxpr, counts: Callable[[Site], bool]) -> Marks:
    """Returns the variables that indices depend on, by jaxpr.

    Args:
      jaxpr: the body of a kernel.
      counts: whether the indices of an equation count.
    """
    sites = walk(jaxpr)
    found: set[Any] = set()
    for site in sites:
        if counts(site):
            found |= _indices(site.eqn)
    size = -1
    while len(found) != size:
        size = len(found)
        for site in reversed(sites):
            _propagate(site, found)
    marks: dict[_jax.Jaxpr, set[Any]] = {}
    for site in sites:
        inside = site.within[-1] if site.within else jaxpr
        marks.setdefault(inside, set()).update(found.intersection(site.eqn.outvars))
    return {key: frozenset(value) for key, value in marks.items()}


def _indices(eqn: _jax.JaxprEqn) -> set[Any]:
    """Returns the variables among the indices of an equation's references."""
    if eqn.primitive in (_jax.get_p, _jax.swap_p, _jax.addupdate_p):
        return _integers(eqn.invars[1 if eqn.primitive is _jax.get_p else 2 :])
    tree = eqn.params.get("tree")
    if tree is None or tree.num_leaves != len(eqn.invars):
        return set()
    named = ops.unflatten(tree, list(eqn.invars))
    operands = jax.tree.leaves(named, is_leaf=lambda x: isinstance(x, ops.RefOperand))
    steps = [x.transforms for x in operands if isinstance(x, ops.RefOperand)]
    # An access under a mask may compute indices that it does not use.
    unmasked = isinstance(named, dict) and named.get("mask") is None
    steps += [named["indices"]] if unmasked and "indices" in named else []
    return _integers(jax.tree.leaves(steps))


def _integers(atoms: Sequence[Any]) -> set[Any]:
    """Returns the variables of signed integer scalars."""
    return {x for x in atoms if isinstance(x, _jax.Var) and is_integer(x.aval)}


def is_integer(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    scalar = getattr(aval, "shape", None) == () and dtype is not None
    return scalar and jnp.issubdtype(dtype, jnp.signedinteger)


def _propagate(site: Site, found: set[Any]) -> None:
    """Adds the variables on which those that were found depend, by one equation."""
    eqn = site.eqn
    for body in site.bodies:
        inner = zip(body.jaxpr.invars, body.inputs, strict=True)
        found |= _integers([x for var, x in inner if var in found])
    results = [i for i, var in enumerate(eqn.outvars) if var in found]
    if eqn.primitive.name in _PASSING or eqn.params.get("name") in _PASSING_CALLS:
        found |= _integers(eqn.invars) if results else set()
    for body in site.bodies:
        ends = body.jaxpr.outvars
        carries = carried(eqn, body.jaxpr)
        if len(ends) == len(eqn.outvars):
            found |= _integers([ends[i] for i in results])
        found |= _integers(
            [ends[j] for i, j in carries if body.jaxpr.invars[i] in found]
        )


def carried(eqn: _jax.JaxprEqn, body: _jax.Jaxpr) -> list[tuple[int, int]]:
    """Returns pairs (input, result) of a loop's body that are one carry."""
    match eqn.primitive.name:
        case "scan":
            consts, carries = _jax.scan_arity(eqn.params)
            return [(consts + i, i) for i in range(carries)]
        case "while" if body is eqn.params["body_jaxpr"].jaxpr:
            consts = eqn.params["body_nconsts"]
            return [(consts + i, i) for i in range(len(body.outvars))]
    return []

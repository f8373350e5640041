# SPDX-License-Identifier: Apache-2.0
"""Results and SMEM to which nothing is stored, and elements that all CTAs store."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax

from pallas_gpu import _jax, types
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives._accesses import accesses
from pallas_gpu.walk import Site, walk

# By these CTAs take turns: what each stores then follows what the others have stored.
_ORDERING = ("atomics", "semaphore")
# An equation in another one, such as a branch, may run in some CTAs only.
_RUNS_ITS_BODY = ("run_scoped", "jit", "pjit", "scan")


def unwritten(jaxpr: _jax.Jaxpr, refs: Collection[Any]) -> list[Any]:
    """Returns the references that no equation writes, not even in a branch.

    Args:
      jaxpr: the traced body of a kernel.
      refs: references among its inputs.
    """
    written = _may_write(list(walk(jaxpr)))
    return [ref for ref in refs if ref not in written]


def read_unwritten(jaxpr: _jax.Jaxpr) -> Iterator[tuple[str, Any, Site]]:
    """Yields SMEM arrays that are read and that no equation writes.

    Those of a union are left out: the others in it may be written.

    Yields:
      Name and type of the array, and the equation that reads it first.
    """
    sites = list(walk(jaxpr))
    declared = {
        var: name
        for site in sites
        if site.eqn.primitive.name == "run_scoped"
        for body in site.bodies
        for var, name in _allocated(body, site.eqn.params["names"])
        if getattr(var.aval, "memory_space", None) is types.SMEM
        and var.aval.storage.overlay is None
    }
    missing = declared.keys() - _may_write(sites)
    for site in sites if missing else ():
        for access in accesses(site.eqn):
            var = site.origin(access.ref)
            if access.reads and var in missing:
                missing.remove(var)
                yield declared[var], var.aval, site


def _allocated(body: Any, names: Sequence[str]) -> Iterator[tuple[Any, str]]:
    """Yields the references that a scope allocates, with their names."""
    own = [
        var
        for var, given in zip(body.jaxpr.invars, body.inputs, strict=True)
        if given is None
    ]
    return zip(own, names, strict=False)


def _may_write(sites: Sequence[Site]) -> set[Any]:
    """Returns references that are written, or given to what may write them."""
    found: set[Any] = set()
    for site in sites:
        written = [x.ref for x in accesses(site.eqn) if x.writes]
        if registry.operation(site.eqn.primitive) is None:
            passed = {id(x) for body in site.bodies for x in body.inputs}
            written += [x for x in site.eqn.invars if id(x) not in passed]
        origins = map(site.origin, written)
        found |= {x for x in origins if isinstance(x, _jax.Var)}
    return found


@dataclasses.dataclass(frozen=True)
class CommonStore:
    """A store of each CTA to the same elements of a result.

    Attributes:
      ref: the reference to the result.
      stored: what is stored: an array, or the reference that is copied.
      site: the equation.
    """

    ref: Any
    stored: Any
    site: Site

    def differs(self, jaxpr: _jax.Jaxpr, axes: Collection[str]) -> bool:
        """Whether what is stored is computed from the position on some axes."""
        stored, enclosing = self.site.origin(self.stored), self.site.enclosing
        if not isinstance(stored, _jax.Var):
            return False
        found = _computed_from(jaxpr, axes)
        homes = (enclosing[:depth] for depth in range(len(enclosing) + 1))
        return any((stored, home) in found for home in homes)


def common_stores(jaxpr: _jax.Jaxpr, refs: Collection[Any]) -> Iterator[CommonStore]:
    """Yields stores of which it is certain that each CTA stores the same elements.

    Their index is static, no branch is around them, and nothing orders the CTAs.

    Args:
      jaxpr: the traced body of a kernel.
      refs: references among its inputs, which all CTAs have.
    """
    sites = list(walk(jaxpr))
    if any(_family(site) in _ORDERING for site in sites):
        return
    for site in sites:
        ref, stored, indices = _stored(site.eqn)
        if ref is None or any(isinstance(i, _jax.Var) for i in indices):
            continue
        around = (outer.eqn.primitive.name for outer in site.enclosing)
        if site.origin(ref) in refs and all(name in _RUNS_ITS_BODY for name in around):
            yield CommonStore(site.origin(ref), stored, site)


def _stored(eqn: _jax.JaxprEqn) -> tuple[Any, Any, Sequence[Any]]:
    """Returns the reference that an equation overwrites, with what, and its indices."""
    match eqn.primitive.name:
        case "swap":
            return eqn.invars[0], eqn.invars[1], eqn.invars[2:]
        case "store":
            operands = ops.unflatten(eqn.params["tree"], list(eqn.invars))
            target = operands["dst"]
            return target.ref, operands["value"], jax.tree.leaves(target.transforms)
        case "copy_smem_to_gmem" if eqn.params["reduction_op"] is None:
            operands = ops.unflatten(eqn.params["tree"], list(eqn.invars))
            if operands["predicate"] is None:
                target = operands["dst"]
                indices = jax.tree.leaves(target.transforms)
                return target.ref, operands["src"].ref, indices
    return None, None, ()


def _computed_from(jaxpr: _jax.Jaxpr, axes: Collection[str]) -> set[Any]:
    """Returns what depends on a position, references by their contents.

    These are pairs of a variable and the calls that it is in: a function that is called
    twice is one jaxpr, with the same variables.
    """
    found: set[Any] = set()
    before = -1
    while len(found) > before:  # references may be written after they are read
        before, homes = len(found), dict[Any, Any]()
        for site in walk(jaxpr):
            homes |= dict.fromkeys(site.eqn.outvars, site.enclosing)
            if _depends(site, axes, found, homes):
                written = (x.ref for x in accesses(site.eqn) if x.writes)
                results = (*site.eqn.outvars, *map(site.origin, written))
                found |= {(x, homes.get(x, ())) for x in results}
    return found


def _depends(
    site: Site, axes: Collection[str], found: Collection[Any], homes: dict[Any, Any]
) -> bool:
    if site.eqn.primitive is jax.lax.axis_index_p:
        return site.eqn.params["axis_name"] in axes
    within = (*site.enclosing, site)
    inner = [(x, within) for body in site.bodies for x in body.jaxpr.outvars]
    operands = [site.origin(x) for x in site.eqn.invars]
    used = [(x, homes.get(x, ())) for x in operands if isinstance(x, _jax.Var)]
    return any(
        isinstance(x, _jax.Var) and (x, home) in found for x, home in used + inner
    )


def _family(site: Site) -> str | None:
    operation = registry.operation(site.eqn.primitive)
    return None if operation is None else operation.family

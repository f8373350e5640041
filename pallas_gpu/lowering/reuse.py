# SPDX-License-Identifier: Apache-2.0
"""SMEM that several scopes use, one after the other, and the order that this needs.

An author does not know which bytes two scopes share, so the order between their
accesses is the compiler's task: the threads of a block meet before they use bytes that
an earlier scope had. A copy may write them through the async proxy, so each thread that
has stored to them fences its stores when it leaves (PTX ISA, "Async proxy"). That is
early enough for copies of other CTAs of the cluster, too, which an arrival after the
scope admits. Asynchronous work of a scope ends in it: the emulator reports what does
not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pallas_gpu import _jax, resources, types, walk
from pallas_gpu.primitives._accesses import accesses

_LOOPS = ("scan", "while")


@dataclasses.dataclass(frozen=True)
class Reuse:
    """What is known of the scopes of a kernel, by their places.

    Attributes:
      meets: scopes that use bytes which another one, or an earlier visit, has used.
      fences: scopes whose threads store to bytes that a copy may overwrite later.
    """

    meets: frozenset[walk.Place]
    fences: frozenset[walk.Place]

    @classmethod
    def of(cls, jaxpr: _jax.Jaxpr) -> Reuse:
        """Returns it for the body of a kernel."""
        found = [site for site in resources.scopes(jaxpr) if _arrays(site)]
        stored, copied = _writers(jaxpr)
        meets, fences = set(), set()
        for site in found:
            later = _sharing(site, found)
            if later:
                meets.add(site.place)
            overwritten = any(copied.intersection(_arrays(other)) for other in later)
            if overwritten and stored.intersection(_arrays(site)):
                fences.add(site.place)
        return cls(frozenset(meets), frozenset(fences))


def _arrays(site: walk.Site) -> list[Any]:
    """Returns the variables of the arrays in SMEM that a scope allocates."""
    refs = resources.scope_refs(site.eqn)
    return [var for var in refs if var.aval.memory_space is types.SMEM]


def _writers(jaxpr: _jax.Jaxpr) -> tuple[set[Any], set[Any]]:
    """Returns the references that threads write, and those that copies write."""
    stored: set[Any] = set()
    copied: set[Any] = set()
    for site in walk.walk(jaxpr):
        for access in accesses(site.eqn):
            if access.writes and access.space is types.SMEM:
                into = copied if access.operation.asynchronous else stored
                into.add(site.origin(access.ref))
    return stored, copied


def _sharing(site: walk.Site, found: Sequence[walk.Site]) -> list[walk.Site]:
    """Returns the scopes that may use the bytes of a scope at another time.

    The arrays of scopes that enclose each other are different bytes. A scope in a loop
    is entered again; so is one of a function that is called again, which is found as
    another site of the same place.
    """
    others = [
        other
        for other in found
        if other is not site
        and site not in other.enclosing
        and other not in site.enclosing
    ]
    repeated = any(around.eqn.primitive.name in _LOOPS for around in site.enclosing)
    return [*others, site] if repeated else others

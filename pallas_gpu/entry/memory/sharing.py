# SPDX-License-Identifier: Apache-2.0
"""Which arrays and scopes of a kernel use the same bytes of SMEM.

Members of a union do, and scopes that follow each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pallas_gpu import resources, types, walk

_LOOPS = ("scan", "while")


def arrays(site: walk.Site) -> list[Any]:
    """Returns the variables of the arrays in SMEM that a scope allocates."""
    refs = resources.scope_refs(site.eqn)
    return [var for var in refs if var.aval.memory_space is types.SMEM]


def members(site: walk.Site) -> dict[Any, list[Any]]:
    """Returns for each array of a scope those that share bytes with it, and itself."""
    refs = resources.scope_refs(site.eqn)
    placed, _ = resources.place(types.SMEM, site.eqn, 0)
    ranges = {
        var: (found.offset, found.offset + found.size)
        for var, found in zip(refs, placed, strict=True)
        if found is not None
    }
    return {
        var: [x for x, (low, high) in ranges.items() if low < end and start < high]
        for var, (start, end) in ranges.items()
    }


def later_scopes(site: walk.Site, found: Sequence[walk.Site]) -> list[walk.Site]:
    """Returns the scopes that may use the bytes of a scope at another time.

    The arrays of scopes that enclose each other are different bytes. A scope in a loop
    is entered again; so is one of a function that is called again, which is found as
    another site of the same place.

    Args:
      site: the scope.
      found: all scopes with arrays in SMEM.
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

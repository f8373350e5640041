# SPDX-License-Identifier: Apache-2.0
"""SMEM that several scopes use, one after the other, and the order that this needs.

An author does not know which bytes two scopes share, so the order between their
accesses is the compiler's task: the threads of a block meet before they use bytes that
an earlier scope had. `entry.memory.fences` adds what copies to such bytes need.
Asynchronous work of a scope ends in it: the emulator reports what does not.
"""

from __future__ import annotations

from pallas_gpu import _jax, resources, walk
from pallas_gpu.entry.memory import sharing


def meets(jaxpr: _jax.Jaxpr) -> frozenset[walk.Place]:
    """Returns the scopes of a kernel that use bytes which another one has used.

    An earlier visit of the same scope counts, too.
    """
    found = [site for site in resources.scopes(jaxpr) if sharing.arrays(site)]
    return frozenset(s.place for s in found if sharing.later_scopes(s, found))

# SPDX-License-Identifier: Apache-2.0
"""Which arrays and scopes of a kernel use the same bytes of SMEM.

Members of a union do, and scopes that follow each other. An author does not know which
bytes two scopes share, so the order between their accesses is the compiler's task: the
threads of a block meet before they use bytes that an earlier scope had.
`memory.fences` adds what copies to such bytes need. Asynchronous work of a scope
ends in it: the emulator reports what does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pallas_gpu import _jax, resources, types
from pallas_gpu.program.walk import walk

_LOOPS = ("scan", "while")


def arrays(site: Any) -> list[Any]:
    """Returns the variables of the arrays in SMEM that a scope allocates."""
    refs = resources.scope_refs(site.eqn)
    return [var for var in refs if var.aval.memory_space is types.SMEM]


def members(site: Any) -> dict[Any, list[Any]]:
    """Returns for each array of a scope those that share bytes with it, and itself."""
    refs = resources.scope_refs(site.eqn)
    placed, _ = resources.place(types.SMEM, refs, 0)
    ranges = {
        var: (found.offset, found.offset + found.size)
        for var, found in zip(refs, placed, strict=True)
        if found is not None
    }
    return {
        var: [x for x, (low, high) in ranges.items() if low < end and start < high]
        for var, (start, end) in ranges.items()
    }


def later_scopes(site: Any, found: Sequence[Any]) -> list[Any]:
    """Returns the scopes that may use the bytes of a scope at another time.

    The arrays of scopes that enclose each other are different bytes. A scope in a loop
    is entered again; so is one of a function that is called again, which is found as
    another site of the same equation.

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


def meets(jaxpr: Any) -> frozenset[Any]:
    """Returns the equations of scopes that use bytes which another one has used.

    An earlier visit of the same scope counts, too.
    """
    found = [site for site in resources.scopes(jaxpr) if arrays(site)]
    return frozenset(site.eqn for site in found if later_scopes(site, found))


# --- members of unions that products read --------------------------------------------

# Families whose instructions read operands in SMEM in layouts of their own.
_TENSOR_CORES = ("wgmma", "tcgen05")


def inferred_members(
    jaxpr: _jax.Jaxpr, semantics: types.LoweringSemantics
) -> frozenset[Any]:
    """Returns the members of unions whose layout is inferred, as variables.

    A member without transforms is row-major, so that it is known what other members
    have in common with it. An operand of the tensor core cannot be: its layout is
    inferred, and its bytes mean nothing to other members.
    """
    if semantics is not types.LoweringSemantics.Warpgroup:
        return frozenset()
    found = {
        site.origin(access.buffer)
        for site in walk(jaxpr)
        for access in site.op.accesses
        if access.operation.family in _TENSOR_CORES and _is_free(access.buffer.aval)
    }
    variables = resources.arrays_of(resources.scopes(jaxpr)) if found else {}
    return frozenset(var for value, var in variables.items() if value in found)


def _is_free(aval: Any) -> bool:
    return (
        isinstance(aval, types.KernelRef)
        and aval.storage.overlay is not None
        and not aval.transforms
    )

# SPDX-License-Identifier: Apache-2.0
"""Members of unions: which ones are stored in a layout that inference chooses."""

from __future__ import annotations

from typing import Any

from pallas_gpu import _jax, resources, types
from pallas_gpu.program.walk import walk

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
    return frozenset(
        var
        for scope in (resources.scopes(jaxpr) if found else ())
        for var, made in zip(
            resources.scope_refs(scope.eqn), scope.op.made, strict=True
        )
        if made in found
    )


def _is_free(aval: Any) -> bool:
    return (
        isinstance(aval, types.KernelRef)
        and aval.storage.overlay is not None
        and not aval.transforms
    )

# SPDX-License-Identifier: Apache-2.0
"""Members of unions: which ones are stored in a layout that inference chooses."""

from __future__ import annotations

from typing import Any

from pallas_gpu import _jax, types
from pallas_gpu.primitives._accesses import accesses
from pallas_gpu.walk import walk

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
    return frozenset(
        site.origin(access.ref)
        for site in walk(jaxpr)
        for access in accesses(site.eqn)
        if access.operation.family in _TENSOR_CORES and _is_free(access.ref.aval)
    )


def _is_free(aval: Any) -> bool:
    return (
        isinstance(aval, types.KernelRef)
        and aval.storage.overlay is not None
        and not aval.transforms
    )

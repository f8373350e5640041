# SPDX-License-Identifier: Apache-2.0
"""Whole results that all CTAs of a `pallas_call` share: each stores its own part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from pallas_gpu import _jax, errors
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.walk import Site, walk

# By these CTAs take turns: what each stores then follows what the others have stored.
_ORDERING = ("atomics", "semaphore")
# An equation in another one, such as a branch, may run in some CTAs only.
_RUNS_ITS_BODY = ("run_scoped", "jit", "pjit", "scan")


def require_own_parts(jaxpr: _jax.Jaxpr, shared: Mapping[Any, str], axes: str) -> None:
    """Refuses a body in which each CTA stores the same elements of a result.

    That is certain where the index is static and nothing orders the CTAs. The emulator
    finds the other cases, as races.

    Args:
      jaxpr: the traced body of the kernel.
      shared: the references to results of which all CTAs have the whole array, and
        their names for messages.
      axes: the parallel axes with several positions, for messages.

    Raises:
      ArgumentError: there is such a store.
    """
    sites = walk(jaxpr)
    if any(_family(site) in _ORDERING for site in sites):
        return
    for site in sites:
        what = _stored_in_each_cta(site, shared)
        if what is not None:
            raise errors.ArgumentError(
                f"{what}: several CTAs write the same elements",
                expected="a part of its own for each CTA: without a block spec the "
                "result is the whole array, in GMEM",
                got=f"the same part of the array for each CTA along {axes}",
                hint="pass plgpu.BlockSpec(block_shape, index_map), one block a CTA; "
                "or index the result by plgpu.program_id; or make the axis sequential, "
                "dimension_semantics 'arbitrary'",
                where=site.where,
            )


def _stored_in_each_cta(site: Site, shared: Mapping[Any, str]) -> str | None:
    """Returns the name of the result that an equation stores at a static index."""
    ref, indices = _stored(site.eqn)
    if ref is None or any(isinstance(i, _jax.Var) for i in indices):
        return None
    around = (outer.eqn.primitive.name for outer in site.enclosing)
    if not all(name in _RUNS_ITS_BODY for name in around):
        return None
    return shared.get(site.origin(ref))


def _stored(eqn: _jax.JaxprEqn) -> tuple[Any, Sequence[Any]]:
    """Returns the reference that an equation overwrites, and its indices, or None."""
    match eqn.primitive.name:
        case "swap":
            return eqn.invars[0], eqn.invars[2:]  # the second one is the value
        case "copy_smem_to_gmem" if eqn.params["reduction_op"] is None:
            target = ops.unflatten(eqn.params["tree"], list(eqn.invars))["dst"]
            return target.ref, jax.tree.leaves(target.transforms)
    return None, ()


def _family(site: Site) -> str | None:
    operation = registry.operation(site.eqn.primitive)
    return None if operation is None else operation.family

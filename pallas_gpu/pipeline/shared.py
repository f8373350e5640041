# SPDX-License-Identifier: Apache-2.0
"""Whole results that all CTAs of a `pallas_call` share: each stores its own part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pallas_gpu import _jax, errors
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
    if site.eqn.primitive.name != "swap" or len(site.eqn.invars) > 2:
        return None  # `swap` has the reference, the value, and the traced indices
    around = (outer.eqn.primitive.name for outer in site.enclosing)
    if not all(name in _RUNS_ITS_BODY for name in around):
        return None
    return shared.get(site.origin(site.eqn.invars[0]))


def _family(site: Site) -> str | None:
    operation = registry.operation(site.eqn.primitive)
    return None if operation is None else operation.family

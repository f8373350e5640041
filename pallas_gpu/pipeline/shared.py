# SPDX-License-Identifier: Apache-2.0
"""Whole results that all CTAs of a `pallas_call` share: each stores its own part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pallas_gpu import _jax, errors
from pallas_gpu.entry import check


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
    stores = check.parts.Stores(jaxpr, shared, ())
    certain = check.results.certain_stores(jaxpr, stores)
    found = next((x for x in certain if not x[2].window.dynamic), None)
    if found is None:
        return
    ref, site, _ = found
    raise errors.ArgumentError(
        f"{shared[ref]}: several CTAs write the same elements",
        expected="a part of its own for each CTA: without a block spec the result is "
        "the whole array, in GMEM",
        got=f"the same part of the array for each CTA along {axes}",
        hint="pass plgpu.BlockSpec(block_shape, index_map), one block a CTA; "
        "or index the result by plgpu.program_id; or make the axis sequential, "
        "dimension_semantics 'arbitrary'",
        where=site.where,
    )

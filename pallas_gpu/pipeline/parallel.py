# SPDX-License-Identifier: Apache-2.0
"""Blocks of results under a parallel grid: each CTA needs one of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import _jax, errors, types
from pallas_gpu.entry import scope


def require_own_blocks(
    spec: types.BlockSpec, mesh: types.Mesh, what: str, kernel: Callable[..., None]
) -> None:
    """Raises unless the block of a result depends on every axis of the grid.

    CTAs run in any order, also at the same time, and each copies its whole block: of
    several that have the same one, the last wins. An axis of one CTA does not matter.

    Args:
      spec: of the result.
      mesh: the grid.
      what: the result, for messages.
      kernel: the author's body.

    Raises:
      ArgumentError: several CTAs have the same block.
    """
    if spec.memory_space is types.GMEM:
        return
    used = _axes_used(spec, len(mesh.grid))
    ignored = [i for i, n in enumerate(mesh.grid) if n > 1 and i not in used]
    if not ignored:
        return
    axes = ", ".join(f"axis {i} of size {mesh.grid[i]}" for i in ignored)
    mapped = None if spec.block_shape is None else spec.index_map
    raise errors.ArgumentError(
        f"{what}: several CTAs write the same block",
        expected="an index map that uses every grid axis: the axes are parallel",
        got=f"an index map that ignores {axes}"
        if mapped is not None
        else f"the same part of the array for each CTA along {axes}",
        hint="use the axis in the index map; or loop over it in the body with "
        "plgpu.loop; or pass plgpu.BlockSpec(memory_space=plgpu.GMEM) and let each CTA "
        "store its own part of the array",
        where=scope.location(mapped or kernel),
    )


def _axes_used(spec: types.BlockSpec, rank: int) -> set[int]:
    """Returns the grid axes on which the block's index depends."""
    if spec.block_shape is None or spec.index_map is None:
        return set()
    index = jax.core.ShapedArray((), jnp.int32)
    traced, _ = _jax.trace(spec.index_map, [index] * rank)
    jaxpr = traced.jaxpr
    needed: set[Any] = {x for x in jaxpr.outvars if not isinstance(x, _jax.Literal)}
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            needed.update(x for x in eqn.invars if not isinstance(x, _jax.Literal))
    return {i for i, var in enumerate(jaxpr.invars) if var in needed}

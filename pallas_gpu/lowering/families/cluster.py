# SPDX-License-Identifier: Apache-2.0
"""Clusters: the CTA in whose SMEM an access is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir

from pallas_gpu.lowering.context import RuleContext, i32
from pallas_gpu.mosaic import cluster


def rank_of(
    ctx: RuleContext, axes: Sequence[str], positions: Sequence[Any] | None
) -> ir.Value | None:
    """Returns the rank of a CTA of the cluster; None for the executing CTA.

    Args:
      axes: cluster axes.
      positions: of the CTA on them; None for none.
    """
    if positions is None:
        return None
    mesh = ctx.kernel.params.mesh
    names = list(mesh.cluster_names)
    found = {
        names.index(axis): i32(position)
        for axis, position in zip(axes, positions, strict=True)
    }
    return cluster.rank_at(tuple(mesh.cluster), found)

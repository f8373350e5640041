# SPDX-License-Identifier: Apache-2.0
"""Clusters: positions of other CTAs, and the names of the axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pallas_gpu import errors, types
from pallas_gpu.entry.check import references
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import atomics, cluster, indexed
from pallas_gpu.program.nodes import Constant, Op


@registry.checks(
    indexed.load_indexed_p,
    indexed.store_indexed_p,
    cluster.async_store_smem_p,
    *atomics.PRIMITIVES.values(),
)
def _check_elements(op: Op, mesh: types.Mesh) -> None:
    references.check_operands(op, mesh)
    if op.operands["cta"] is not None:
        async_store = op.primitive is cluster.async_store_smem_p
        who = op.name if async_store else "cluster_ref"
        check_positions(who, op.params["cta_axes"], op.operands["cta"], mesh)


def check_positions(
    who: str, axes: Sequence[str], positions: Sequence[Any], mesh: types.Mesh
) -> None:
    """Checks the position of a CTA on axes of the cluster.

    Raises:
      AxisNameError: there is no such axis.
      OutOfBoundsError: a static position outside of the cluster.
    """
    sizes = dict(zip(mesh.cluster_names, mesh.cluster, strict=True))
    for axis, position in zip(axes, positions, strict=True):
        if axis not in sizes:
            raise errors.AxisNameError(
                f"{who}: no cluster axis is named {axis!r}",
                expected=f"one of {tuple(sizes)}"
                if sizes
                else "a kernel with cluster=(...) and cluster_names=(...)",
                got=tuple(axes),
                hint="other CTAs are those along axes of the kernel's cluster",
            )
        if not isinstance(position, Constant):
            continue
        if not 0 <= position.value < sizes[axis]:
            raise errors.OutOfBoundsError(
                f"{who}: the cluster has no CTA at this position",
                expected=f"0 to {sizes[axis] - 1} along {axis!r}",
                got=int(position.value),
                hint="compute the position modulo the size of the axis",
            )

# SPDX-License-Identifier: Apache-2.0
"""Clusters: positions of other CTAs, and the names of the axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pallas_gpu import _jax, errors, types
from pallas_gpu.entry.check import references
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import atomics, cluster, indexed


@registry.checks(
    indexed.load_indexed_p,
    indexed.store_indexed_p,
    cluster.async_store_smem_p,
    *atomics.PRIMITIVES.values(),
)
def _check_elements(eqn: _jax.JaxprEqn, mesh: types.Mesh) -> None:
    references.check_operands(eqn, mesh)
    operands = references.static_operands(eqn)
    if operands["cta"] is not None:
        async_store = eqn.primitive is cluster.async_store_smem_p
        who = eqn.primitive.name if async_store else "cluster_ref"
        check_positions(who, eqn.params["cta_axes"], operands["cta"], mesh)


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
        if isinstance(position, int) and not 0 <= position < sizes[axis]:
            raise errors.OutOfBoundsError(
                f"{who}: the cluster has no CTA at this position",
                expected=f"0 to {sizes[axis] - 1} along {axis!r}",
                got=position,
                hint="compute the position modulo the size of the axis",
            )

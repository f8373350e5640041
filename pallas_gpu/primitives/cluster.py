# SPDX-License-Identifier: Apache-2.0
"""Clusters: references to the SMEM of other CTAs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from pallas_gpu import expect, types
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.types import values
from pallas_gpu.types.spaces.cluster import ClusterStep


def _positions(value: Any, what: str) -> dict[str, Any]:
    """Accepts a position on each of some axes."""
    if not isinstance(value, Mapping) or not value:
        raise expect.wrong_type(
            what,
            "a position on cluster axes",
            "a dict from names of cluster axes to positions",
            value,
            'cluster_ref(ref, {"x": 1})',
        )
    names = expect.names(tuple(value), f"{what}: the axes")
    return dict(
        zip(names, (position_on_axis(x, what) for x in value.values()), strict=True)
    )


def position_on_axis(value: Any, what: str) -> Any:
    """Accepts a position on a cluster axis; returns a Python integer or an int32.

    Raises:
      ArgumentTypeError: it is not an integer, or has axes.
    """
    value = values.integer(value, what)
    if isinstance(value, int):
        return value
    if value.shape:
        raise expect.wrong_type(
            what, "a position", "an integer scalar", value, "lax.axis_index(name) ^ 1"
        )
    return jax.lax.convert_element_type(value, "int32")


@expect.arguments(ref=expect.anything, block_id=_positions)
def cluster_ref(ref: types.Ref, block_id: Mapping[str, Any]) -> types.RefView:
    """Returns a reference to the same array in the SMEM of another CTA of the cluster.

    It can be read, written, indexed, and updated by atomic operations; each access is
    one by elements. Copies and matrix products take references to the CTA's own SMEM.

    PTX: mapa, then ld.shared::cluster, st.shared::cluster, red.shared::cluster or
    atom.shared::cluster. Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` for single elements by a warp. A load is
    complete when it returns. Only arrivals on a `ClusterBarrier`, and waits for them,
    order the accesses of one CTA with those of another. What a kernel declares in
    `scratch_types` can be accessed until all CTAs of the cluster have ended: the
    compiled kernel waits for them. What `run_scoped` declares can be accessed until its
    CTA leaves the scope, which has to wait for the others.

    Args:
      ref: SMEM reference, or a part of one.
      block_id: for each cluster axis a position: an integer or an integer scalar. On
        axes that it does not name, the CTA's own.

    Raises:
      MemorySpaceError: the reference is not in SMEM.
      ArgumentTypeError: `block_id` does not map names to integers.
      AxisNameError: no cluster axis has that name.
      OutOfBoundsError: a position outside of the cluster.

    Example:
      >>> other = plgpu.cluster_ref(part_ref, {"x": 1 - lax.axis_index("x")})
      >>> total = part_ref[...] + other[...]
    """
    ops.require_space(ref, types.SMEM, "cluster_ref", "the reference")
    view: Any = ref.at[()]
    base = view if isinstance(view, types.RefView) else types.RefView(view, ())
    return types.RefView(base.ref, (*base.transforms, ClusterStep.at(block_id)))

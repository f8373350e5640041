# SPDX-License-Identifier: Apache-2.0
"""Loads of two CTAs that the barrier of one of them tracks."""

from __future__ import annotations

from collections.abc import Sequence

from jax import lax

from pallas_gpu import errors, types
from pallas_gpu.types.copies.partition import CopyPartition


def partition_of(
    leader_tracked: CopyPartition | None,
    partitioned_axis: int | None,
    collective_axes: Sequence[str] | None,
    who: str,
) -> CopyPartition | None:
    """Returns what the CTAs load, of both ways to say that; None for other copies."""
    if partitioned_axis is not None and leader_tracked is not None:
        raise errors.ArgumentError(
            f"{who}: leader_tracked and partitioned_axis are both given",
            expected="one of them; partitioned_axis=i is the older spelling of "
            "leader_tracked=plgpu.CopyPartition.PARTITIONED(i)",
            got=f"leader_tracked={leader_tracked}, partitioned_axis={partitioned_axis}",
            hint="omit partitioned_axis",
        )
    if partitioned_axis is not None:
        leader_tracked = CopyPartition.PARTITIONED(partitioned_axis)
    if leader_tracked is not None and len(collective_axes or ()) != 1:
        raise errors.ArgumentError(
            f"{who}: the axis of the two CTAs is missing",
            expected="collective_axes with one cluster axis of size 2",
            got=f"collective_axes={collective_axes}",
            hint="name the axis along which the two CTAs compute together",
        )
    return leader_tracked


def own_part(
    src: types.Ref, partition: CopyPartition | None, axes: Sequence[str], who: str
) -> types.Ref:
    """Returns the part of a source that this CTA loads."""
    if not isinstance(partition, CopyPartition.PARTITIONED):
        return src
    axis, shape = partition.axis, tuple(src.shape)
    if axis >= len(shape) or shape[axis] % 2:
        raise errors.ShapeError(
            f"{who}: the source cannot be divided among two CTAs",
            expected="an even dimension, counted without those indexed by integers",
            got=f"{partition} of {types.describe(src)}",
            hint="partition another dimension",
        )
    half = shape[axis] // 2
    start = lax.axis_index(axes[0]) * half
    return src.at[(*[slice(None)] * axis, types.ds(start, half))]

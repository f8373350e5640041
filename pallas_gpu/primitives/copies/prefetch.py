# SPDX-License-Identifier: Apache-2.0
"""Prefetches of parts of GMEM to the L2 cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pallas_gpu import arch, errors, expect, layouts, types
from pallas_gpu.layouts.gmem.line import prefetched_bytes
from pallas_gpu.layouts.gmem.tma_start import require_start
from pallas_gpu.primitives import _engines, cluster
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.copies import pairs, views

__all__ = ["async_prefetch"]

async_prefetch_p = registry.define(
    "async_prefetch",
    "prefetch",
    reads=("ref",),
    clipped=("ref",),
    remote=("ref",),
    asynchronous=True,
    feature=arch.Feature.TMA,
)


@expect.arguments(
    leader_tracked=expect.optional(
        expect.instance(
            types.CopyPartition, written="plgpu.CopyPartition.PARTITIONED(axis)"
        )
    ),
    partitioned_axis=expect.optional(expect.integer(0)),
)
def async_prefetch(
    ref: types.Ref,
    *,
    collective_axes: str | Sequence[str] | None = None,
    leader_tracked: types.CopyPartition | None = None,
    partitioned_axis: int | None = None,
    predicate: ops.Predicate = None,
) -> None:
    """Fetches a part of GMEM to the L2 cache, for a copy that follows later.

    PTX: cp.async.bulk.prefetch.tensor.L2.global.tile; without .tensor for adjacent
    bytes in bounds that no tensor map describes. Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp; one elected lane issues it.
    It is a hint: nothing waits for it, it orders nothing, and results do not depend on
    it. What lies outside of the array is not fetched.

    Args:
      ref: GMEM reference, or a part of one, as `copy_gmem_to_smem` copies by TMA: its
        rows start and end at multiples of 16 bytes, or it does if it is adjacent.
      collective_axes: cluster axes: the CTAs along them call this with the same
        reference, and each fetches an equal part.
      leader_tracked: as of the copy: with `CopyPartition.PARTITIONED(axis)` each CTA
        along `collective_axes` fetches its half.
      partitioned_axis: older spelling of `leader_tracked=PARTITIONED(axis)`.
      predicate: scalar bool, uniform in the warpgroup; False fetches nothing.

    Raises:
      MemorySpaceError: the reference is not in GMEM.
      LayoutError: no tensor map describes the part, nor is it adjacent.
      AxisNameError, ArgumentError: the axes are not those of the kernel's cluster.

    Example:
      >>> plgpu.async_prefetch(x_gmem.at[plgpu.ds(next_row, 64)])
    """
    who = "async_prefetch"
    ops.require_space(ref, types.GMEM, who, "the reference")
    axes = tuple(collective_axes or ())
    partition = pairs.partition_of(leader_tracked, partitioned_axis, axes, who)
    own = pairs.own_part(ref, partition, axes, who)
    plain = views.plain(own, who)
    # The source of a partitioned copy is the part of this CTA.
    shared = () if own is not ref else axes
    ops.bind(
        async_prefetch_p, {"ref": plain, "predicate": predicate}, collective_axes=shared
    )


@registry.checks(async_prefetch_p)
def _check_prefetch(op: Any, mesh: types.Mesh) -> None:
    window, name = op.operands["ref"].window, op.name
    _engines.require_elements(window)
    pieces = cluster.require_axes(op.params["collective_axes"], mesh, name)
    bits = types.itemsize_bits(op.operands["ref"].dtype)
    if window.is_transposed:
        raise errors.UnsupportedError(
            f"{name}: a transposed reference is not supported",
            expected="a part with its dimensions in order",
            got=f"dimensions in the order {window.order}",
            hint="prefetch the same part of the untransposed reference",
        )
    if pieces > 1 or prefetched_bytes(window, bits) is None:
        layouts.plan_prefetch(window, bits, pieces)
    require_start(window, bits, name, store=False)

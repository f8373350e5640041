# SPDX-License-Identifier: Apache-2.0
"""TMA copies."""

from __future__ import annotations

import math
from typing import Any

from pallas_gpu.emitters import tma
from pallas_gpu.emitters.cluster import Group
from pallas_gpu.emitters.control import predicated
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.inference.collect import Node
from pallas_gpu.lowering.rules import emits_and_relates
from pallas_gpu.primitives import tma as primitives
from pallas_gpu.types import CopyPartition, OOBFillMode


@emits_and_relates(primitives.copy_gmem_to_smem_p)
def _copy_gmem_to_smem(
    on: RuleContext | Node, src, dst, barrier, predicate, *,
    collective_axes, leader_tracked, cache_hint, oob_mode,
) -> None:  # fmt: skip
    if isinstance(on, Node):
        axes = collective_axes or ()
        if isinstance(leader_tracked, CopyPartition.PARTITIONED):
            axes = ()
        on.use(
            on.part(dst),
            "copy",
            other=on.part(src),
            pieces=math.prod(on.network.sizes[axis] for axis in axes),
            allow_line=not collective_axes,
            in_bounds=oob_mode is OOBFillMode.PROMISE_IN_BOUNDS,
        )
        return
    tma.copy_gmem_to_smem(
        on.builder,
        on.view(src),
        on.view(dst),
        on.view(barrier),
        **_shared_by(on.shared_by, leader_tracked),
        predicate=on.argument(predicate),
        cache_hint=cache_hint,
        oob_mode=oob_mode,
    )


def _shared_by(group: Group | None, partition: CopyPartition | None) -> dict[str, Any]:
    """Returns how the CTAs along collective_axes share a copy."""
    if partition is None:
        return {"multicast": group}
    # The source of a partitioned copy is the part of this CTA.
    multicast = None if isinstance(partition, CopyPartition.PARTITIONED) else group
    return {"multicast": multicast, "pair": group}


@emits_and_relates(primitives.copy_smem_to_gmem_p)
def _copy_smem_to_gmem(
    on: RuleContext | Node, src, dst, predicate, *,
    reduction_op, cache_hint, commit_group,
) -> None:  # fmt: skip
    if isinstance(on, Node):
        on.use(on.part(src), "copy", other=on.part(dst), allow_line=True)
        return
    with predicated(on.argument(predicate)):
        tma.copy_smem_to_gmem(
            on.builder,
            on.view(src),
            on.view(dst),
            reduction=reduction_op,
            commit=False,
            cache_hint=cache_hint,
        )
    # Every thread commits, so that a skipped copy leaves an empty group and the
    # numbers that wait_smem_to_gmem counts stay the same.
    if commit_group:
        tma.commit_group()

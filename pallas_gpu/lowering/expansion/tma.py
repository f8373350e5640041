# SPDX-License-Identifier: Apache-2.0
"""TMA copies."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from pallas_gpu.lowering.expansion.expand import Expansion, expands
from pallas_gpu.lowering.expansion.memory import barrier_pointer, gmem_view, smem_view
from pallas_gpu.lowering.mbarrier import when
from pallas_gpu.mosaic import cluster, elementwise, tma
from pallas_gpu.mosaic.elements import dtypes


@expands("mosaic_gpu.async_load")
def _load(expansion: Expansion, op: Any) -> None:
    kernel = expansion.kernel
    axes = [ir.IntegerAttr(a).value for a in op.collective]
    group = cluster.group(tuple(kernel.params.mesh.cluster), axes) if axes else None
    with when(_condition(op.predicate)):
        tma.copy_gmem_to_smem(
            kernel.builder,
            gmem_view(expansion, op.source),
            smem_view(expansion, op.destination),
            barrier_pointer(op.barrier),
            multicast=group,
        )
    expansion.dead.append(op.operation)


@expands("mosaic_gpu.async_store")
def _store(expansion: Expansion, op: Any) -> None:
    with when(_condition(op.predicate)):
        tma.copy_smem_to_gmem(
            expansion.kernel.builder,
            smem_view(expansion, op.source),
            gmem_view(expansion, op.destination),
            commit=False,
        )
    expansion.dead.append(op.operation)


def _condition(predicate: ir.Value | None) -> Any:
    return None if predicate is None else elementwise.scalar(predicate, dtypes.BOOL)

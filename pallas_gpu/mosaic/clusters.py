# SPDX-License-Identifier: Apache-2.0
"""Other blocks of the cluster, and the work of clusters that have not started."""

from __future__ import annotations

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import gpu

from pallas_gpu import errors
from pallas_gpu.emitters import addressing
from pallas_gpu.emitters.grids import launch_control
from pallas_gpu.mosaic import elements
from pallas_gpu.mosaic.barriers import BarrierRef, rank_along
from pallas_gpu.mosaic.memory import memrefs
from pallas_gpu.mosaic.scalars import single_thread_predicate, when
from pallas_gpu.types.profiling.threads import ThreadSubset


def get_cluster_ref(
    ref: ir.Value, dim: gpu.Dimension, idx: ir.Value, generic: bool = True
) -> ir.Value:
    """Returns the same reference to SMEM in the block at `idx` along `dim`.

    The blocks have to meet before the first access and after the last one. `generic` is
    accepted for upstream's sake: the result is in the cluster's SMEM.
    """
    if not memrefs.is_smem(ref):
        raise errors.MemorySpaceError(
            "get_cluster_ref: the reference is not to SMEM",
            expected=elements.WORKGROUP,
            got=str(ref.type.memory_space),
        )
    remote = addressing.map_shared(memrefs.memref_ptr(ref), rank_along(dim, idx))
    strides, _ = ref.type.get_strides_and_offset()
    layout = ir.StridedLayoutAttr.get(0, strides)
    space = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 7)
    type_ = ir.MemRefType.get(ref.type.shape, ref.type.element_type, layout, space)
    return memrefs.ptr_as_memref(remote, type_)


def try_cluster_cancel(
    result_ref: ir.Value, barrier: BarrierRef, predicate: ir.Value | None = None
) -> None:
    """Requests the work of a cluster that has not started; one thread issues it.

    PTX: `clusterlaunchcontrol.try_cancel.async`. Since: sm_100a. Every block of the
    cluster gets the answer, 16 aligned bytes of SMEM, which its barrier counts. The
    predicate is true in the thread that issues it; default: one of the block.
    """
    if predicate is None:
        predicate = single_thread_predicate(ThreadSubset.BLOCK)
    with when(predicate):
        launch_control.ask(
            memrefs.memref_ptr(result_ref), barrier.get_ptr(), in_cluster=True
        )


def query_cluster_cancel(
    result_ref: ir.Value,
) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """Returns what an answer to `try_cluster_cancel` says.

    PTX: `clusterlaunchcontrol.query_cancel`. Since: sm_100a. These are x, y and z of
    the cluster's first block, i32, 0 without one, and an i1: whether there is one.
    """
    answer = memrefs.memref_ptr(result_ref)
    granted, x, y, z = launch_control.decode(answer, "xyz")
    return x, y, z, granted

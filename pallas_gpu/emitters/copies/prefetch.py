# SPDX-License-Identifier: Apache-2.0
"""Prefetches of a slice of GMEM to the L2 cache."""

from __future__ import annotations

from jaxlib.mlir import ir

from pallas_gpu import errors
from pallas_gpu.emitters import module, tma
from pallas_gpu.emitters.cluster import Group
from pallas_gpu.emitters.control import predicated
from pallas_gpu.emitters.copies import instructions
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.gmem import GmemView, slice_pointer
from pallas_gpu.layouts.gmem.line import prefetched_bytes
from pallas_gpu.layouts.gmem.tma_plan import plan_prefetch


def prefetch(
    builder: module.KernelBuilder,
    ref: GmemView,
    *,
    shared_by: Group | None = None,
    predicate: ir.Value | None = None,
    elected: ir.Value | None = None,
) -> None:
    """Fetches a slice of a kernel buffer to L2; drops out-of-bounds elements.

    PTX: `cp.async.bulk.prefetch.tensor.L2.global.tile`, or
    `cp.async.bulk.prefetch.L2.global` of adjacent bytes in bounds that no tensor map
    describes. Since: sm_90. The elected thread issues it; nothing waits for it.

    Args:
      builder: the open builder.
      ref: the slice.
      shared_by: blocks of the cluster that all call this with the same slice; each
        fetches an equal part.
      predicate: i1; where it is false, nothing is fetched.
      elected: i1, true in the thread that issues it; None: the issuer's elected one.

    Raises:
      LayoutError: no tensor map can describe the slice, nor are its bytes adjacent.
    """
    elected = builder.elected if elected is None else elected
    pieces = 1 if shared_by is None else shared_by.count
    bits = dtypes.stored_bits(ref.dtype)
    line = prefetched_bytes(ref.window, bits) if pieces == 1 else None
    try:
        plan = plan_prefetch(ref.window, bits, pieces)
    except errors.LayoutError:
        if line is None:
            raise
        with predicated(elected), predicated(predicate):
            instructions.prefetch_line(slice_pointer(ref), line)
        return
    descriptor = tma.descriptor(ref, plan)

    def fetch(_: ir.Value, coordinates: list[ir.Value]) -> None:
        instructions.prefetch(descriptor, coordinates)

    # No SMEM is involved; the offsets of the plan are dropped.
    base = builder.smem_pointer(0)
    with predicated(elected), predicated(predicate):
        tma.issue(plan, ref.window.starts, base, fetch, shared_by)

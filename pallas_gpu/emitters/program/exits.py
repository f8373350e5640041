# SPDX-License-Identifier: Apache-2.0
"""The end of a kernel: what the end of the launch waits for in any case."""

from __future__ import annotations

from jaxlib.mlir import ir

# What may follow a kernel's last wait: it accesses no memory.
_MEETINGS = (
    "gpu.terminator",
    "nvvm.barrier",
    "nvvm.cluster.arrive",
    "nvvm.cluster.wait",
)
_WAIT = "nvvm.cp.async.bulk.wait_group"


def relax_last_wait(body: ir.Block) -> None:
    """Lets the last wait for copies to GMEM wait for their reads of SMEM only.

    A CTA must not exit while copies read its SMEM. Their writes are complete when the
    launch is, before which nobody else may look at them; to wait for them here would
    take each CTA a latency of GMEM more. (CUTLASS's kernels end in the same way.)

    Args:
      body: the kernel's code.
    """
    operations = body.operations
    for i in reversed(range(len(operations))):
        op = operations[i]
        if op.operation.name == _WAIT:
            op.attributes["read"] = ir.UnitAttr.get()
        elif op.operation.name not in _MEETINGS:
            return

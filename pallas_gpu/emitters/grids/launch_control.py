# SPDX-License-Identifier: Apache-2.0
"""Cluster launch control: requests for the work of other clusters, and their answers.

Sources: PTX ISA, "clusterlaunchcontrol.try_cancel" and ".query_cancel".
"""

from __future__ import annotations

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_gpu.emitters import mbarrier, module
from pallas_gpu.emitters.control import predicated

ANSWER_BYTES = 16


def request(
    answer: ir.Value,
    barrier: ir.Value,
    *,
    arms: ir.Value,
    asks: ir.Value,
    in_cluster: bool,
) -> None:
    """Arrives on the barrier, and requests the work of a cluster that has not started.

    PTX: `mbarrier.arrive.expect_tx`, `clusterlaunchcontrol.try_cancel.async`. Since:
    sm_100a. All threads of the warpgroup issue it; the elected one arrives and asks.

    Args:
      answer: `!llvm.ptr<3>`, aligned to 16 bytes.
      barrier: `!llvm.ptr<3>` of the mbarrier.
      arms: i1, uniform: the arrival expects the bytes of the answer.
      asks: i1, uniform: the request is made.
      in_cluster: whether the answer goes to all CTAs of the cluster, each of which
        expects it on its own barrier.
    """
    kernel = module.current()
    expected = arith.select(arms, kernel.i32(ANSWER_BYTES), kernel.i32(0))
    # The other threads have read what the answer replaces.
    mbarrier.synchronize()
    mbarrier.arrive_expect_tx(barrier, expected)
    with predicated(arith.andi(kernel.elected, asks)):
        ask(answer, barrier, in_cluster=in_cluster)


def ask(answer: ir.Value, barrier: ir.Value, *, in_cluster: bool) -> None:
    """Emits only the instruction of `request`, for code of one thread."""
    multicast = ".multicast::cluster::all" if in_cluster else ""
    llvm.inline_asm(
        None,
        [answer, barrier],
        "clusterlaunchcontrol.try_cancel.async.shared::cta."
        f"mbarrier::complete_tx::bytes{multicast}.b128 [$0], [$1];",
        "r,r,~{memory}",
        has_side_effects=True,
    )


def decode(answer: ir.Value, axes: str = "x") -> tuple[ir.Value, ...]:
    """Decodes an answer: i1, whether it grants work; i32s, the place of its first CTA.

    PTX: `ld.shared.b128`, `clusterlaunchcontrol.query_cancel`,
    `fence.proxy.async.shared::cta`. Since: sm_100a. Every thread that uses the result
    issues it, after the wait for the request's barrier. The place is 0 without work.

    Args:
      answer: `!llvm.ptr<3>`, aligned to 16 bytes.
      axes: those of which the place is returned.
    """
    i32 = ir.IntegerType.get_signless(32)
    count = 1 + len(axes)
    fields = llvm.StructType.get_literal([i32] * count)
    query = "clusterlaunchcontrol.query_cancel"
    places = "".join(
        f"mov.b32 ${i}, 0;\n"
        f"@granted {query}.get_first_ctaid::{axis}.b32.b128 ${i}, answer;\n"
        for i, axis in enumerate(axes, 1)
    )
    # The fence orders the read before the next answer, which the async proxy writes.
    text = (
        "{ .reg .b128 answer;\n.reg .pred granted;\n"
        f"ld.shared.b128 answer, [${count}];\n"
        f"{query}.is_canceled.pred.b128 granted, answer;\n"
        "selp.b32 $0, 1, 0, granted;\n"
        f"{places}"
        "fence.proxy.async.shared::cta;\n}"
    )
    constraints = f"=r,{'=&r,' * len(axes)}r,~{{memory}}"
    results = llvm.inline_asm(
        fields, [answer], text, constraints, has_side_effects=True
    )
    granted, *first = (llvm.extractvalue(i32, results, [i]) for i in range(count))
    zero = module.current().i32(0)
    return arith.cmpi(arith.CmpIPredicate.ne, granted, zero), *first

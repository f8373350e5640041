# SPDX-License-Identifier: Apache-2.0
"""Dynamic scheduling: the positions of a grid, claimed by the clusters of a launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_gpu.emulator.engine.memory import Region
from pallas_gpu.emulator.engine.orders.choices import Kind, Touch
from pallas_gpu.emulator.engine.waits import TURN, Run
from pallas_gpu.emulator.gpu import cluster
from pallas_gpu.emulator.gpu.machine.cta import Warpgroup
from pallas_gpu.emulator.gpu.mbarrier import skipped
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.grids import scheduling


@registry.register(scheduling.claim_p, registry.RuleKind.EMULATE)
def _claim(wg: Warpgroup, operands: dict[str, Any], **_: Any) -> Run:
    if skipped(operands):
        return [np.int32(0)]
    # Which cluster comes first is a choice of the schedule.
    yield TURN
    wg.execution.touch(Touch(("positions", wg.cta.device.suffix), Kind.WRITE))
    return [np.int32(next(wg.cta.cluster.positions))]


@registry.register(scheduling.publish_p, registry.RuleKind.EMULATE)
def _publish(wg: Warpgroup, operands: dict[str, Any], **_: Any) -> None:
    if skipped(operands):
        return
    dst, barrier = operands["dst"], operands["barrier"]
    ctas = wg.cta.cluster.ctas
    for cta in ctas:
        memory = cluster.counterpart(wg, dst.memory, cta)
        wg.write(Region(memory, dst.place), operands["position"])
    known = wg.release()
    for cta in ctas:
        barrier.memory.same_in(cta).one(barrier).arrive(known, wg.location)

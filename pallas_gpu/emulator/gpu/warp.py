# SPDX-License-Identifier: Apache-2.0
"""Regions that the warps of a warpgroup execute independently."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_gpu.emulator.engine import evaluate, ordering
from pallas_gpu.emulator.engine.steps import ControlStep
from pallas_gpu.emulator.engine.waits import Run, Wait
from pallas_gpu.emulator.gpu.machine.cta import Warp, Warpgroup
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.warp import WARPS, warp_map_p


@registry.register(warp_map_p, registry.RuleKind.EMULATE)
def _warp_map(wg: Warpgroup, step: ControlStep, ins: list[Any]) -> Run:
    """Runs the four warps of a warpgroup, and waits until all have ended.

    The barriers around the region order them: previous accesses of the warpgroup happen
    before all of theirs, and theirs before later ones of the warpgroup. Among each
    other they are only ordered by their own synchronization.
    """
    (body,) = step.plans
    if not wg.warps:
        wg.warps = [Warp(wg, number) for number in range(WARPS)]
    warps, threads, known = wg.warps, wg.group.threads, wg.release()
    for warp in warps:
        warp.axis_name, warp.around = step.params["axis_name"], wg.around
        body_run = evaluate.run(warp, body, [*ins, np.int32(warp.number)])
        warp.start(known, evaluate.guarded(warp, body_run), step.location)
    threads.extend(warps)
    yield Wait(
        lambda: all(warp.done for warp in warps),
        "its four warps to end",
        lambda: f"{sum(warp.done for warp in warps)} of {WARPS} warps have ended",
        for_threads=True,
    )
    for warp in warps:
        threads.remove(warp)
        ordering.join(wg.clock, warp.release())
    return []

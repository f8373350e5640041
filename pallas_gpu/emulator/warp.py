# SPDX-License-Identifier: Apache-2.0
"""Warps that run by themselves: four runs of the scheduler in place of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pallas_gpu import errors
from pallas_gpu.emulator import ordering, scheduler
from pallas_gpu.emulator.machine import Warp, Warpgroup
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.warp import WARPS, warp_map_p


def run(
    wg: Warpgroup, start: Callable[[Warp], scheduler.Run], location: Any
) -> scheduler.Run:
    """Lets the four warps of a warpgroup run, and waits until all have ended.

    The barriers around the region order them: what the warpgroup did comes before all
    of them, what they do comes before what the warpgroup does next. Among each other
    they have no order but the one that they make.

    Args:
      wg: the warpgroup.
      start: gives the run of one warp.
      location: of the region.
    """
    if not wg.warps:
        wg.warps = [Warp(wg, number) for number in range(WARPS)]
    warps, threads = wg.warps, wg.machine.threads
    known = wg.release()
    for one in warps:
        one.start(known, start(one), location)
    threads.extend(warps)
    yield scheduler.Wait(
        lambda: all(one.done for one in warps),
        "its four warps to end",
        lambda: f"{sum(one.done for one in warps)} of {WARPS} warps have ended",
        for_threads=True,
    )
    for one in warps:
        threads.remove(one)
        ordering.join(wg.clock, one.release())


@registry.register(warp_map_p, registry.RuleKind.EMULATE)
def _warp_map_rule(*_: Any, **__: Any) -> None:
    # Listed so that the table of rules is complete; evaluate.py runs the region itself,
    # because its body is a plan.
    raise errors.InternalError("warp_map is control flow, not an effect")

# SPDX-License-Identifier: Apache-2.0
"""Programmatic dependent launch: each thread waits; the launch has an attribute."""

from __future__ import annotations

from pallas_gpu.emitters.grids import griddepcontrol
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.rules import emits
from pallas_gpu.primitives.grids.griddepcontrol import launch_dependents_p, wait_p


@emits(wait_p)
def _wait(ctx: RuleContext) -> None:
    griddepcontrol.wait()


@emits(launch_dependents_p)
def _launch_dependents(ctx: RuleContext) -> None:
    griddepcontrol.launch_dependents()

# SPDX-License-Identifier: Apache-2.0
"""Programmatic dependent launch (PTX ISA, griddepcontrol)."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from pallas_gpu.lockstep.not_modelled import NotModelled
from pallas_gpu.lockstep.program import Program, Step
from pallas_gpu.lockstep.registers import assembles

# The agent that writes all of GMEM in the grids before the launch.
EARLIER = "earlier grids"


@assembles("griddepcontrol.")
def _text(program: Program, op: ir.Operation, text: str) -> Step:
    match text:
        case "griddepcontrol.wait;":
            return _wait
        case "griddepcontrol.launch_dependents;":
            return lambda strand: None
    raise NotModelled(f"llvm.inline_asm {text[:80]}")


def _wait(strand: Any) -> None:
    rows = strand.whole_warps("griddepcontrol.wait")
    clocks = strand.cta.clocks
    clocks.learn(rows, clocks.agent(EARLIER), 1)

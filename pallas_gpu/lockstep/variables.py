# SPDX-License-Identifier: Apache-2.0
"""Variables in local memory that are only loaded and stored: registers of a thread."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.lockstep import values
from pallas_gpu.lockstep.not_modelled import NotModelled
from pallas_gpu.lockstep.program import Program, Step, runs


@runs("llvm.alloca")
def _alloca(program: Program, op: ir.Operation) -> Step:
    (out,) = program.outputs(op)
    kind = values.dtype(ir.TypeAttr(op.attributes["elem_type"]).value)
    uses = [use.owner.operation.name for use in op.results[0].uses]
    if set(uses) - {"llvm.load", "llvm.store"}:
        raise NotModelled(f"llvm.alloca that {uses} use")

    def allocate(strand: Any) -> None:
        strand.env[out] = np.zeros(strand.lanes, kind)

    return allocate


def is_variable(pointer: ir.Value) -> bool:
    """Whether a pointer is that of a variable: its slot then holds what is stored."""
    return pointer.owner.name == "llvm.alloca"


def load(program: Program, op: ir.Operation) -> Step:
    """A load of a variable."""
    (variable,), (out,) = program.inputs(op), program.outputs(op)

    def step(strand: Any) -> None:
        strand.env[out] = strand.env[variable]

    return step


def store(program: Program, op: ir.Operation) -> Step:
    """A store to a variable."""
    value, variable = program.inputs(op)

    def step(strand: Any) -> None:
        env = strand.env
        new = strand.per_lane(values.forced(env[value]))
        env[variable] = np.where(strand.active(), new, env[variable])

    return step

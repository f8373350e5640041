# SPDX-License-Identifier: Apache-2.0
"""Loads and stores with a predicate: threads where it is false access nothing.

PTX ISA, predicated execution: an instruction whose predicate is false has no effect, so
the registers of a load keep what they held.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.lockstep import values
from pallas_gpu.lockstep.accesses import memory_of, places_of
from pallas_gpu.lockstep.assembly import Statement
from pallas_gpu.lockstep.not_modelled import NotModelled
from pallas_gpu.lockstep.program import Program, Step
from pallas_gpu.lockstep.registers import assembles, form_of


def predicated(slot: int | None, step: Step) -> Step:
    """The step, in those threads in which a predicate holds."""
    if slot is None:
        return step

    def in_some(strand: Any) -> None:
        with strand.where(values.forced(strand.env[slot])):
            step(strand)

    return in_some


def guarded(inputs: list[int], statement: Statement, step: Step) -> Step:
    """The step, in those threads in which the guard of its statement holds."""
    guard = statement.guard.removeprefix("$")
    return predicated(inputs[int(guard)] if guard else None, step)


_ACCESS = re.compile(
    r"(ld|st)\.(global|shared::cta|shared::cluster)(?:\.v([24]))?\.b(8|16|32|64)"
)
_SPACES = {"global": 1, "shared::cta": 3, "shared::cluster": 7}


@assembles(
    *(" ld.global", " ld.shared::cta.", " ld.shared::cluster."),
    *(" st.global", " st.shared::cta.", " st.shared::cluster."),
)
def _access(program: Program, op: ir.Operation, text: str) -> Step:
    statement, match = form_of(text, _ACCESS)
    count, size = int(match[3] or 1), int(match[4]) // 8
    is_load = match[1] == "ld"
    first = count if is_load else 0
    registers = tuple(f"${i if is_load else i + 2}" for i in range(count))
    data = registers if count > 1 else registers[0]
    place = f"[${first}]"
    constraints = ir.StringAttr(op.attributes["constraints"]).value.split(",")
    tied = [x for x in constraints if x.isdigit()]
    if (
        statement.guard != f"${first + 1}"
        or statement.operands != ((data, place) if is_load else (place, data))
        or tied != [str(i) for i in range(count) if is_load]
        or "~{memory}" not in constraints
        or "has_side_effects" not in op.attributes
    ):
        raise NotModelled(f"llvm.inline_asm {text[:60]}")
    pointer, predicate, *held = program.inputs(op)
    out = program.outputs(op)[0] if is_load else None
    space = _SPACES[match[2]]

    def words(strand: Any) -> list[np.ndarray]:
        return [strand.per_lane(values.forced(strand.env[i])) for i in held]

    def places(strand: Any) -> tuple[Any, np.ndarray]:
        memory, offset = memory_of(strand, space, strand.env[pointer])
        return memory, places_of(offset, count * size)

    def load(strand: Any) -> None:
        columns = [x.copy() for x in words(strand)]
        with strand.where(values.forced(strand.env[predicate])):
            if strand.mask.any():
                memory, where = places(strand)
                data = memory.load(strand, where).view(f"u{size}")
                for i, column in enumerate(columns):
                    # A narrow load extends its result with zeros.
                    column[strand.mask] = data[:, i]
        strand.env[out] = tuple(columns) if count > 1 else columns[0]

    def store(strand: Any) -> None:
        with strand.where(values.forced(strand.env[predicate])):
            if strand.mask.any():
                memory, where = places(strand)
                data = np.stack([x[strand.mask] for x in words(strand)], axis=1)
                # A narrow store takes the lower bits.
                raw = np.ascontiguousarray(data.astype(f"u{size}"))
                memory.store(strand, where, raw.view(np.uint8).reshape(where.shape))

    return load if is_load else store

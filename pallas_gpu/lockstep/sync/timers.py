# SPDX-License-Identifier: Apache-2.0
"""Clocks, and stores of what they show.

PTX ISA, Special Registers: `%clock`, `%clock64` and `%globaltimer` only ever grow, and
differ between two reads. Here they are one counter, which each read advances.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.lockstep import values
from pallas_gpu.lockstep.accesses import memory_of, places_of
from pallas_gpu.lockstep.assembly import parse
from pallas_gpu.lockstep.not_modelled import NotModelled
from pallas_gpu.lockstep.program import Program, Step
from pallas_gpu.lockstep.registers import assembles


def _ticks(strand: Any) -> int:
    launch = strand.cta.cluster.launch
    launch.ticks += 1
    return launch.ticks


_READ: dict[str, Callable[[Any], int]] = {
    "%clock": _ticks,
    "%clock64": _ticks,
    "%globaltimer": _ticks,
    "%smid": lambda strand: 0,
}


@assembles("%globaltimer", "%clock64", "%smid")
def _read(program: Program, op: ir.Operation, text: str) -> Step:
    (statement,) = parse(text)
    bits = {"mov.u32": 32, "mov.u64": 64}.get(statement.opcode)
    register = statement.operands[-1]
    if bits is None or statement.operands != ("$0", register) or register not in _READ:
        raise NotModelled(f"llvm.inline_asm {text[:60]}")
    (out,) = program.outputs(op)

    def read(strand: Any) -> None:
        now = np.array([_READ[register](strand)], np.uint64)
        strand.env[out] = now.astype(f"u{bits // 8}")

    return read


_MARKS = {"st.shared.v2.b32": 3, "st.global.v2.b32": 1}  # with their address spaces


@assembles(*(f"@$2 {name} " for name in _MARKS), first=True)
def _mark(program: Program, op: ir.Operation, text: str) -> Step:
    """A store of a word and the clock, by the threads in which a predicate holds."""
    clock, store = parse(text)
    if (
        (clock.opcode, clock.operands) != ("mov.u32", ("now", "%clock"))
        or store.opcode not in _MARKS
        or store.guard != "$2"
        or store.operands != ("[$0]", ("$1", "now"))
        or "~{memory}" not in ir.StringAttr(op.attributes["constraints"]).value
        or "has_side_effects" not in op.attributes
    ):
        raise NotModelled(f"llvm.inline_asm {text[:60]}")
    address, word, predicate = program.inputs(op)
    space = _MARKS[store.opcode]

    def mark(strand: Any) -> None:
        with strand.where(values.forced(strand.env[predicate])):
            if not strand.mask.any():
                return
            memory, where = memory_of(
                strand, space, strand.env[address].astype(np.int64)
            )
            held = strand.per_lane(values.forced(strand.env[word]))[strand.mask]
            now = np.full(len(held), _ticks(strand))
            data = np.stack([held, now], axis=1).astype(np.uint32)
            memory.store(strand, places_of(where, 8), data.view(np.uint8))

    return mark

# SPDX-License-Identifier: Apache-2.0
"""Predicates that threads combine where they meet (PTX ISA: barrier.red, vote.sync)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from tests.support.lockstep.assembly import parse
from tests.support.lockstep.control import Barrier, meet
from tests.support.lockstep.engine import LANES, Wait
from tests.support.lockstep.not_modelled import NotModelled
from tests.support.lockstep.program import Program, Step
from tests.support.lockstep.registers import ASSEMBLY, AssemblyUnit
from tests.support.lockstep.values import forced


def _all(program: Program, op: ir.Operation, text: str) -> Step:
    """A predicate of registers, combined by all threads of a barrier or a warp."""
    first, meet, last = parse(text)
    (value, *place), (out,) = program.inputs(op), program.outputs(op)
    name = meet.operands[0]
    plain = first.operands == (name, "$1", "0") and last.operands == (
        "$0",
        "1",
        "0",
        name,
    )
    if (first.opcode, last.opcode) != ("setp.ne.u32", "selp.u32") or not plain:
        raise NotModelled(f"llvm.inline_asm {text[:80]}")
    if meet.opcode == "vote.sync.all.pred":
        if meet.operands[1:] != (name, "0xffffffff"):
            raise NotModelled(f"llvm.inline_asm {text[:80]}")
        return _vote_all(value, out)
    _, number, count, predicate = meet.operands
    if number != "$2" or predicate != name:
        raise NotModelled(f"llvm.inline_asm {text[:80]}")
    return _barrier_all(value, place[0], int(count), out)


def _vote_all(value: int, out: int) -> Step:
    def vote(strand: Any) -> None:
        strand.whole_warps("vote.sync")
        each = strand.per_lane(forced(strand.env[value])).reshape(-1, LANES)
        strand.env[out] = np.repeat(each.all(axis=1), LANES).astype(np.uint32)

    return vote


def _barrier_all(value: int, place: int, count: int, out: int) -> Step:
    def barrier(strand: Any) -> Iterator[Wait]:
        holds = strand.per_lane(forced(strand.env[value])).astype(bool)
        name = strand.uniform(strand.env[place])
        where = strand.cta.barriers.setdefault(name, Barrier())
        where.holds &= bool(holds[strand.active()].all())
        yield from meet(strand, name, count, "barrier.red")
        strand.env[out] = np.array([where.held], np.uint32)

    return barrier


ASSEMBLY.append(AssemblyUnit("barrier.cta.red.and.pred", _all))
ASSEMBLY.append(AssemblyUnit("vote.sync.all.pred", _all))

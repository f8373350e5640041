# SPDX-License-Identifier: Apache-2.0
"""What threads combine where they meet (PTX ISA: barrier.red, vote, match, redux)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.lockstep.assembly import parse
from pallas_gpu.lockstep.engine import LANES, Wait
from pallas_gpu.lockstep.not_modelled import NotModelled
from pallas_gpu.lockstep.program import Program, Step, runs
from pallas_gpu.lockstep.registers import assembles
from pallas_gpu.lockstep.sync.control import Barrier, meet
from pallas_gpu.lockstep.values import forced


@assembles("barrier.cta.red.and.pred", "vote.sync.all.pred")
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
    return _of_warps("vote.sync", value, out, lambda x: x.all(axis=1).astype(np.uint32))


def _of_warps(
    name: str, value: int, out: int, combine: Callable[[np.ndarray], np.ndarray]
) -> Step:
    """What a function makes of a row of lanes is the result of all of them."""

    def step(strand: Any) -> None:
        strand.whole_warps(name)
        each = strand.per_lane(forced(strand.env[value])).reshape(-1, LANES)
        strand.env[out] = np.repeat(combine(each), LANES)

    return step


@runs("nvvm.vote.sync")
def _vote(program: Program, op: ir.Operation) -> Step:
    (_, value), (out,) = program.inputs(op), program.outputs(op)
    _require_full(op.operands[0])
    if _kind(op) == "ballot":
        return _of_warps("vote.sync", value, out, lambda x: _packed(x != 0))
    combine = {"any": np.any, "all": np.all}[_kind(op)]
    return _of_warps("vote.sync", value, out, lambda x: combine(x != 0, axis=1))


def _packed(each: np.ndarray) -> np.ndarray:
    """Bit i of the last axis is element i of it."""
    lanes = np.arange(LANES, dtype=np.uint32)
    return (each.astype(np.uint32) << lanes).sum(axis=-1, dtype=np.uint32)


@assembles("match.any.sync.")
def _match(program: Program, op: ir.Operation, text: str) -> Step:
    """PTX ISA, match.sync.any: the mask of the threads that have the same value."""
    (value,), (out,) = program.inputs(op), program.outputs(op)
    (match,) = parse(text)
    if match.operands != ("$0", "$1", "0xffffffff"):
        raise NotModelled(f"llvm.inline_asm {text[:80]}")

    def step(strand: Any) -> None:
        strand.whole_warps("match.sync")
        each = strand.per_lane(forced(strand.env[value])).reshape(-1, LANES)
        same = each[:, :, None] == each[:, None, :]
        strand.env[out] = _packed(same).reshape(-1)

    return step


_INTEGERS: dict[str, tuple[np.ufunc, type]] = {
    "add": (np.add, np.uint32),
    "and": (np.bitwise_and, np.uint32),
    "or": (np.bitwise_or, np.uint32),
    "xor": (np.bitwise_xor, np.uint32),
    "umax": (np.maximum, np.uint32),
    "umin": (np.minimum, np.uint32),
    "max": (np.maximum, np.int32),
    "min": (np.minimum, np.int32),
}


@runs("nvvm.redux.sync")
def _redux(program: Program, op: ir.Operation) -> Step:
    (value, _), (out,) = program.inputs(op), program.outputs(op)
    _require_full(op.operands[1])
    kind = _kind(op)
    if kind not in _INTEGERS:
        if not _is_set(op, "nan") or _is_set(op, "abs"):
            raise NotModelled(f"nvvm.redux.sync {kind} without NaN, or of absolutes")
        return _of_warps("redux.sync", value, out, lambda x: extremes(kind, x))
    combine, type_ = _INTEGERS[kind]

    def integers(each: np.ndarray) -> np.ndarray:
        result = combine.reduce(each.view(type_), axis=1, dtype=type_)
        return result.view(each.dtype)

    return _of_warps("redux.sync", value, out, integers)


def extremes(kind: str, each: np.ndarray) -> np.ndarray:
    """Of rows: a NaN gives the canonical one; +0.0 exceeds -0.0.

    PTX ISA, redux.sync.NaN, which says it as max.NaN does; tcgen05.ld.red.NaN.
    """
    # In ascending order, of equal numbers those with a sign first.
    order = np.lexsort((~np.signbit(each), each), axis=1)
    place = order[:, -1 if kind == "fmax" else 0]
    result = np.take_along_axis(each, place[:, None], axis=1)[:, 0]
    canonical = np.uint32(0x7FFFFFFF).view(np.float32)
    return np.where(np.isnan(each).any(axis=1), canonical, result)


def _is_set(op: ir.Operation, name: str) -> bool:
    return name in op.attributes and bool(ir.BoolAttr(op.attributes[name]).value)


def _kind(op: ir.Operation) -> str:
    return str(op.attributes["kind"]).split("<")[-1].split()[-1].strip(" >")


def _require_full(mask: ir.Value) -> None:
    made = mask.owner
    full = made.name == "arith.constant" and made.attributes["value"].value == -1
    if not full:
        raise NotModelled("a mask of a part of the warp's lanes")


def _barrier_all(value: int, place: int, count: int, out: int) -> Step:
    def barrier(strand: Any) -> Iterator[Wait]:
        holds = strand.per_lane(forced(strand.env[value])).astype(bool)
        name = strand.uniform(strand.env[place])
        where = strand.cta.barriers.setdefault(name, Barrier())
        where.holds &= bool(holds[strand.active()].all())
        yield from meet(strand, name, count, "barrier.red")
        strand.env[out] = np.array([where.held], np.uint32)

    return barrier

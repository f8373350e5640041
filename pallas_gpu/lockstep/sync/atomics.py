# SPDX-License-Identifier: Apache-2.0
"""Atomic operations on elements, and stores to the SMEM of another block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.errors import PtxError
from pallas_gpu.lockstep import values
from pallas_gpu.lockstep.accesses import (
    BUFFER_SHIFT,
    SMEM_BASE,
    cluster_address,
    shared_of_cluster,
)
from pallas_gpu.lockstep.assembly import dtype_of, parse
from pallas_gpu.lockstep.engine import LANES, Wait
from pallas_gpu.lockstep.not_modelled import NotModelled
from pallas_gpu.lockstep.predication import predicated
from pallas_gpu.lockstep.program import Program, Step
from pallas_gpu.lockstep.registers import assembles

_STORE = "st.shared::cluster.b32"
# PTX ISA, Parallel Synchronization: red, atom: the types of each operation. `red` does
# not exchange.
_TYPES = {
    "add": (
        "u32",
        "s32",
        "u64",
        "f32",
        "f64",
        "noftz.f16",
        "noftz.bf16",
        "noftz.f16x2",
        "noftz.bf16x2",
    ),
    **dict.fromkeys(("min", "max"), ("u32", "s32", "u64", "s64")),
    **dict.fromkeys(("and", "or", "xor"), ("b32", "b64")),
    "exch": ("b32", "b64"),
    "cas": ("b16", "b32", "b64"),
}
_SCOPES = (
    *((scope, "global") for scope in ("cta", "cluster", "gpu", "sys")),
    *((scope, "shared::cta") for scope in ("cta", "cluster", "gpu", "sys")),
    *((scope, "shared::cluster") for scope in ("cluster", "gpu", "sys")),
)
# `red` does not acquire.
_ORDERS = ("relaxed", "release", "acquire", "acq_rel")
# Of float32 in GMEM: the type, and how many adjacent elements one `red` adds to.
_VECTORS = {"v2.f32": 2, "v4.f32": 4}
_SMALLEST = np.finfo(np.float32).tiny


def _flushed(x: Any) -> Any:
    return np.copysign(np.float32(0), x) if abs(x) < _SMALLEST else x


def _new(operation: str, space: str, old: Any, values: list[Any]) -> Any:
    """What one operation makes of an element."""
    match operation:
        case "add" if old.dtype == np.float32 and space == "global":
            return _flushed(_flushed(old) + _flushed(values[0]))
        case "add":
            return old + values[0]
        case "min" | "max":
            return min(old, values[0]) if operation == "min" else max(old, values[0])
        case "and":
            return old & values[0]
        case "or":
            return old | values[0]
        case "xor":
            return old ^ values[0]
        case "exch":
            return values[0]
        case _:
            return values[1] if old == values[0] else old


@assembles(*(f"atom.{x}." for x in _ORDERS), *(f"red.{x}." for x in _ORDERS[:2]))
def _atomic(program: Program, op: ir.Operation, text: str) -> Step:
    """PTX ISA, red and atom: the updates of the threads are one by one."""
    (statement,) = parse(text)
    name, order, scope, space, operation, type_ = statement.opcode.split(".", 5)
    returns, first = name == "atom", int(name == "atom")
    pointer, *amounts = program.inputs(op)
    predicate = None
    count = 1
    if type_ in _VECTORS and not returns and (operation, space) == ("add", "global"):
        count, type_ = _VECTORS[type_], "f32"
    if statement.guard:
        if returns:
            # The result's register before the instruction.
            *amounts, predicate, held = amounts
        else:
            *amounts, predicate = amounts
    numbers: list[Any] = [f"${first + 1 + i}" for i in range(len(amounts))]
    places = [f"[${first}]", *([tuple(numbers)] if count > 1 else numbers)]
    expected = (*(["$0"] if returns else []), *places)
    if (
        order not in (_ORDERS if returns else _ORDERS[:2])
        or (scope, space) not in _SCOPES
        or type_ not in _TYPES.get(operation, ())
        or statement.operands != expected
        or statement.guard not in ("", f"${first + 1 + len(amounts)}")
        or len(amounts) != (2 if operation == "cas" else count)
        or (not returns and operation in ("exch", "cas"))
    ):
        raise NotModelled(f"llvm.inline_asm {text[:60]}")
    kind = dtype_of(type_)
    # Each half, or element, is updated at once, not all of them together.
    size = kind.itemsize * (2 if type_.endswith("x2") else count)
    out = program.outputs(op)[0] if returns else None

    def update(strand: Any) -> None:
        lanes = np.flatnonzero(strand.active())
        result = np.zeros(strand.lanes, f"u{min(size, 8)}")
        if predicate is not None and returns:
            before = strand.per_lane(values_forced(strand, held))
            result[:] = before.view(result.dtype)
        if lanes.size:
            addresses = strand.per_lane(strand.env[pointer])[lanes].astype(np.int64)
            memory, offsets = _memory(strand, space, addresses)
            if (offsets % size).any():
                raise PtxError("an atomic operation at an unaligned address")
            memory.update(strand, offsets[:, None] + np.arange(size))
            operands = [
                np.ascontiguousarray(strand.per_lane(values_forced(strand, i)))
                .view(kind)
                .reshape(strand.lanes, -1)
                for i in amounts
            ]
            for lane, offset in zip(lanes, offsets, strict=True):
                word = memory.data[offset : offset + size].view(kind)
                result[lane] = word.view(result.dtype)[0]
                _synchronise(strand, memory, int(lane), int(offset), order, scope)
                with np.errstate(all="ignore"):
                    for i in range(len(word)):
                        given = (
                            [operands[i][lane, 0]]
                            if count > 1
                            else [value[lane, i] for value in operands]
                        )
                        word[i] = _new(operation, space, word[i], given)
        if out is not None:
            strand.env[out] = result

    # Relaxed ones may poll for what another device stores.
    waits = order in ("acquire", "acq_rel") or scope == "sys"
    reads = returns and waits and space == "global"
    step = predicated(predicate, update)
    return _polled(program, step) if reads else step


def _polled(program: Program, step: Step) -> Step:
    """A step that a loop may repeat until others have done something."""
    program.polls = True

    def poll(strand: Any) -> Iterator[Wait]:
        step(strand)
        yield Wait(lambda: True, lambda: "nothing")

    return poll


def _synchronise(
    strand: Any, memory: Any, lane: int, offset: int, order: str, scope: str
) -> None:
    """PTX ISA, Memory Consistency Model: morally strong, release, acquire."""
    cta = strand.cta
    require_scope(memory, offset, scope, cta)
    row = int(strand.row_of_lane[lane])
    if order in ("release", "acq_rel"):
        memory.release(offset, cta.clocks.released(row, lane % LANES))
    if order in ("acquire", "acq_rel"):
        cta.clocks.acquire(np.array([row]), memory.released.get(offset))


def require_scope(memory: Any, offset: int, scope: str, cta: Any) -> None:
    """Raises unless the scopes of all operations on a word include their threads."""
    user = scope, cta
    others = memory.scopes.setdefault(offset, [])
    for other_scope, other in others:
        pairs = {
            "cta": (cta, other),
            "cluster": (cta.cluster, other.cluster),
            "gpu": (cta.cluster.launch, other.cluster.launch),
        }
        for narrow in {scope, other_scope} & pairs.keys():
            one, two = pairs[narrow]
            if one is not two:
                raise PtxError(
                    "atomic operations whose scopes exclude each other: "
                    f"{scope} and {other_scope}"
                )
    if user not in others:
        others.append(user)


def values_forced(strand: Any, number: int) -> np.ndarray:
    """An operand as computed by now, contiguous."""
    return np.ascontiguousarray(values.forced(strand.env[number]))


def _memory(strand: Any, space: str, addresses: np.ndarray) -> tuple[Any, np.ndarray]:
    if space == "shared::cta":
        return strand.cta.smem, addresses - SMEM_BASE
    if space == "shared::cluster":
        return shared_of_cluster(strand, addresses)
    numbers, offsets = np.divmod(addresses, 1 << BUFFER_SHIFT)
    if (numbers != numbers[0]).any():
        raise NotModelled("an atomic operation on several buffers")
    return strand.cta.cluster.launch.buffer(int(numbers[0])), offsets


@assembles(f"{_STORE} [$0], $1;")
def _store_remote(program: Program, op: ir.Operation, text: str) -> Step:
    """PTX ISA, st: to an address in the window of the cluster's SMEM."""
    (statement,) = parse(text)
    if statement.opcode != _STORE or statement.operands != ("[$0]", "$1"):
        raise NotModelled(f"llvm.inline_asm {text[:60]}")
    pointer, value = program.inputs(op)

    def store(strand: Any) -> None:
        active = strand.active()
        if not active.any():
            return
        addresses = strand.per_lane(strand.env[pointer])[active]
        targets = [cluster_address(strand, int(address)) for address in addresses]
        cta = targets[0][0]
        if any(other is not cta for other, _ in targets):
            raise NotModelled("a store to the SMEM of several blocks")
        offsets = np.array([offset for _, offset in targets])
        if (offsets % 4).any():
            raise PtxError("a store of 4 bytes to an unaligned address")
        data = strand.per_lane(values.forced(strand.env[value]))[active]
        raw = np.ascontiguousarray(data, np.uint32).view(np.uint8).reshape(-1, 4)
        places = offsets[:, None] - SMEM_BASE + np.arange(4)
        cta.smem.store(strand, places, raw)

    return store

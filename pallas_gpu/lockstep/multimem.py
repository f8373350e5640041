# SPDX-License-Identifier: Apache-2.0
"""Accesses through multimem addresses: one access to the memory of each device.

PTX ISA, multimem.ld_reduce, multimem.st, multimem.red.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.lockstep import values
from pallas_gpu.lockstep.accesses import BUFFER_SHIFT, places_of
from pallas_gpu.lockstep.assembly import parse
from pallas_gpu.lockstep.engine import LANES
from pallas_gpu.lockstep.memory import Memory
from pallas_gpu.lockstep.not_modelled import NotModelled
from pallas_gpu.lockstep.program import Program, Step
from pallas_gpu.lockstep.registers import ASSEMBLY, AssemblyUnit
from pallas_gpu.lockstep.sync.atomics import require_scope

_LOAD = re.compile(
    r"multimem\.ld_reduce\.relaxed\.sys\.global\.(add|min|max|and|or|xor)"
    r"(?:\.v([248]))?\.(\w+)"
)
_STORE = re.compile(r"multimem\.st\.relaxed\.sys\.global(?:\.v([24]))?\.f32")
_RED = re.compile(r"multimem\.red\.(release|relaxed)\.sys\.global\.add\.u32")
_COMBINE: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_KINDS = {
    "f32": np.dtype(np.float32),
    "f16x2": np.dtype(np.float16),
    "bf16x2": np.dtype(ml_dtypes.bfloat16),
    "e5m2x4": np.dtype(ml_dtypes.float8_e5m2),
    "e4m3x4": np.dtype(ml_dtypes.float8_e4m3fn),
    **{f"{a}{n}": np.dtype(f"{b}{n // 8}") for n in (32, 64) for a, b in
       (("u", "u"), ("s", "i"), ("b", "u"))},
}  # fmt: skip


def _reached(strand: Any, pointer: int, size: int) -> tuple[list[Memory], np.ndarray]:
    """The memory of each device, and the bytes in it, [active threads, bytes]."""
    address = strand.per_lane(strand.env[pointer]).astype(np.int64)[strand.active()]
    number = address >> BUFFER_SHIFT
    if not (number == number[0]).all():
        raise NotModelled("a multimem access to several buffers")
    memories = strand.cta.cluster.launch.everywhere(int(number[0]))
    return memories, places_of(address & (1 << BUFFER_SHIFT) - 1, size)


def _store(program: Program, op: ir.Operation, text: str) -> Step:
    (statement,) = parse(text)
    if (form := _STORE.fullmatch(statement.opcode)) is None:
        raise NotModelled(f"llvm.inline_asm {text[:60]}")
    count = int(form[1] or 1)
    pointer, *rest = program.inputs(op)
    words, guards = rest[:count], rest[count:]

    def store(strand: Any) -> None:
        if not strand.active().any():
            return
        memories, places = _reached(strand, pointer, 4 * count)
        held = [strand.per_lane(values.forced(strand.env[word])) for word in words]
        raw = [np.ascontiguousarray(x[strand.active()]).view(np.uint32) for x in held]
        data = np.stack(raw, axis=1).view(np.uint8)
        for memory in memories:
            memory.store(strand, places, data)

    def guarded(strand: Any) -> None:
        with strand.where(values.forced(strand.env[guards[0]])):
            store(strand)

    return guarded if guards else store


def _load_reduce(program: Program, op: ir.Operation, text: str) -> Step:
    (statement,) = parse(text)
    form = _LOAD.fullmatch(statement.opcode)
    if form is None or form[3] not in _KINDS:
        raise NotModelled(f"llvm.inline_asm {text[:60]}")
    reduction, count, kind = form[1], int(form[2] or 1), _KINDS[form[3]]
    width = 8 if kind.itemsize == 8 else 4
    (pointer,), (out,) = program.inputs(op), program.outputs(op)
    # Sums of narrow floats have a wider accumulator.
    wide = reduction == "add" and kind.itemsize < 4

    def load(strand: Any) -> None:
        result = np.zeros((strand.lanes, count), f"u{width}")
        active = strand.active()
        if active.any():
            memories, places = _reached(strand, pointer, width * count)
            each = [memory.load(strand, places).view(kind) for memory in memories]
            if wide:
                each = [x.astype(np.float32) for x in each]
            with np.errstate(all="ignore"):
                total = functools.reduce(_COMBINE[reduction], each).astype(kind)
            result[active] = np.ascontiguousarray(total).view(result.dtype)
        words = tuple(result[:, i] for i in range(count))
        strand.env[out] = words if count > 1 else words[0]

    return load


def _red(program: Program, op: ir.Operation, text: str) -> Step:
    (statement,) = parse(text)
    if (form := _RED.fullmatch(statement.opcode)) is None:
        raise NotModelled(f"llvm.inline_asm {text[:60]}")
    pointer, amount = program.inputs(op)

    def add(strand: Any) -> None:
        cta, clocks = strand.cta, strand.cta.clocks
        for lane in np.flatnonzero(strand.active()):
            row, thread = int(strand.row_of_lane[lane]), int(lane) % LANES
            one = (strand.threads % LANES == thread) & (strand.row_of_lane == row)
            known = clocks.fenced.get((row, thread))
            if form[1] == "release":
                known = clocks.released(row, thread)
            by = strand.per_lane(values.forced(strand.env[amount]))[lane]
            with strand.where(one):
                memories, places = _reached(strand, pointer, 4)
                for memory in memories:
                    memory.update(strand, places)
                    offset = int(places[0, 0])
                    require_scope(memory, offset, "sys", cta)
                    memory.release(offset, known)
                    word = memory.data[offset : offset + 4].view(np.uint32)
                    with np.errstate(all="ignore"):
                        word[0] += np.uint32(by)

    return add


def _fence_alias(program: Program, op: ir.Operation, text: str) -> Step:
    """Both kinds of addresses are the same bytes here."""
    return lambda strand: None


ASSEMBLY += [
    AssemblyUnit("multimem.st.", _store),
    AssemblyUnit("multimem.ld_reduce.", _load_reduce),
    AssemblyUnit("multimem.red.", _red),
    AssemblyUnit("fence.proxy.alias", _fence_alias),
]

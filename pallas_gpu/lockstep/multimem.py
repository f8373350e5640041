# SPDX-License-Identifier: Apache-2.0
"""Accesses through multimem addresses: one access to the memory of each device.

PTX ISA, multimem.ld_reduce, multimem.st, multimem.red.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.lockstep import values
from pallas_gpu.lockstep.accesses import BUFFER_SHIFT, places_of
from pallas_gpu.lockstep.assembly import dtype_of
from pallas_gpu.lockstep.engine import LANES
from pallas_gpu.lockstep.memory import Memory
from pallas_gpu.lockstep.not_modelled import NotModelled
from pallas_gpu.lockstep.predication import predicated
from pallas_gpu.lockstep.program import Program, Step
from pallas_gpu.lockstep.registers import assembles, form_of
from pallas_gpu.lockstep.sync.atomics import require_scope

_LOAD = re.compile(
    r"multimem\.ld_reduce\.relaxed\.sys\.global\.(add|min|max|and|or|xor)"
    r"(?:\.v([248]))?\.(f32|b?f16x2|e[45]m[23]x4|[usb](?:32|64))"
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


def _reached(strand: Any, pointer: int, size: int) -> tuple[list[Memory], np.ndarray]:
    """The memory of each device, and the bytes in it, [active threads, bytes]."""
    address = strand.per_lane(strand.env[pointer]).astype(np.int64)[strand.active()]
    number = address >> BUFFER_SHIFT
    if not (number == number[0]).all():
        raise NotModelled("a multimem access to several buffers")
    memories = strand.cta.cluster.launch.everywhere(int(number[0]))
    return memories, places_of(address & (1 << BUFFER_SHIFT) - 1, size)


@assembles("multimem.st.")
def _store(program: Program, op: ir.Operation, text: str) -> Step:
    _, form = form_of(text, _STORE)
    count = int(form[1] or 1)
    pointer, *rest = program.inputs(op)
    words, (guard, *_) = rest[:count], [*rest[count:], None]

    def store(strand: Any) -> None:
        if not strand.active().any():
            return
        memories, places = _reached(strand, pointer, 4 * count)
        held = [strand.per_lane(values.forced(strand.env[word])) for word in words]
        raw = [np.ascontiguousarray(x[strand.active()]).view(np.uint32) for x in held]
        data = np.stack(raw, axis=1).view(np.uint8)
        for memory in memories:
            memory.store(strand, places, data)

    return predicated(guard, store)


@assembles("multimem.ld_reduce.")
def _load_reduce(program: Program, op: ir.Operation, text: str) -> Step:
    _, form = form_of(text, _LOAD)
    reduction, count, kind = form[1], int(form[2] or 1), dtype_of(form[3])
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


@assembles("multimem.red.")
def _red(program: Program, op: ir.Operation, text: str) -> Step:
    _, form = form_of(text, _RED)
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


@assembles("fence.proxy.alias")
def _fence_alias(program: Program, op: ir.Operation, text: str) -> Step:
    """Both kinds of addresses are the same bytes here."""
    return lambda strand: None

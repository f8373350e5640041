# SPDX-License-Identifier: Apache-2.0
"""Vectors and structs of registers, exchange between lanes, and inline assembly."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.lockstep import elements, values
from pallas_gpu.lockstep.assembly import Statement, parse
from pallas_gpu.lockstep.engine import LANES
from pallas_gpu.lockstep.not_modelled import NotModelled
from pallas_gpu.lockstep.program import Program, Step, runs

# Factories of inline PTX, which get its text too, and what their texts contain.
Assembly = Callable[[Program, ir.Operation, str], Step]
_ASSEMBLY: list[tuple[re.Pattern[str], Assembly]] = []


def assembles(*prefixes: str, first: bool = False) -> Callable[[Assembly], Assembly]:
    """Registers a factory for inline PTX with instructions that begin in some way.

    Args:
      first: in front of the others, one of whose prefixes the names contain.
    """

    def register(factory: Assembly) -> Assembly:
        patterns = (re.compile(rf"(?<!\w\.){re.escape(x)}") for x in prefixes)
        units = [(pattern, factory) for pattern in patterns]
        _ASSEMBLY[:] = [*units, *_ASSEMBLY] if first else [*_ASSEMBLY, *units]
        return factory

    return register


def form_of(text: str, opcode: re.Pattern[str]) -> tuple[Statement, re.Match[str]]:
    """The one statement of a text, whose opcode a pattern describes.

    Raises:
      NotModelled: its opcode is another one.
    """
    (statement,) = parse(text)
    match = opcode.fullmatch(statement.opcode)
    if match is None:
        raise NotModelled(f"llvm.inline_asm {text[:80]}")
    return statement, match


@runs("vector.broadcast")
def _broadcast(program: Program, op: ir.Operation) -> Step:
    length = op.results[0].type.shape[0]

    def broadcast(x: np.ndarray) -> np.ndarray:
        x = x[:, None] if x.ndim == 1 else x
        return np.repeat(x, length, axis=1) if x.shape[1] == 1 else x

    return elements.applied(program, op, broadcast)


@runs("vector.extract")
def _extract(program: Program, op: ir.Operation) -> Step:
    (source, *_), (out,) = program.inputs(op), program.outputs(op)
    (lane,) = ir.DenseI64ArrayAttr(op.attributes["static_position"])
    if len(op.operands) > 1:
        raise NotModelled("vector.extract at a dynamic position")

    def extract(strand: Any) -> None:
        x = strand.env[source]
        if isinstance(x, values.LazyVector):
            strand.env[out] = x.elements[lane]
        elif isinstance(x, values.Lazy):
            strand.env[out] = values.Lazy(lambda: x.force()[:, lane])
        else:
            strand.env[out] = x[:, lane]

    return extract


@runs("vector.insert")
def _insert(program: Program, op: ir.Operation) -> Step:
    (value, vector, *dynamic), (out,) = program.inputs(op), program.outputs(op)
    place = list(ir.DenseI64ArrayAttr(op.attributes["static_position"]))
    if dynamic or len(place) != 1:
        raise NotModelled("vector.insert at a dynamic position")

    def insert(strand: Any) -> None:
        held = np.array(strand.per_lane(values.forced(strand.env[vector])))
        held[:, place[0]] = values.forced(strand.env[value])
        strand.env[out] = held

    return insert


@runs("vector.extract_strided_slice")
def _slice(program: Program, op: ir.Operation) -> Step:
    (first,), (size,), (step,) = (
        [x.value for x in ir.ArrayAttr(op.attributes[name])]
        for name in ("offsets", "sizes", "strides")
    )
    chosen = slice(first, first + size * step, step)
    return elements.applied(program, op, lambda x: x[:, chosen])


@runs("llvm.insertelement", "llvm.extractelement")
def _element(program: Program, op: ir.Operation) -> Step:
    (vector, *value, at), (out,) = program.inputs(op), program.outputs(op)

    def element(strand: Any) -> None:
        held = np.array(strand.per_lane(values.forced(strand.env[vector])))
        place = strand.uniform(strand.env[at])
        if value:
            held[:, place] = values.forced(strand.env[value[0]])
            strand.env[out] = held
        else:
            strand.env[out] = held[:, place]

    return element


@runs("vector.from_elements")
def _from_elements(program: Program, op: ir.Operation) -> Step:
    sources, (out,) = program.inputs(op), program.outputs(op)

    def gather(strand: Any) -> None:
        elements = [strand.env[i] for i in sources]
        if any(isinstance(x, values.Lazy) for x in elements):
            strand.env[out] = values.LazyVector(elements)
        else:
            strand.env[out] = values.stack(elements)

    return gather


@runs("vector.shuffle")
def _shuffle(program: Program, op: ir.Operation) -> Step:
    order = list(ir.DenseI64ArrayAttr(op.attributes["mask"]))

    def shuffle(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.concatenate(np.broadcast_arrays(a, b), axis=-1)[..., order]

    return elements.applied(program, op, shuffle)


@runs("vector.bitcast", "llvm.bitcast")
def _bitcast(program: Program, op: ir.Operation) -> Step:
    (source,), (out,) = program.inputs(op), program.outputs(op)
    before, after = op.operands[0].type, op.results[0].type

    def bitcast(strand: Any) -> None:
        x = strand.env[source]
        if isinstance(x, values.Lazy):
            made = values.Lazy(lambda: values.bitcast(x.force(), before, after))
            strand.env[out] = made
        else:
            strand.env[out] = values.bitcast(x, before, after)

    return bitcast


@runs("llvm.extractvalue")
def _extractvalue(program: Program, op: ir.Operation) -> Step:
    (source,), (out,) = program.inputs(op), program.outputs(op)
    (position,) = ir.DenseI64ArrayAttr(op.attributes["position"])
    if re.match(r"!llvm.struct<\(ptr(<3>)?, ptr(<3>)?, i64", str(op.operands[0].type)):
        # The descriptor of a memref: its aligned pointer, or the offset from it.
        def of_descriptor(strand: Any) -> None:
            held = strand.env[source]
            if isinstance(held, dict):
                held = held[position,]
            elif position == 2:
                held = np.zeros(1, np.uint64)
            strand.env[out] = held

        return of_descriptor

    def extract(strand: Any) -> None:
        strand.env[out] = strand.env[source][position]

    return extract


@runs("nvvm.shfl.sync")
def _shfl(program: Program, op: ir.Operation) -> Step:
    (_, value, place, clamp), (out,) = program.inputs(op), program.outputs(op)
    kind = str(op.attributes["kind"]).split("<")[-1].strip(" >")
    if "return_value_and_is_valid" in op.attributes:
        raise NotModelled("nvvm.shfl.sync with a predicate")

    def shuffle(strand: Any) -> None:
        strand.whole_warps("shfl.sync")
        env = strand.env
        x = strand.per_lane(values.forced(env[value]))
        lane = strand.threads.astype(np.int64) % LANES
        b, c = (env[i].astype(np.int64) for i in (place, clamp))
        source = source_lane(kind, lane, b, c)
        env[out] = x[np.arange(strand.lanes) // LANES * LANES + source]

    return shuffle


def source_lane(
    kind: str, lane: np.ndarray, b: np.ndarray, c: np.ndarray
) -> np.ndarray:
    """The lane that each lane reads, its own where it would leave the segment.

    PTX ISA, shfl.sync: c has the segment's mask in bits 8-12 and the clamp in 0-4.
    """
    b, segment, clamp = b & 31, c >> 8 & 31, c & 31
    last = lane & segment | clamp & ~segment
    match kind:
        case "up":
            source = lane - b
            inside = source >= last
        case "down":
            source = lane + b
            inside = source <= last
        case "bfly":
            source = lane ^ b
            inside = source <= last
        case "idx":
            source = lane & segment | b & ~segment
            inside = source <= last
        case _:
            raise NotModelled(f"nvvm.shfl.sync {kind}")
    return np.where(inside, source, lane)


@runs("llvm.inline_asm")
def _inline_asm(program: Program, op: ir.Operation) -> Step:
    text = ir.StringAttr(op.attributes["asm_string"]).value
    if not text.strip():
        return _nothing(program, op)
    if len(op.results) == 1:
        step = elements.approximation(program, op, text)
        if step is not None:
            return step
    for begins, factory in _ASSEMBLY:
        if begins.search(text) is not None:
            return factory(program, op, text)
    raise NotModelled(f"llvm.inline_asm {text[:60]}")


def _nothing(program: Program, op: ir.Operation) -> Step:
    """Text without an instruction: the results are the tied operands."""
    sources = program.inputs(op)
    if not op.results:
        return lambda strand: None
    (out,) = program.outputs(op)
    tied = ir.StringAttr(op.attributes["constraints"]).value.split(",")
    order = [int(x) for x in tied if x.isdigit()]
    if order != list(range(len(sources))):
        raise NotModelled("llvm.inline_asm without text, of untied operands")

    def same(strand: Any) -> None:
        held = tuple(strand.env[i] for i in sources)
        strand.env[out] = held if len(held) > 1 else held[0]

    return same

# SPDX-License-Identifier: Apache-2.0
"""Conversion of a layout's registers to the words of inline assembly, and back.

A register of a layout is a vector; PTX has registers of 16, 32 or 64 bits. Floats of 32
and 64 bits keep their type, since a bitcast would cost a move.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_gpu.mosaic.elements import dtypes

# LLVM's NVPTX constraint letter for each type of a word.
_CONSTRAINTS = {"i16": "h", "i32": "r", "i64": "l", "f32": "f", "f64": "d"}


def constraint(word: ir.Value) -> str:
    """The constraint letter of a word."""
    return _CONSTRAINTS[str(word.type)]


def to_words(values: Sequence[ir.Value]) -> list[list[ir.Value]]:
    """The words of each register, least significant first."""
    done: dict[ir.Value, list[ir.Value]] = {}
    for value in values:
        if value not in done:
            done[value] = _split(value)
    return [done[value] for value in values]


def from_words(results: Sequence[ir.Value], like: Sequence[ir.Value]) -> list[ir.Value]:
    """Registers of the same types as `like`, assembled from their words in order."""
    values, position = [], 0
    for register in like:
        count = _count(register)
        values.append(_join(results[position : position + count], register.type))
        position += count
    return values


def assemble(
    tied: Sequence[ir.Value],
    operands: Sequence[ir.Value],
    text: str,
    constraints: Sequence[str],
) -> list[ir.Value]:
    """Volatile inline assembly; each result has the type of a tied word."""
    types = [word.type for word in tied]
    joined = ",".join(constraints)
    if len(types) == 1:
        return [
            llvm.inline_asm(types[0], operands, text, joined, has_side_effects=True)
        ]
    fields = ", ".join(map(str, types))
    struct = ir.Type.parse(f"!llvm.struct<({fields})>")
    result = llvm.inline_asm(struct, operands, text, joined, has_side_effects=True)
    return [llvm.extractvalue(t, result, [i]) for i, t in enumerate(types)]


def _bits(value: ir.Value) -> tuple[int, int]:
    """The number of lanes of a register, and the bits of each."""
    return dtypes.length(value) or 1, value.type.element_type.width


def _count(value: ir.Value) -> int:
    lanes, width = _bits(value)
    return max(lanes * width // 32, 1) if width < 64 else lanes


def _word_type(value: ir.Value) -> ir.Type:
    """The type of a register's words."""
    lanes, width = _bits(value)
    element = value.type.element_type
    if width >= 32:
        return element
    return ir.IntegerType.get_signless(32 if lanes * width % 32 == 0 else 16)


def _split(value: ir.Value) -> list[ir.Value]:
    lanes, width = _bits(value)
    if width >= 32:
        return [dtypes.extract(value, i) for i in range(lanes)]
    word, total = _word_type(value), lanes * width
    if total % word.width == 0:
        packed = vector.bitcast(ir.VectorType.get([total // word.width], word), value)
        return [dtypes.extract(packed, i) for i in range(total // word.width)]
    # Less than 16 bits: a single byte, or a few bools.
    whole = vector.bitcast(
        ir.VectorType.get([1], ir.IntegerType.get_signless(total)), value
    )
    return [arith.extui(word, dtypes.extract(whole, 0))]


def _join(results: Sequence[ir.Value], type_: ir.Type) -> ir.Value:
    lanes, width = type_.shape[0], type_.element_type.width
    total = lanes * width
    if width >= 32:
        return dtypes.pack(list(results))
    if total >= 16:
        return vector.bitcast(type_, dtypes.pack(list(results)))
    narrow = arith.trunci(ir.IntegerType.get_signless(total), results[0])
    return vector.bitcast(type_, dtypes.pack([narrow]))

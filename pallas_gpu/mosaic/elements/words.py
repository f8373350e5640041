# SPDX-License-Identifier: Apache-2.0
"""Conversion of a layout's registers to the words of inline assembly, and back.

A register of a layout is a vector; PTX has registers of 16, 32 or 64 bits. Floats of 32
and 64 bits keep their type, since a bitcast would cost a move.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_gpu.mosaic import operations
from pallas_gpu.mosaic.elements import dtypes

# LLVM's NVPTX constraint letter for each type of a word.
_CONSTRAINTS = {"i16": "h", "i32": "r", "i64": "l", "f32": "f", "f64": "d"}


def constraints(words: Sequence[ir.Value]) -> list[str]:
    """The constraint letter of each word."""
    return constraints_of([word.type for word in words])


def constraints_of(types: Sequence[ir.Type]) -> list[str]:
    """The constraint letter of a word of each type."""
    letters = {type_: _CONSTRAINTS[str(type_)] for type_ in set(types)}
    return [letters[type_] for type_ in types]


def to_words(values: Sequence[ir.Value]) -> list[list[ir.Value]]:
    """The words of each register, least significant first."""
    forms = _forms(values)
    done: dict[ir.Value, list[ir.Value]] = {}
    for value in values:
        if value not in done:
            done[value] = forms[value.type].split(value)
    return [done[value] for value in values]


def from_words(results: Sequence[ir.Value], like: Sequence[ir.Value]) -> list[ir.Value]:
    """Registers of the same types as `like`, assembled from their words in order."""
    return join(results, [register.type for register in like])


def join(words: Sequence[ir.Value], registers: Sequence[ir.Type]) -> list[ir.Value]:
    """Registers of some types, assembled from their words in order."""
    forms = {type_: _form(type_) for type_ in set(registers)}
    values, position = [], 0
    for type_ in registers:
        form = forms[type_]
        values.append(form.join(words[position : position + form.count]))
        position += form.count
    return values


def word_type(register: ir.Type) -> ir.Type:
    """The type of the words of a register that consists of whole 32-bit words."""
    if str(register.element_type) == "f32":
        return register.element_type
    return ir.IntegerType.get_signless(32)


def assemble(
    tied: Sequence[ir.Value],
    operands: Sequence[ir.Value],
    text: str,
    constraints: Sequence[str],
) -> list[ir.Value]:
    """Volatile inline assembly; each result has the type of a tied word."""
    return assemble_types([w.type for w in tied], operands, text, constraints)


def assemble_types(
    types: Sequence[ir.Type],
    operands: Sequence[ir.Value],
    text: str,
    constraints: Sequence[str],
) -> list[ir.Value]:
    """Volatile inline assembly with results of some types."""
    single = len(types) == 1
    result = operations.inline_assembly(
        types[0] if single else llvm.StructType.get_literal(types),
        operands,
        text,
        ",".join(constraints),
        volatile=True,
    )
    return [result] if single else operations.fields(result, types)


@dataclasses.dataclass(frozen=True)
class _Form:
    """How registers of one type consist of words.

    Attributes:
      register: the type.
      lanes, width: the number of its elements, and the bits of each.
    """

    register: ir.Type
    lanes: int
    width: int

    @property
    def count(self) -> int:
        """The number of words."""
        if self.width >= 64:
            return self.lanes
        return max(self.lanes * self.width // self.word_bits, 1)

    @property
    def word_bits(self) -> int:
        """The bits of a word of elements that are narrower than a word."""
        return 32 if self.lanes * self.width % 32 == 0 else 16

    def split(self, value: ir.Value) -> list[ir.Value]:
        """The words of a register."""
        total = self.lanes * self.width
        if self.width >= 32:
            return [dtypes.extract(value, i) for i in range(self.lanes)]
        word = ir.IntegerType.get_signless(self.word_bits)
        if total % self.word_bits == 0:
            packed = _bitcast(ir.VectorType.get([self.count], word), value)
            return [dtypes.extract(packed, i) for i in range(self.count)]
        # Less than 16 bits: a single byte, or a few bools.
        narrow = ir.VectorType.get([1], ir.IntegerType.get_signless(total))
        return [arith.extui(word, dtypes.extract(_bitcast(narrow, value), 0))]

    def join(self, words: Sequence[ir.Value]) -> ir.Value:
        """The register that consists of words."""
        total = self.lanes * self.width
        if self.width >= 32:
            return dtypes.pack(words)
        if total >= 16:
            return _bitcast(self.register, dtypes.pack(words))
        narrow = arith.trunci(ir.IntegerType.get_signless(total), words[0])
        return _bitcast(self.register, dtypes.pack([narrow]))


def _bitcast(type_: ir.Type, value: ir.Value) -> ir.Value:
    return operations.create("vector.bitcast", type_, [value])


def _forms(registers: Sequence[ir.Value]) -> dict[ir.Type, _Form]:
    """The form of each type of the registers."""
    return {type_: _form(type_) for type_ in {x.type for x in registers}}


def _form(register: ir.Type) -> _Form:
    return _Form(register, register.shape[0], register.element_type.width)

# SPDX-License-Identifier: Apache-2.0
"""Conversion of a layout's registers to the words of inline assembly, and back.

A register of a layout is a vector; PTX has registers of 16, 32 or 64 bits. Floats of 32
and 64 bits keep their type, since a bitcast would cost a move.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_gpu.emitters import operations
from pallas_gpu.emitters.elements import arith, dtypes

# LLVM's NVPTX constraint letter for each type of a word.
_CONSTRAINTS = {"i16": "h", "i32": "r", "i64": "l", "f32": "f", "f64": "d"}


def constraints(words: Sequence[ir.Value]) -> list[str]:
    """The constraint letter of each word."""
    return constraints_of([word.type for word in words])


def constraints_of(types: Sequence[ir.Type]) -> list[str]:
    """The constraint letter of a word of each type."""
    return _for_each_type(types, lambda type_: _CONSTRAINTS[str(type_)])


def to_words(values: Sequence[ir.Value]) -> list[list[ir.Value]]:
    """The words of each register, least significant first."""
    return Words.of(values).each


def from_words(results: Sequence[ir.Value], like: Sequence[ir.Value]) -> list[ir.Value]:
    """Registers of the same types as `like`, assembled from their words in order."""
    return join(results, [register.type for register in like])


def join(words: Sequence[ir.Value], registers: Sequence[ir.Type]) -> list[ir.Value]:
    """Registers of some types, assembled from their words in order."""
    return _joined(words, _for_each_type(registers, _form))


def word_type(register: ir.Type) -> ir.Type:
    """The type of the words of a register that consists of whole 32-bit words."""
    if str(register.element_type) == "f32":
        return register.element_type
    return ir.IntegerType.get_signless(32)


def word_types(register: ir.Type) -> list[ir.Type]:
    """The types of the words that a register consists of."""
    form = _form(register)
    return [form.word] * form.count


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
    return [result] if single else dtypes.fields(result, types)


@dataclasses.dataclass(frozen=True)
class _Form:
    """How registers of one type consist of words.

    Attributes:
      width: the bits of an element.
      count: the number of words.
      packed: a vector of that many words; None for elements that are words themselves,
        and for less than one word: a single byte, or a few bools.
    """

    register: ir.Type
    width: int
    count: int
    word: ir.Type
    packed: ir.Type | None

    def split(self, value: ir.Value) -> list[ir.Value]:
        """The words of a register."""
        if self.width >= 32:
            return list(dtypes.elements(value))
        if self.packed is not None:
            packed = _bitcast(self.packed, value)
            return dtypes.fields(packed, [self.word] * self.count, dtypes.EXTRACT)
        total = self.register.shape[0] * self.width
        narrow = ir.VectorType.get([1], ir.IntegerType.get_signless(total))
        return [arith.extui(self.word, dtypes.extract(_bitcast(narrow, value), 0))]

    def join(self, words: Sequence[ir.Value]) -> ir.Value:
        """The register that consists of words."""
        if self.width >= 32:
            return dtypes.pack(words, self.register)
        if self.packed is not None:
            return _bitcast(self.register, dtypes.pack(words, self.packed))
        total = self.register.shape[0] * self.width
        narrow = arith.trunci(ir.IntegerType.get_signless(total), words[0])
        return _bitcast(self.register, dtypes.pack([narrow]))


@dataclasses.dataclass(frozen=True)
class Words:
    """The words of some registers.

    Attributes:
      each: the words of each register, least significant first.
      forms: how each register consists of them.
    """

    each: list[list[ir.Value]]
    forms: list[_Form]

    @classmethod
    def of(cls, values: Sequence[ir.Value]) -> Words:
        """Takes registers apart, each value once."""
        forms = _for_each_type([value.type for value in values], _form)
        done: dict[ir.Value, list[ir.Value]] = {}
        each = []
        for value, form in zip(values, forms, strict=True):
            known = done.get(value)
            if known is None:
                known = done[value] = form.split(value)
            each.append(known)
        return cls(each, forms)

    @property
    def flat(self) -> list[ir.Value]:
        """All words in order."""
        return [word for register in self.each for word in register]

    def through(
        self, operands: Sequence[ir.Value], text: str, constraints: Sequence[str] = ()
    ) -> list[ir.Value]:
        """The registers after volatile inline assembly that modifies their words.

        Args:
          operands: others, numbered after the words, which come twice.
          text: the assembly.
          constraints: those of the other operands, and what it clobbers.
        """
        types = [form.word for form in self.forms for _ in range(form.count)]
        kinds = constraints_of(types)
        tied = [*(f"={kind}" for kind in kinds), *map(str, range(len(kinds)))]
        given = [*self.flat, *operands]
        made = assemble_types(types, given, text, [*tied, *constraints])
        return _joined(made, self.forms)


def _joined(words: Sequence[ir.Value], forms: Sequence[_Form]) -> list[ir.Value]:
    values, position = [], 0
    for form in forms:
        end = position + form.count
        values.append(form.join(words[position:end]))
        position = end
    return values


def _bitcast(type_: ir.Type, value: ir.Value) -> ir.Value:
    return operations.create("vector.bitcast", type_, [value])


def _for_each_type[T](
    types: Sequence[ir.Type], function: Callable[[ir.Type], T]
) -> list[T]:
    """A function of each type, evaluated once for equal types."""
    done = {type_: function(type_) for type_ in set(types)}
    return [done[type_] for type_ in types]


def _form(register: ir.Type) -> _Form:
    element = register.element_type
    lanes, width = register.shape[0], element.width
    if width >= 32:
        return _Form(register, width, lanes, element, None)
    total = lanes * width
    word = ir.IntegerType.get_signless(32 if total % 32 == 0 else 16)
    if total % word.width:
        return _Form(register, width, 1, word, None)
    count = total // word.width
    return _Form(register, width, count, word, ir.VectorType.get([count], word))

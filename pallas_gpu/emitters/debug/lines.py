# SPDX-License-Identifier: Apache-2.0
"""Lines: a call of vprintf in each thread that prints one.

A value with two conversions chooses one by a branch. A call has a whole line, because
lines of different threads may mix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import gpu, scf

from pallas_gpu.emitters.elements import arith, convert, dtypes
from pallas_gpu.types import formats


@dataclasses.dataclass(frozen=True)
class Printed:
    """A value of a line.

    Attributes:
      value: a scalar.
      dtype: its element type.
      position: i32 coordinates of an element of an array; none for a scalar.
    """

    value: ir.Value
    dtype: np.dtype
    position: tuple[ir.Value, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Part:
    """A field of a line.

    Attributes:
      position: the coordinates that are printed in front.
      texts: the conversions, or words, of which the last one is chosen by `condition`.
      value: the argument of the conversion; None for words.
    """

    position: tuple[ir.Value, ...]
    texts: tuple[str, ...]
    condition: ir.Value | None
    value: ir.Value | None


def print_line(line: formats.Line, values: Sequence[Printed]) -> None:
    """Emits the call that prints a line, in each thread that executes it."""
    found = line.conversions([x.dtype for x in values])
    parts = [
        _part(values[field.value], conversions, bare=field.bare)
        for field, conversions in zip(line.fields, found, strict=True)
    ]
    texts = [text.replace("%", "%%") for text in line.texts]
    _emit(texts, parts, ())


def print_text(text: str, values: Sequence[ir.Value] = ()) -> None:
    """Emits the call that prints a text, with `%d` for each of some i32 values."""
    gpu.printf(text + "\n", *values)


def _part(x: Printed, found: Sequence[formats.Conversion], *, bare: bool) -> _Part:
    texts = tuple(conversion.text for conversion in found)
    condition = None
    if len(found) > 1:
        condition = x.value if x.dtype == dtypes.BOOL else _is_whole(_double(x))
    value = None if found[0].takes is None else _argument(x, found[0])
    return _Part(() if bare else x.position, texts, condition, value)


def _argument(x: Printed, conversion: formats.Conversion) -> ir.Value:
    """Returns a value as C passes it to printf.

    CUDA C++ programming guide, "Formatted output": as in C, narrow integers are passed
    as int and floats as double.
    """
    assert conversion.takes is not None
    if conversion.takes == "f64":
        return _double(x)
    bits = conversion.takes.removeprefix("i")
    to = dtypes.named(f"{'int' if conversion.signed else 'uint'}{bits}")
    source = x.dtype
    if not conversion.signed and source.kind == "i":
        # The bits of a negative integer, without those of its extension.
        source = dtypes.named(f"u{source.name}")
    return convert.convert_value(x.value, source, to)


def _double(x: Printed) -> ir.Value:
    return convert.convert_value(x.value, x.dtype, dtypes.F64)


def _is_whole(value: ir.Value) -> ir.Value:
    """i1: whether an f64 is an integer that is not too large; see `formats`."""
    predicate = arith.CmpFPredicate
    limit, negative = (
        dtypes.constant(sign * formats.WHOLE_LIMIT, dtypes.F64) for sign in (1, -1)
    )
    small = arith.andi(
        arith.cmpf(predicate.OLT, value, limit),
        arith.cmpf(predicate.OGT, value, negative),
    )
    number = convert.convert_value(value, dtypes.F64, dtypes.I32)
    back = convert.convert_value(number, dtypes.I32, dtypes.F64)
    return arith.andi(small, arith.cmpf(predicate.OEQ, back, value))


def _emit(
    texts: Sequence[str], parts: Sequence[_Part], done: tuple[tuple[str, bool], ...]
) -> None:
    """Emits a line.

    Args:
      texts: around the parts.
      parts: all of them.
      done: for the first parts the chosen text, and whether it takes the value.
    """
    undecided = next(
        (i for i in range(len(done), len(parts)) if parts[i].condition is not None),
        len(parts),
    )
    done += tuple(
        (part.texts[0], part.value is not None) for part in parts[len(done) : undecided]
    )
    if undecided == len(parts):
        _call(texts, parts, done)
        return
    part = parts[undecided]
    branch = scf.IfOp(part.condition, has_else=True)
    for block, text in (
        (branch.then_block, part.texts[-1]),
        (branch.else_block, part.texts[0]),
    ):
        with ir.InsertionPoint(block):
            _emit(texts, parts, (*done, (text, part.value is not None)))
            scf.yield_([])


def _call(
    texts: Sequence[str],
    parts: Sequence[_Part],
    conversions: Sequence[tuple[str, bool]],
) -> None:
    line = texts[0]
    arguments: list[ir.Value | None] = []
    for part, (text, takes), after in zip(parts, conversions, texts[1:], strict=True):
        if part.position:
            line += f"[{', '.join(['%d'] * len(part.position))}]: "
            arguments += part.position
        if takes:
            arguments.append(part.value)
        line += text + after
    gpu.printf(line + "\n", *arguments)

# SPDX-License-Identifier: Apache-2.0
"""Formats of printed lines, such that the emulator and a GPU print the same text.

A GPU formats numbers as C's printf does. A format specification of Python becomes a
conversion of C, and the emulator uses that conversion, too. A bool, and a float without
a specification, have two conversions, of which the value chooses one: 3.0 is printed as
`3.0`, 0.1 as `0.1`, where C has one for each.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from pallas_gpu import errors
from pallas_gpu.types.elements import kind

# The values of a line that choose a conversion; a line has a form for each choice of
# all of them. The conversion of further values does not depend on the value.
CHOICES = 4
# Whole floats of at most this magnitude are printed as 3.0; C's %g switches to an
# exponent beyond six digits.
WHOLE_LIMIT = 1e6

_SPEC = re.compile(
    r"(?P<align>[<>])?(?P<sign>[-+ ])?(?P<zeros>0)?(?P<width>[1-9]\d*)?"
    r"(?:\.(?P<precision>\d+))?(?P<letter>[dxXoeEfFgG])?"
)
_OF_FLOATS = "eEfFgG"
_OF_BITS = "xXo"


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A conversion of C's printf, and the type that it takes.

    Attributes:
      text: the conversion, or a word that is printed in place of the value.
      takes: `"i32"`, `"i64"` or `"f64"`; None for a word.
      signed: whether an integer is extended with its sign.
    """

    text: str
    takes: str | None
    signed: bool = True


@dataclasses.dataclass(frozen=True)
class Field:
    """A placeholder of a line.

    Attributes:
      value: the position of its value.
      spec: the format specification, without colon.
      bare: `!s`, an element of an array without its position.
    """

    value: int
    spec: str = ""
    bare: bool = False

    def __str__(self) -> str:
        return f"{{{self.value}{'!s' * self.bare}{self.spec and ':'}{self.spec}}}"


@dataclasses.dataclass(frozen=True)
class Line:
    """A format: fields, and the texts before each of them and after the last one."""

    texts: tuple[str, ...]
    fields: tuple[Field, ...]

    def __str__(self) -> str:
        """The format, with the position of the value in every placeholder."""
        texts = [text.replace("{", "{{").replace("}", "}}") for text in self.texts]
        parts = [
            str(field) + text
            for field, text in zip(self.fields, texts[1:], strict=True)
        ]
        return texts[0] + "".join(parts)

    def conversions(self, dtypes: Sequence[Any]) -> list[tuple[Conversion, ...]]:
        """Returns the conversions of each field.

        There is one, or two of which the value chooses: the second one is that of True,
        and of whole floats.

        Args:
          dtypes: of the values.

        Raises:
          DTypeError: a specification does not suit the type of its value.
        """
        result, choices = [], 0
        for field in self.fields:
            found = conversions(field.spec, np.dtype(dtypes[field.value]))
            choices += len(found) > 1
            if len(found) > 1 and choices > CHOICES:
                found = (_plain(np.dtype(dtypes[field.value]), found),)
            result.append(found)
        return result


def _plain(dtype: np.dtype, found: tuple[Conversion, ...]) -> Conversion:
    return Conversion("%d", "i32", signed=False) if dtype == np.bool_ else found[0]


@functools.lru_cache(maxsize=1024)
def conversions(spec: str, dtype: np.dtype) -> tuple[Conversion, ...]:
    """Returns the conversions of a value: one, or two of which the value chooses one.

    Raises:
      DTypeError: the specification does not suit the type.
    """
    parsed = _SPEC.fullmatch(spec)
    if parsed is None:
        raise errors.InternalError("a format was not checked", got=repr(spec))
    group, letter = kind(dtype), parsed["letter"] or ""
    is_float = group in ("float", "float8", "exponent")
    if is_float and letter and letter not in _OF_FLOATS:
        raise _unsuitable(spec, dtype, "e, f or g")
    if letter in ("", "d", *_OF_BITS) and parsed["precision"] is not None:
        raise _unsuitable(spec, dtype, "a precision with e, f or g only, as in .3g")
    if group == "bool" and not spec:
        return Conversion("False", None), Conversion("True", None)
    flags = _flags(parsed)
    width = parsed["width"] or ""
    if letter in tuple(_OF_FLOATS):
        precision = "" if parsed["precision"] is None else f".{parsed['precision']}"
        signed = group not in ("unsigned", "bool")
        return (Conversion(f"%{flags}{width}{precision}{letter}", "f64", signed),)
    if is_float:
        shortest, whole = f"%{flags}{width}g", f"%{flags}{width}.1f"
        return Conversion(shortest, "f64"), Conversion(whole, "f64")
    signed = group == "signed" and letter not in tuple(_OF_BITS)
    if not signed:
        # C ignores them for unsigned conversions.
        flags = flags.replace("+", "").replace(" ", "")
    letter = letter if letter in tuple(_OF_BITS) else "d" if signed else "u"
    takes = "i64" if dtype.itemsize == 8 else "i32"
    size = "ll" if takes == "i64" else ""
    return (Conversion(f"%{flags}{width}{size}{letter}", takes, signed),)


def _flags(parsed: re.Match[str]) -> str:
    left = "-" if parsed["align"] == "<" else ""
    sign = (parsed["sign"] or "").replace("-", "")
    return left + sign + (parsed["zeros"] or "")


def _unsuitable(spec: str, dtype: np.dtype, expected: str) -> errors.DTypeError:
    return errors.DTypeError(
        f"debug_print: the format {{:{spec}}} does not suit {dtype.name}",
        expected=expected,
        got=f"{{:{spec}}} for {dtype.name}",
        hint="write {} for the format of the type",
    )


# --- the text of a value, as C prints it ----------------------------------------------


def show(found: Sequence[Conversion], value: np.generic) -> str:
    """Returns the text of a value, as a GPU prints it.

    Args:
      found: its conversions, from `Line.conversions`.
      value: a NumPy scalar.
    """
    chosen = found[-1] if len(found) > 1 and chooses_last(value) else found[0]
    if chosen.takes is None:
        return chosen.text
    if chosen.takes == "f64":
        return chosen.text % float(value)
    number = int(value)
    if not chosen.signed and value.dtype != np.bool_:
        number &= (1 << ml_dtypes.iinfo(value.dtype).bits) - 1
    return chosen.text.replace("ll", "") % number


def chooses_last(value: Any) -> bool:
    """True for True, and for whole floats that are not too large."""
    if value.dtype == np.bool_:
        return bool(value)
    number = float(value)
    return abs(number) < WHOLE_LIMIT and number == int(number)


# --- parsing --------------------------------------------------------------------------


def parse(fmt: str) -> Line:
    """Returns the line of a format that was checked, from `str(line)`."""
    found = _split(fmt)
    assert found is not None
    texts, placeholders = found
    fields = (Field(int(name), spec, how == "s") for name, spec, how in placeholders)
    return Line(tuple(texts), tuple(fields))


def line_of(
    fmt: str, count: int, names: Mapping[str, int], texts: Mapping[int, Any]
) -> Line | None:
    """Returns the line of a format; None if it does not match the values.

    Args:
      fmt: a format of Python.
      count: number of values by position.
      names: the positions of the values by name, from `count` on.
      texts: values that are part of the text, by position.
    """
    found = _split(fmt)
    if found is None:
        return None
    pieces, placeholders = found
    automatic = [name for name, *_ in placeholders if not name]
    numbered = [name for name, *_ in placeholders if name.isdecimal()]
    if automatic and numbered:
        return None
    counter = iter(range(len(automatic)))
    used, result, fields = set(), [pieces[0]], []
    for (name, spec, conversion), after in zip(placeholders, pieces[1:], strict=True):
        position = _position(name, count, names, counter)
        if position is None:
            return None
        used.add(position)
        if position in texts:
            result[-1] += _text(texts[position], spec, conversion) + after
            continue
        if conversion not in (None, "s") or _SPEC.fullmatch(spec) is None:
            return None
        fields.append(Field(position, spec, conversion == "s"))
        result.append(after)
    if used != set(range(count)) | set(names.values()):
        return None
    return Line(tuple(result), tuple(fields))


def _position(name: str, count: int, names: Mapping[str, int], counter: Any) -> Any:
    number = int(name) if name.isdecimal() else None
    number = next(counter) if not name else number
    if number is None:
        return names.get(name)
    return number if number < count else None


def _text(value: Any, spec: str, conversion: str | None) -> str:
    return string.Formatter().convert_field(value, conversion).__format__(spec)


def _split(fmt: str) -> tuple[list[str], list[tuple[str, str, str | None]]] | None:
    """Returns texts, and name, format and conversion of the placeholders between."""
    texts, placeholders = [""], []
    try:
        for literal, name, spec, conversion in string.Formatter().parse(fmt):
            texts[-1] += literal
            if name is not None:
                placeholders.append((name, spec or "", conversion))
                texts.append("")
    except ValueError:
        return None
    return texts, placeholders

# SPDX-License-Identifier: Apache-2.0
"""Printing values of scalars from a kernel."""

from __future__ import annotations

import string
from typing import Any

import jax.numpy as jnp

from pallas_gpu import _jax, errors, expect
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.types import values as value_rules

debug_print_p = registry.define("debug_print", "debug", issuers=("warpgroup", "warp"))


def _scalar(value: Any, what: str) -> Any:
    return value_rules.array(value, what)


@expect.arguments(fmt=expect.string, args=_scalar)
def debug_print(fmt: str, *args: Any) -> None:
    """Prints a line with the values of scalars.

    On a GPU the line appears when the host next synchronizes with the device, and lines
    of different threads in any order. In the emulator it appears at once.

    PTX: a call of vprintf. Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp, of which one thread prints.

    Args:
      fmt: a format string of Python with one `{}` for each value, or with the positions
        of the values, `{1} {0}`.
      *args: scalars: bools, integers, floats.

    Raises:
      ArgumentError: the placeholders do not match the values.
      ShapeError: a value is not a scalar.

    Example:
      >>> plgpu.debug_print("tile {}: {}", i, jnp.max(x))
    """
    fmt, args = _in_order(fmt, args)
    _require_placeholders(fmt, len(args))
    given = tuple(jnp.asarray(value) for value in args)
    for value in given:
        if value.shape:
            raise errors.ShapeError(
                "debug_print: a value is not a scalar",
                expected="scalars",
                got=f"{value.dtype.name}{list(value.shape)}",
                hint="print an element of a reference, or a reduction such as "
                "jnp.max; or store the value to an additional output",
                where=_jax.where_now(),
            )
    ops.bind(debug_print_p, given, fmt=fmt)


def _in_order(fmt: str, args: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """Replaces positions in a format by `{}`, and puts the values in that order."""
    fields = _fields(fmt)
    if not fields or not all(
        name.isdecimal() and rest == ["", None] for name, *rest in fields
    ):
        return fmt, args
    positions = [int(name) for name, *_ in fields]
    if set(positions) != set(range(len(args))):
        return fmt, args
    texts = (text.replace("{", "{{").replace("}", "}}") for text in pieces(fmt))
    return "{}".join(texts), tuple(args[i] for i in positions)


def _require_placeholders(fmt: str, count: int) -> None:
    if _fields(fmt) == [("", "", None)] * count:
        return
    raise errors.ArgumentError(
        "debug_print: the format does not match the values",
        expected=f"{count} times {{}}, or the values' positions, such as {{0}}, "
        "without names and formats",
        got=repr(fmt),
        hint="write {{ and }} for braces",
        where=_jax.where_now(),
    )


def _fields(fmt: str) -> list[Any] | None:
    """Returns name, format and conversion of each placeholder; None for no format."""
    try:
        parsed = list(string.Formatter().parse(fmt))
    except ValueError:
        return None
    return [tuple(field) for _, *field in parsed if field[0] is not None]


def pieces(fmt: str) -> list[str]:
    """Returns the text between the placeholders of a format, one more than these."""
    found, text = [], ""
    for literal, field, _, _ in string.Formatter().parse(fmt):
        text += literal
        if field is not None:
            found.append(text)
            text = ""
    return [*found, text]

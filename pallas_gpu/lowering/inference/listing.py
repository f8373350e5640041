# SPDX-License-Identifier: Apache-2.0
"""The layouts of a kernel's values, listed beside the lines of its source."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from typing import Any

from pallas_gpu.layouts.registers.placement import describe
from pallas_gpu.lowering.inference import Assignment
from pallas_gpu.lowering.inference.collect import Step, Symbol
from pallas_gpu.lowering.inference.network import Memory

_HEAD = ("value", "type", "layout")
_DEFERRED = "none: each use has its own"

Row = tuple[str, str, str]


def listing(assignment: Assignment) -> str:
    """Returns a table: under each line of the source the values that it makes.

    A value that an operation needs in another layout has a row of its own, an arrow.
    """
    groups: list[tuple[str, list[Row]]] = []
    for step, rows in rows_of(assignment):
        line = _line(step.node.where)
        if not groups or groups[-1][0] != line:
            groups.append((line, []))
        groups[-1][1].extend(rows)
    every = [_HEAD, *(row for _, rows in groups for row in rows)]
    widths = [max(len(row[i]) for row in every) for i in range(2)]
    lines = [_text(_HEAD, widths)]
    for line, rows in groups:
        lines += [line, *(_text(row, widths) for row in rows)]
    return "\n".join(lines) + "\n"


def rows_of(assignment: Assignment) -> Iterator[tuple[Step, list[Row]]]:
    """Yields the operations that have rows, in order."""
    for step in assignment.network.steps:
        rows = [] if step.is_end else list(_rows(step, assignment))
        if rows:
            yield step, rows


def _rows(step: Step, assignment: Assignment) -> Iterator[Row]:
    name = step.node.words
    for memory in step.declared:
        storage = assignment.storage(memory)
        plain = getattr(storage, "is_plain", False)
        text = getattr(storage, "description", str(storage))
        yield memory.words, _type(memory), "row-major" if plain else text
    for slot, x, consumer in assignment.network.takes.get(step.node, []):
        needed = assignment.layout(consumer)
        if x.port is not None and assignment.layout(x.port) != needed:
            yield f"-> operand {slot} of {name}", _type(x), describe(needed)
    for value, x in zip(step.node.op.results, step.results, strict=True):
        if isinstance(x, Symbol) and x.shape and value in step.node.users:
            layout = _DEFERRED
            if x.port is not None:
                layout = describe(assignment.layout(x.port))
            yield name, _type(x), layout


def _type(x: Symbol | Memory) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _text(row: Row, widths: list[int]) -> str:
    value, type_, layout = row
    return f"    {value:<{widths[0]}}  {type_:<{widths[1]}}  {layout}"


def _line(where: Any) -> str:
    """The line of an operation, with its text if it can be read."""
    if where is None:
        return "scratch of the kernel"
    file, _, rest = where.partition(":")
    number = rest.partition(" ")[0]
    text = linecache.getline(file, int(number)).strip() if number.isdecimal() else ""
    return f"{file}:{number}  {text}".rstrip()

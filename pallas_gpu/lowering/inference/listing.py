# SPDX-License-Identifier: Apache-2.0
"""The layouts of a kernel's values, listed beside the lines of its source."""

from __future__ import annotations

import linecache
from collections.abc import Iterator

from jaxlib.mlir import ir

from pallas_gpu.layouts.registers.placement import Placement, describe
from pallas_gpu.lowering.inference import sources
from pallas_gpu.lowering.inference.annotate import Layouts, operations
from pallas_gpu.mosaic import logical

_HEAD = ("value", "type", "layout")
_TMEM = ("mosaic_gpu.tmem_alloc", "mosaic_gpu.slice_tmem")
_DEFERRED = "none: each use has its own"

Row = tuple[str, str, str]


def listing(block: ir.Block, assignment: Layouts) -> str:
    """Returns a table: under each line of the source the values that it makes.

    A value that an operation needs in another layout has a row of its own, an arrow.
    """
    groups: list[tuple[str, list[Row]]] = []
    for op in operations(block):
        rows = list(_rows(op, assignment))
        if not rows:
            continue
        line = _line(op)
        if not groups or groups[-1][0] != line:
            groups.append((line, []))
        groups[-1][1].extend(rows)
    every = [_HEAD, *(row for _, rows in groups for row in rows)]
    widths = [max(len(row[i]) for row in every) for i in range(2)]
    lines = [_text(_HEAD, widths)]
    for line, rows in groups:
        lines += [line, *(_text(row, widths) for row in rows)]
    return "\n".join(lines) + "\n"


def _text(row: Row, widths: list[int]) -> str:
    value, type_, layout = row
    return f"    {value:<{widths[0]}}  {type_:<{widths[1]}}  {layout}"


def _line(op: ir.Operation) -> str:
    """The line of an operation, with its text if it can be read."""
    where = sources.where(op)
    if where is None:
        declared = op.name == "mosaic_gpu.slice_smem" or op.name in _TMEM
        return "scratch of the kernel" if declared else "without a line"
    file, _, rest = where.partition(":")
    number = rest.partition(" ")[0]
    text = linecache.getline(file, int(number)).strip() if number.isdecimal() else ""
    return f"{file}:{number}  {text}".rstrip()


def _rows(op: ir.Operation, assignment: Layouts) -> Iterator[Row]:
    name = sources.words(op)
    if op.name == "mosaic_gpu.slice_smem":
        storage = assignment.smem(op.results[0])
        text = "row-major" if storage.is_plain else storage.description
        yield name, _type(op.results[0]), text
    if op.name in _TMEM:
        yield name, _type(op.results[0]), str(assignment.tmem(op.results[0]))
    for i, value in enumerate(op.operands):
        needed = assignment.operand(op, i)
        held = assignment.result(value)
        if needed is not None and held is not None and needed != held:
            yield f"-> operand {i} of {name}", _type(value), _named(needed)
    for value in op.results:
        if isinstance(value.type, ir.VectorType):
            yield name, _type(value), _named(assignment.result(value))


def _named(layout: Placement | None) -> str:
    return _DEFERRED if layout is None else describe(layout)


def _type(value: ir.Value) -> str:
    shape = list(value.type.shape)
    return f"{logical.dtype_of(value.type).name}{shape}"

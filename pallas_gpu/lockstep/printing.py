# SPDX-License-Identifier: Apache-2.0
"""vprintf: each active thread prints a line, to Python's stdout."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.lockstep import values
from pallas_gpu.lockstep.program import Program, Step, runs

# CUDA C++ programming guide, "Format specifiers": flags, width, precision, size, type.
_CONVERSION = r"%([-+ #0]*\d*(?:\.\d+)?)(?:ll)?([diouxXeEfFgG])"


@runs("gpu.printf")
def _printf(program: Program, op: ir.Operation) -> Step:
    # Python's operator has C's conversions, without `ll`; its `u` is a signed `d`.
    given = ir.StringAttr(op.attributes["format"]).value
    text = re.sub(_CONVERSION, r"%\1\2", given)
    slots = program.inputs(op)
    types = [str(x.type) for x in op.operands]
    assert all(t in ("i32", "i64", "f64") for t in types), "C promotes the others"
    conversions = [x[2] for x in re.finditer(_CONVERSION, given.replace("%%", ""))]

    def show(strand: Any) -> None:
        columns = []
        for slot, conversion in zip(slots, conversions, strict=True):
            column = strand.per_lane(values.forced(strand.env[slot]))
            columns.append(values.signed(column) if conversion == "d" else column)
        active = np.ones(strand.lanes, bool) if strand.mask is None else strand.mask
        for lane in np.flatnonzero(active):
            numbers = (column[lane].item() for column in columns)
            print(text % tuple(numbers), end="")

    return show

# SPDX-License-Identifier: Apache-2.0
"""Printing from a kernel: one thread calls vprintf."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu

from pallas_gpu.mosaic import module
from pallas_gpu.mosaic.smem import predicated


def print_line(texts: Sequence[str], values: Sequence[tuple[ir.Value, Any]]) -> None:
    """Prints a line from the thread that is elected of the issuer.

    Args:
      texts: what stands before each value, and after the last one.
      values: scalars and their element types.
    """
    with predicated(module.current().elected):
        arguments = [_argument(value, np.dtype(dtype)) for value, dtype in values]
        first, *others = (text.replace("%", "%%") for text in texts)
        parts = [
            conversion + text
            for (_, conversion), text in zip(arguments, others, strict=True)
        ]
        text = first + "".join(parts) + "\n"
        gpu.printf(text, *(value for value, _ in arguments))


def _argument(value: ir.Value, dtype: np.dtype) -> tuple[ir.Value, str]:
    """Returns a scalar as C passes it to printf, and its conversion.

    CUDA C++ programming guide, "Formatted output": as in C, narrow integers are passed
    as int and floats as double.
    """
    i32, f64 = ir.IntegerType.get_signless(32), ir.F64Type.get()
    if dtype.kind in "biu":
        signed = dtype.kind == "i"
        if value.type.width < 32:
            value = (arith.extsi if signed else arith.extui)(i32, value)
        size = "ll" if value.type.width == 64 else ""
        return value, f"%{size}{'u' if dtype.kind == 'u' else 'd'}"
    return (value if value.type == f64 else arith.extf(f64, value)), "%g"

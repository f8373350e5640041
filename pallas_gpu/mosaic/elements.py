# SPDX-License-Identifier: Apache-2.0
"""Element types: MLIR's, which bodies handle, and NumPy's, which emitters do.

The type of an integer says nothing of its sign; `is_signed` does, where it matters.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu import errors
from pallas_gpu.emitters.elements import dtypes

# Where a memref is: nothing stands for GMEM.
WORKGROUP = "#gpu.address_space<workgroup>"

_FLOATS: dict[str, Any] = {
    "float16": ir.F16Type,
    "bfloat16": ir.BF16Type,
    "float32": ir.F32Type,
    "float64": ir.F64Type,
    "float8_e4m3fn": ir.Float8E4M3FNType,
    "float8_e5m2": ir.Float8E5M2Type,
    "float8_e8m0fnu": ir.Float8E8M0FNUType,
    "float4_e2m1fn": ir.Float4E2M1FNType,
}


def type_of(dtype: Any) -> ir.Type:
    """The MLIR type of an element of a NumPy dtype, as it is in memory."""
    dtype = np.dtype(dtype)
    if dtype.name in _FLOATS:
        return _FLOATS[dtype.name].get()
    if dtype == dtypes.BOOL:
        return ir.IntegerType.get_signless(1)
    return ir.IntegerType.get_signless(dtypes.stored_bits(dtype))


def dtype_of(type_: ir.Type, is_signed: bool | None = None) -> np.dtype:
    """The NumPy dtype of an element or a vector; None is as signed as True."""
    if isinstance(type_, ir.VectorType):
        type_ = type_.element_type
    if isinstance(type_, ir.IntegerType):
        if type_.width == 1:
            return dtypes.BOOL
        return dtypes.named(f"{'uint' if is_signed is False else 'int'}{type_.width}")
    for name, kind in _FLOATS.items():
        if isinstance(type_, kind):
            return dtypes.named(name)
    raise errors.DTypeError(
        "Arrays of this element type are not supported",
        expected=f"an integer, or one of {', '.join(_FLOATS)}",
        got=str(type_),
    )


def signedness(dtype: np.dtype) -> bool | None:
    """Whether an integer type is signed; None of other types."""
    kind = dtypes.kind(dtype)
    return kind == "signed" if kind in ("signed", "unsigned", "bool") else None


def bitwidth(ty: ir.Type) -> int:
    """Returns the width in bits of a type: an element, or a vector of them."""
    match ty:
        case ir.VectorType():
            return math.prod(ty.shape) * bitwidth(ty.element_type)
        case ir.FloatTF32Type():
            return 32  # It has 19 bits, in registers of 32.
        case ir.IntegerType() | ir.FloatType():
            if ty.width.bit_count() == 1:
                return ty.width
    raise errors.DTypeError(
        "The type does not have a width that is a power of two",
        expected="an integer or a float of 1, 2, 4 ... 64 bits, or a vector of them",
        got=str(ty),
    )


def bytewidth(ty: ir.Type) -> int:
    """Returns the width in bytes of a type.

    Raises:
      DTypeError: it does not fill whole bytes.
    """
    bits = bitwidth(ty)
    if bits % 8:
        raise errors.DTypeError(
            "The type does not fill whole bytes", expected="8 bits or more", got=str(ty)
        )
    return bits // 8

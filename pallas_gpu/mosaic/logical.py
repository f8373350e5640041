# SPDX-License-Identifier: Apache-2.0
"""The warpgroup-level module: types of whole arrays, a vector or a memref; names.

Here a vector has an array's shape, and nothing says yet which thread holds what. Unlike
registers, arrays keep float8 as a type; integers have no sign either way.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu import errors
from pallas_gpu.mosaic.elements import dtypes

_FLOAT8 = {dtypes.F8_E4M3: "f8E4M3FN", dtypes.F8_E5M2: "f8E5M2"}
_FLOATS = (dtypes.F16, dtypes.BF16, dtypes.F32, dtypes.F64)
SMEM_SPACE = "#gpu.address_space<workgroup>"
# Operations of our own have this prefix; elementwise ones have lax's names behind it.
OWN = "pallas_gpu."
# Operations of these dialects are code of a thread already: they take no arrays. To
# `gpu` the block's SMEM is bytes.
SCALAR = ("arith.", "gpu.", "llvm.", "nvvm.")
# On the cast that makes a memref of a buffer: the buffer's position.
BUFFER = "pallas_gpu.buffer"
# On an operation that one warp runs by itself.
IN_WARP = "pallas_gpu.in_warp"


def element_type(dtype: np.dtype) -> ir.Type:
    """The element type of an array."""
    name = _FLOAT8.get(dtype)
    return ir.Type.parse(name) if name else dtypes.mlir_type(dtype)


def vector_type(dtype: np.dtype, shape: Sequence[int]) -> ir.Type:
    """The type of an array in registers."""
    return ir.VectorType.get(list(shape), element_type(dtype))


def smem_type(dtype: np.dtype, shape: Sequence[int]) -> ir.Type:
    """The type of an array in SMEM."""
    memory = element_type(dtypes.memory_dtype(dtype))
    space = ir.Attribute.parse(SMEM_SPACE)
    return ir.MemRefType.get(list(shape), memory, memory_space=space)


def gmem_type(dtype: np.dtype, shape: Sequence[int]) -> ir.Type:
    """The type of an array in GMEM."""
    return ir.MemRefType.get(list(shape), element_type(dtypes.memory_dtype(dtype)))


def element_bits(element: ir.Type) -> int:
    """The width of an element of a vector or memref; 1 for a bool."""
    width = getattr(element, "width", None)
    if width is None:
        raise errors.InternalError("not an element of an array", got=str(element))
    return int(width)


def dtype_of(type_: ir.Type) -> np.dtype:
    """The element type of a vector, a memref or a scalar; integers become signed."""
    if isinstance(type_, ir.ShapedType):
        type_ = type_.element_type
    return _dtype_of(str(type_))


@functools.cache
def _dtype_of(text: str) -> np.dtype:
    for dtype, name in _FLOAT8.items():
        if text == name:
            return dtype
    for dtype in _FLOATS:
        if text == {"bfloat16": "bf16"}.get(dtype.name, f"f{8 * dtype.itemsize}"):
            return dtype
    if text == "i1":
        return dtypes.BOOL
    if text.startswith("i"):
        return np.dtype(f"int{text[1:]}")
    raise errors.InternalError(f"no dtype for the type {text}")

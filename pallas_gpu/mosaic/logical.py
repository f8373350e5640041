# SPDX-License-Identifier: Apache-2.0
"""The warpgroup-level module: the types of whole arrays, vectors and memrefs; names.

A vector has the array's shape here, not yet distributed over threads. Unlike registers,
arrays keep narrow types: float8, and those of 2 and 4 bits; integers are signless in
both.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, builtin

from pallas_gpu import errors
from pallas_gpu.mosaic.elements import dtypes

_NARROW = {
    dtypes.F8_E4M3: "f8E4M3FN",
    dtypes.F8_E5M2: "f8E5M2",
    dtypes.F8_E8M0: "f8E8M0FNU",
    dtypes.F4_E2M1: "f4E2M1FN",
    dtypes.I4: "i4",
    dtypes.U4: "i4",
    dtypes.I2: "i2",
    dtypes.U2: "i2",
}
_FLOATS = (dtypes.F16, dtypes.BF16, dtypes.F32, dtypes.F64)
SMEM_SPACE = "#gpu.address_space<workgroup>"
TMEM_SPACE = "#mosaic_gpu.tmem"
# The prefix of our own operations; elementwise ones append lax's names to it.
OWN = "pallas_gpu."
# Operations of these dialects are per-thread code already: their operands are not
# arrays. For `gpu` the block's SMEM is a memref of bytes.
SCALAR = ("arith.", "gpu.", "llvm.", "nvvm.")
# On the cast from a buffer to a memref: the buffer's index.
BUFFER = "pallas_gpu.buffer"
# Between a scalar of registers and an element of an array of packed elements.
_CAST = "builtin.unrealized_conversion_cast"
# On the declaration of an SMEM array that an operation uses, not the author.
INTERNAL = "pallas_gpu.internal"
# On the declaration of an SMEM array of which each warp, or warpgroup, has its own: the
# bytes from one's to the next one's.
DISTANCES: Mapping[Literal["warp", "warpgroup"], str] = {
    "warp": "pallas_gpu.warp_distance",
    "warpgroup": "pallas_gpu.warpgroup_distance",
}
# On an operation that a single warp executes, with all that its regions contain.
IN_WARP = "pallas_gpu.in_warp"


def element_type(dtype: np.dtype) -> ir.Type:
    """The element type of an array."""
    name = _NARROW.get(dtype)
    return ir.Type.parse(name) if name else dtypes.mlir_type(dtype)


def to_element(value: ir.Value, dtype: np.dtype) -> ir.Value:
    """A scalar of registers as an element of an array, of the array's type.

    Scalars of narrow types are bytes.
    """
    wanted = element_type(dtype)
    if dtypes.is_packed(dtype):
        return builtin.unrealized_conversion_cast([wanted], [value])
    return value if value.type == wanted else arith.bitcast(wanted, value)


def from_element(value: ir.Value, dtype: np.dtype) -> ir.Value:
    """The inverse of `to_element`."""
    if not dtypes.is_packed(dtype):
        return dtypes.bitcast(value, dtype)
    owner = value.owner
    if not isinstance(owner, ir.Block) and owner.operation.name == _CAST:
        return owner.operation.operands[0]
    byte = ir.IntegerType.get_signless(8)
    return builtin.unrealized_conversion_cast([byte], [value])


def replace_element(
    value: ir.Value, scalar: ir.Value, dead: list[ir.Operation]
) -> None:
    """Replaces an element of an array by a scalar of registers.

    Args:
      value: the result of an operation; of a narrow type its uses are those that
        `from_element` made.
      scalar: what `from_element` returns for it.
      dead: receives the operations that have no uses any more.
    """
    if value.type == scalar.type or not _is_sub_byte(value.type):
        value.replace_all_uses_with(scalar)
        return
    for use in list(value.uses):
        user = use.owner.operation
        user.results[0].replace_all_uses_with(scalar)
        dead.append(user)


def _is_sub_byte(type_: ir.Type) -> bool:
    return 1 < getattr(type_, "width", 0) < 8


def vector_type(dtype: np.dtype, shape: Sequence[int]) -> ir.Type:
    """The type of an array in registers."""
    return ir.VectorType.get(list(shape), element_type(dtype))


def smem_type(dtype: np.dtype, shape: Sequence[int]) -> ir.Type:
    """The type of an array in SMEM."""
    memory = element_type(dtypes.memory_dtype(dtype))
    space = ir.Attribute.parse(SMEM_SPACE)
    return ir.MemRefType.get(list(shape), memory, memory_space=space)


def tmem_type(dtype: np.dtype, shape: Sequence[int]) -> ir.Type:
    """The type of an array in TMEM."""
    space = ir.Attribute.parse(TMEM_SPACE)
    return ir.MemRefType.get(list(shape), element_type(dtype), memory_space=space)


def gmem_type(dtype: np.dtype, shape: Sequence[int]) -> ir.Type:
    """The type of an array in GMEM."""
    return ir.MemRefType.get(list(shape), element_type(dtypes.memory_dtype(dtype)))


def element_bits(element: ir.Type) -> int:
    """The width in bits of an element of a vector or memref; 1 for a bool."""
    width = getattr(element, "width", None)
    if width is None:
        raise errors.InternalError("not an array's element type", got=str(element))
    return int(width)


def register_bits(element: ir.Type) -> int:
    """The width in bits of an element in a register; 1 for a bool."""
    width = element_bits(element)
    return width if width == 1 else max(width, 8)


def dtype_of(type_: ir.Type) -> np.dtype:
    """The dtype of a vector, a memref or a scalar; integers map to signed dtypes."""
    if isinstance(type_, ir.ShapedType):
        type_ = type_.element_type
    return _dtype_of(str(type_))


@functools.cache
def _dtype_of(text: str) -> np.dtype:
    for dtype, name in _NARROW.items():
        # Of two integers of one width the signed one comes first.
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

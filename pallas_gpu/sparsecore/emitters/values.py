# SPDX-License-Identifier: Apache-2.0
"""Values in registers, references in memory, and their types in MLIR."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector
from jaxlib.mosaic.python import tpu

from pallas_gpu import errors

BOOL, I32, U32, F32 = (np.dtype(t) for t in (bool, np.int32, np.uint32, np.float32))
BF16 = np.dtype(ml_dtypes.bfloat16)
WORD_BYTES = 4


def is_float(dtype: np.dtype) -> bool:
    """Whether elements are floats."""
    return dtype == BF16 or dtype.kind == "f"


def element_type(dtype: np.dtype) -> ir.Type:
    """Returns the type of an element: floats, and signless integers."""
    if dtype == BOOL:
        return ir.IntegerType.get_signless(1)
    if dtype == BF16:
        return ir.BF16Type.get()
    if dtype == F32:
        return ir.F32Type.get()
    if dtype.kind in "iu":
        return ir.IntegerType.get_signless(8 * dtype.itemsize)
    raise errors.DTypeError(
        "a SparseCore does not compute with these elements",
        expected="float32, bfloat16, integers of 8, 16 or 32 bits, or bools",
        got=dtype.name,
        hint="convert them to float32 before the call",
    )


def word_of(dtype: np.dtype) -> np.dtype:
    """Returns the type of 32 bits that the elements of a narrower type widen to."""
    if dtype == BOOL or dtype.itemsize == WORD_BYTES:
        return dtype
    return F32 if is_float(dtype) else U32 if dtype.kind == "u" else I32


def scalar_type(dtype: np.dtype) -> ir.Type:
    """Returns the type of a scalar: narrow ones are in words, as libtpu has no others.

    A narrow integer is extended, and a bfloat16 is the equal float32.
    """
    element_type(dtype)
    return element_type(word_of(dtype))


def vector_type(elements: int, dtype: np.dtype) -> ir.Type:
    """Returns the type of a register."""
    return ir.VectorType.get([elements], element_type(dtype))


def elements_of(part: ir.Value) -> int:
    """Returns how many elements a register has; 1 for a scalar."""
    if not isinstance(part.type, ir.VectorType):
        return 1
    return math.prod(ir.VectorType(part.type).shape)


@dataclasses.dataclass(frozen=True)
class Array:
    """A value: a scalar, or registers that hold its elements in row-major order.

    Attributes:
      shape: its shape; of one element it is a scalar.
      dtype: the type of its elements.
      parts: the scalar, or the registers.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    parts: tuple[ir.Value, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def is_scalar(self) -> bool:
        """Whether it is in a scalar register."""
        return self.size == 1

    @property
    def value(self) -> ir.Value:
        """The scalar, or the only register."""
        if len(self.parts) != 1:
            raise several_registers(self)
        return self.parts[0]

    def with_parts(self, parts: Sequence[ir.Value], dtype: Any = None) -> Array:
        """Returns an array of that shape."""
        return Array(self.shape, dtype or self.dtype, tuple(parts))

    def reshaped(self, shape: Sequence[int]) -> Array:
        """Returns the same elements in another shape."""
        return Array(tuple(shape), self.dtype, self.parts)


def several_registers(x: Array) -> errors.UnsupportedError:
    """Returns the error for an operation that works within one register."""
    return errors.UnsupportedError(
        "an operation across the lanes of several registers",
        expected=f"one register: {elements_of(x.parts[0])} elements of {x.dtype.name}",
        got=f"{x.dtype.name}{list(x.shape)}",
        hint="loop over the registers, and combine what each yields",
    )


@dataclasses.dataclass(frozen=True)
class Handle:
    """A reference: an array in memory, or semaphores.

    Attributes:
      memref: the array.
      dtype: the type of its elements; None for semaphores.
      space: libtpu's name of the memory.
      tiling: `"sparsecore"` where that is its own; None for that of the kernel.
    """

    memref: ir.Value
    shape: tuple[int, ...]
    dtype: Any
    space: str
    tiling: str | None = None


def memref_type(
    shape: Sequence[int],
    element: ir.Type,
    space: str,
    layout: ir.Attribute | None = None,
) -> ir.Type:
    """Returns the type of an array in memory."""
    memory = ir.Attribute.parse(f"#tpu.memory_space<{space}>")
    return ir.MemRefType.get(list(shape), element, layout, memory)


@dataclasses.dataclass(frozen=True)
class ArrayType:
    """What an array in memory is declared as.

    Attributes:
      dtype: the type of its elements.
      space: libtpu's name of the memory.
      tiling: as of `Handle`.
    """

    shape: tuple[int, ...]
    dtype: Any
    space: str = "hbm"
    tiling: str | None = None

    @property
    def type(self) -> ir.Type:
        """Its type in MLIR."""
        layout = _tiled(self.shape, self.dtype) if self.tiling else None
        return memref_type(self.shape, element_type(self.dtype), self.space, layout)

    def handle(self, memref: ir.Value) -> Handle:
        """Returns the reference to one; parts of it are spelt without the tiling."""
        if self.tiling:
            plain = memref_type(self.shape, element_type(self.dtype), self.space)
            memref = tpu.erase_memref_layout(plain, memref)
        return Handle(memref, self.shape, self.dtype, self.space, self.tiling)


def _tiled(shape: Sequence[int], dtype: Any) -> ir.Attribute:
    """Returns the layout of tiles of 8 words in the last axis; strides count tiles."""
    tile = 8 * WORD_BYTES // dtype.itemsize
    counts = [*shape[:-1], -(-shape[-1] // tile)]
    strides = [math.prod(counts[axis + 1 :]) for axis in range(len(shape))]
    return ir.Attribute.parse(f"#tpu.tiled<({tile}),{strides}>")


# --- constants ------------------------------------------------------------------------


def attribute(value: Any, element: ir.Type) -> ir.Attribute:
    """Returns a number as an attribute."""
    if isinstance(element, ir.IntegerType):
        width = ir.IntegerType(element).width
        bits = int(value) % (1 << width)
        signed = bits - (1 << width) if width > 1 and bits >> (width - 1) else bits
        return ir.IntegerAttr.get(element, signed)
    if isinstance(element, ir.IndexType):
        return ir.IntegerAttr.get(element, int(value))
    return ir.FloatAttr.get(element, float(value))


def constant(value: Any, like: ir.Type) -> ir.Value:
    """Returns a number of a type, in every lane of a vector."""
    if isinstance(like, ir.VectorType):
        element = ir.VectorType(like).element_type
        dense = ir.DenseElementsAttr.get_splat(like, attribute(value, element))
        return arith.constant(like, dense)
    return arith.constant(like, attribute(value, like))


def i32(value: Any) -> ir.Value:
    """Returns an i32: of a number, or the value itself."""
    if isinstance(value, ir.Value):
        return value
    return constant(int(value), ir.IntegerType.get_signless(32))


def index(value: Any) -> ir.Value:
    """Returns an index of a number or an i32."""
    if not isinstance(value, ir.Value):
        return constant(int(value), ir.IndexType.get())
    return arith.index_cast(ir.IndexType.get(), value)


def known(value: Any) -> int | None:
    """Returns the number that an integer value is, if it is a constant."""
    if isinstance(value, (int, np.integer)):
        return int(value)
    owner = getattr(value, "owner", None)
    if isinstance(owner, ir.Block) or owner is None:
        return None
    operation = owner.operation if hasattr(owner, "operation") else owner
    if operation.name != "arith.constant":
        return None
    number = operation.attributes["value"]
    return number.value if isinstance(number, ir.IntegerAttr) else None


def same_value(a: ir.Value, b: ir.Value) -> bool:
    """Whether two values are one, or loads of one place."""
    if a == b or isinstance(a.owner, ir.Block) or isinstance(b.owner, ir.Block):
        return a == b
    one, other = a.owner.operation, b.owner.operation
    return one.name == other.name == "tpu.vector_load" and all(
        x == y or (known(x) is not None and known(x) == known(y))
        for x, y in zip(one.operands, other.operands, strict=True)
    )


def broadcast(value: ir.Value, elements: int) -> ir.Value:
    """Returns a register with a scalar in every lane."""
    return vector.broadcast(ir.VectorType.get([elements], value.type), value)


def extract(register: ir.Value, lane: int) -> ir.Value:
    """Returns the scalar in a lane."""
    return vector.extract(register, [], [lane])

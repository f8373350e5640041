# SPDX-License-Identifier: Apache-2.0
"""Element types: numpy's dtype to MLIR's type, constants, lanes of a vector.

MLIR integers are signless; the numpy dtype that accompanies each value has the sign.
A value is one element (`f32`) or the vector of one register (`vector<2xf32>`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import ml_dtypes
import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.emitters import module, operations
from pallas_gpu.emitters.elements import arith
from pallas_gpu.types.elements import Kind as Kind
from pallas_gpu.types.elements import kind as kind
from pallas_gpu.types.elements import stored_bits as stored_bits

BOOL = np.dtype(np.bool_)
I8, I16, I32, I64 = (np.dtype(f"int{bits}") for bits in (8, 16, 32, 64))
U8, U16, U32, U64 = (np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64))
F16, F32, F64 = (np.dtype(f"float{bits}") for bits in (16, 32, 64))
BF16 = np.dtype(ml_dtypes.bfloat16)
F8_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
F8_E5M2 = np.dtype(ml_dtypes.float8_e5m2)
F8_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
F4_E2M1 = np.dtype(ml_dtypes.float4_e2m1fn)
I4, I2 = np.dtype(ml_dtypes.int4), np.dtype(ml_dtypes.int2)
U4, U2 = np.dtype(ml_dtypes.uint4), np.dtype(ml_dtypes.uint2)

_PACK = "vector.from_elements"
EXTRACT, EXTRACT_VALUE = "vector.extract", "llvm.extractvalue"
# The attribute of each that is the position.
_POSITIONS = {EXTRACT: "static_position", EXTRACT_VALUE: "position"}
_FLOATS: dict[np.dtype, Callable[[], ir.Type]] = {
    F16: ir.F16Type.get,
    BF16: ir.BF16Type.get,
    F32: ir.F32Type.get,
    F64: ir.F64Type.get,
}


@functools.cache
def bits(dtype: np.dtype) -> int:
    """The width in bits of an element in a register; 1 for a bool.

    An element of 2 or 4 bits takes a byte, whose other bits are undefined.
    """
    return 1 if kind(dtype) == "bool" else 8 * dtype.itemsize


@functools.cache
def is_packed(dtype: np.dtype) -> bool:
    """True for elements of 2 or 4 bits, several of which share a byte in memory."""
    return stored_bits(dtype) < 8


@functools.cache
def named(name: str) -> np.dtype:
    """The dtype with a name, ml_dtypes' dtypes included."""
    return np.dtype(name)


def combining(dtype: np.dtype) -> np.dtype:
    """The dtype in which a reduction or a scan combines elements.

    Partial results of narrow floats are not rounded: the result would depend on their
    order more than on the elements.
    """
    return F32 if kind(dtype) in ("float8", "float4", "exponent") else dtype


def mlir_type(dtype: np.dtype) -> ir.Type:
    """The element type of a dtype; narrow floats and integers are an i8."""
    make = _FLOATS.get(dtype)
    return make() if make else ir.IntegerType.get_signless(bits(dtype))


def vector_type(dtype: np.dtype, length: int) -> ir.Type:
    """`vector<length x dtype>`."""
    return ir.VectorType.get([length], mlir_type(dtype))


def memory_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype of an element in memory: a bool is stored as one byte, 0 or 1."""
    return U8 if dtype == BOOL else dtype


def length(value: ir.Value) -> int | None:
    """The number of elements of a vector value; None for a single element."""
    type_ = value.type
    return type_.shape[0] if isinstance(type_, ir.VectorType) else None


def constant(value: object, dtype: np.dtype, like: ir.Value | None = None) -> ir.Value:
    """A constant, emitted once per kernel.

    Args:
      value: a Python or numpy scalar; converted to `dtype` as numpy does.
      like: if given, the constant is a vector of the same length as this value.
    """
    lanes = None if like is None else length(like)
    # repr distinguishes 0.0 from -0.0 and 1 from True, which compare equal.
    key = ("constant", dtype, lanes, repr(value))
    return module.current().hoisted(key, lambda: _emit_constant(value, dtype, lanes))


def _emit_constant(value: object, dtype: np.dtype, lanes: int | None) -> ir.Value:
    type_ = mlir_type(dtype)
    exact = np.asarray(value).astype(dtype)
    attribute: ir.Attribute
    match kind(dtype):
        case "float":
            attribute = ir.FloatAttr.get(type_, float(exact))
        case "float8" | "float4" | "exponent":
            attribute = ir.IntegerAttr.get(type_, int(exact.view(np.int8)))
        case "bool":
            attribute = ir.IntegerAttr.get(type_, int(exact))
        case _:
            # Attributes store the bit pattern; large unsigned values become negative.
            if is_packed(dtype):
                exact = exact.astype(np.int8)
            signed = exact.view(np.dtype(f"int{bits(dtype)}"))
            attribute = ir.IntegerAttr.get(type_, int(signed))
    if lanes is not None:
        type_ = ir.VectorType.get([lanes], type_)
        attribute = ir.DenseElementsAttr.get_splat(type_, attribute)
    return operations.create("arith.constant", type_, (), {"value": attribute})


def is_constant(value: ir.Value) -> bool:
    """True if the value is defined by a constant operation."""
    owner = value.owner
    return isinstance(owner, (ir.Operation, ir.OpView)) and (
        owner.operation.name == "arith.constant"
    )


def splat(value: ir.Value, lanes: int) -> ir.Value:
    """A vector with the element in every lane."""
    type_ = ir.VectorType.get([lanes], value.type)
    return operations.create("vector.broadcast", type_, [value])


def extract(value: ir.Value, lane: int) -> ir.Value:
    """One element of a vector."""
    (at,) = _positions(EXTRACT, range(lane, lane + 1))
    return operations.create(EXTRACT, value.type.element_type, [value], at)


def _positions(name: str, of: range) -> list[Mapping[str, ir.Attribute]]:
    """The attributes of operations that take fields at some positions."""
    key = _POSITIONS[name]
    return module.current().attributes(
        (name, of), lambda: [{key: operations.position(i)} for i in of]
    )


def fields(
    value: ir.Value, types: Sequence[ir.Type], name: str = EXTRACT_VALUE
) -> list[ir.Value]:
    """The fields of a structure of the given types, or by `EXTRACT` of a vector."""
    places, operands = _positions(name, range(len(types))), [value]
    pairs = zip(types, places, strict=True)
    return [operations.create(name, type_, operands, at) for type_, at in pairs]


def elements(value: ir.Value) -> Iterator[ir.Value]:
    """The elements of a vector: those of which `pack` has made it, or extracted."""
    owner = value.owner
    if not isinstance(owner, ir.Block) and owner.name == _PACK:
        return iter(owner.operands)
    type_ = value.type
    element, operands = type_.element_type, [value]
    places = _positions(EXTRACT, range(type_.shape[0]))
    return (operations.create(EXTRACT, element, operands, at) for at in places)


def is_uniform(value: ir.Value, depth: int = 8) -> bool:
    """True if all lanes of a vector are known to be equal.

    Args:
      value: a vector, or a single element.
      depth: of the elementwise operations that are looked through.
    """
    owner = value.owner
    if length(value) in (None, 1):
        return True
    if isinstance(owner, ir.Block) or depth == 0:
        return False
    made = owner.operation
    if made.name == "arith.constant":
        return bool(ir.DenseElementsAttr(made.attributes["value"]).is_splat)
    if made.name == _PACK:
        return len(set(made.operands)) == 1
    elementwise = made.name == "vector.broadcast" or made.name.startswith("arith.")
    return elementwise and all(is_uniform(x, depth - 1) for x in made.operands)


def pack(elements: Sequence[ir.Value], type_: ir.Type | None = None) -> ir.Value:
    """The vector of the given elements; `type_` is its type, where that is known."""
    if type_ is None:
        type_ = ir.VectorType.get([len(elements)], elements[0].type)
    return operations.create(_PACK, type_, elements)


def per_lane(emit: Callable[..., ir.Value], *values: ir.Value) -> ir.Value:
    """Applies an emitter of single elements to every lane.

    Args:
      emit: its arguments are one element of each value.
      values: all single elements, or all vectors of one length.
    """
    if length(values[0]) is None:
        return emit(*values)
    return pack([emit(*lane) for lane in zip(*map(elements, values), strict=True)])


def bitcast(value: ir.Value, dtype: np.dtype) -> ir.Value:
    """The value's bits as elements of another dtype, with as many lanes as fit."""
    lanes = length(value)
    if lanes is None:
        target = mlir_type(dtype)
        return value if value.type == target else arith.bitcast(target, value)
    own_bits = value.type.element_type.width
    target = vector_type(dtype, lanes * own_bits // bits(dtype))
    if value.type == target:
        return value
    return operations.create("vector.bitcast", target, [value])

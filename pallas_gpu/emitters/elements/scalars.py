# SPDX-License-Identifier: Apache-2.0
"""Typed operations on single values: loop counters, indices, conditions.

The sign of an integer comes from the numpy dtype; MLIR's integers are signless.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.emitters.elements import arith, dtypes, table
from pallas_gpu.emitters.elements.convert import convert_value

# On an addition of 0: what the result is a multiple of.
_PROMISE = "pallas_gpu.multiple_of"


def constant(value: object, dtype: np.dtype) -> ir.Value:
    """A constant of a dtype, emitted once per kernel."""
    return dtypes.constant(value, np.dtype(dtype))


def compare(name: str, dtype: np.dtype, a: ir.Value, b: ir.Value) -> ir.Value:
    """Compares (`eq`, `ne`, `lt`, `le`, `gt`, `ge`); the result is i1."""
    return table.emit(name, np.dtype(dtype), a, b)


def select(condition: ir.Value, if_true: ir.Value, if_false: ir.Value) -> ir.Value:
    """Selects one of two values by an i1."""
    return arith.select(condition, if_true, if_false)


def convert(value: ir.Value, src: np.dtype, dst: np.dtype) -> ir.Value:
    """Converts one value as lax's `convert_element_type` does."""
    return convert_value(value, np.dtype(src), np.dtype(dst))


def known(index: int | ir.Value) -> int | None:
    """Returns the value of a static index, None for a dynamic one."""
    if isinstance(index, int):
        return index
    name, operands = _definition(index)
    match name:
        case "arith.constant":
            return _number(index)
        case "arith.index_cast" | "arith.extsi":
            return known(operands[0])
        case "arith.index_castui":
            number = known(operands[0])
            return None if number is None or number < 0 else number
        case "arith.extui":
            number = known(operands[0])
            bits = operands[0].type.width
            return None if number is None else number % (1 << bits)
    return None


def divisor(index: int | ir.Value) -> int:
    """Returns a known divisor of an index; 0 for the index 0.

    Vector accesses and accesses to tiles depend on it. Kernels usually index with
    products of block sizes and grid positions, whose factors are visible.
    """
    number = known(index)
    if number is not None or isinstance(index, int):
        return abs(number or 0)
    if (promised := _promised(index)) is not None:
        return promised
    name, operands = _definition(index)
    match name:
        case "arith.index_cast" | "arith.index_castui":
            return divisor(operands[0])
        case "arith.extsi" | "arith.extui":
            # A narrow product may have wrapped; powers of two still divide it.
            inner = divisor(operands[0])
            return inner & -inner
        case "arith.muli":
            return math.prod(divisor(x) for x in operands)
        case "arith.addi" | "arith.subi":
            return math.gcd(*(divisor(x) for x in operands))
    return 1


def promise(value: ir.Value, multiple: int) -> ir.Value:
    """Returns an integer that the author says is a multiple of another."""
    zero = arith.constant(value.type, ir.IntegerAttr.get(value.type, 0))
    same = arith.addi(value, zero)
    bits = ir.IntegerType.get_signless(64)
    known_ = math.lcm(multiple, divisor(value))
    same.owner.attributes[_PROMISE] = ir.IntegerAttr.get(bits, known_)
    return same


def _promised(value: ir.Value) -> int | None:
    owner = value.owner
    if isinstance(owner, ir.Block) or _PROMISE not in owner.attributes:
        return None
    return ir.IntegerAttr(owner.attributes[_PROMISE]).value


def _definition(value: ir.Value) -> tuple[str | None, Sequence[ir.Value]]:
    """The name and operands of a value's defining operation; (None, ()) if none."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        return None, ()
    return owner.operation.name, owner.operation.operands


def _number(constant_: ir.Value) -> int | None:
    attribute = constant_.owner.operation.attributes["value"]
    return attribute.value if isinstance(attribute, ir.IntegerAttr) else None

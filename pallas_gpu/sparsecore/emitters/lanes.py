# SPDX-License-Identifier: Apache-2.0
"""Operations across the lanes of registers: scans, reductions, sorts, permutations."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxlib.mosaic.python import tpu

from pallas_gpu.sparsecore.emitters import elementwise
from pallas_gpu.sparsecore.emitters.values import (
    BOOL,
    I32,
    Array,
    broadcast,
    constant,
    elements_of,
    extract,
    is_float,
    vector_type,
)

# lax's combination of two elements, by the kind of a scan.
COMBINES = {"sum": "add", "max": "max", "min": "min"}


def _ordered(x: ir.Value, dtype: np.dtype) -> ir.Value:
    """Flips the sign bits of signed integers, which are compared unsigned; or back."""
    if dtype.kind != "i":
        return x
    return arith.xori(x, constant(-(2**31), x.type))


def all_lanes(part: ir.Value) -> ir.Value:
    """Returns a mask of all lanes of a register."""
    return constant(1, vector_type(elements_of(part), BOOL))


def scan(kind: str, part: ir.Value, dtype: np.dtype, mask: Any = None) -> ir.Value:
    """Returns the sums, maxima or minima of the lanes up to each one.

    Args:
      mask: the lanes that count; None: all.
    """
    mask = all_lanes(part) if mask is None else mask
    is_order = kind != "sum"
    given = _ordered(part, dtype) if is_order else part
    reduction = ir.Attribute.parse(f"#tpu.reduction_kind<{kind}>")
    made = tpu.scan(given.type, given, reduction, _dimension(), mask=mask)
    return _ordered(made, dtype) if is_order else made


def _dimension() -> ir.Attribute:
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), 0)


def combine(kind: str, dtype: np.dtype, a: ir.Value, b: ir.Value) -> ir.Value:
    """Returns the sum, maximum or minimum of two registers, or scalars."""
    return elementwise.ROWS[COMBINES[kind]][elementwise.kind_of(dtype)](a, b)


def cumulative(kind: str, x: Array) -> Array:
    """Returns the scan of a vector of any number of registers."""
    parts: list[ir.Value] = []
    for part in x.parts:
        made = scan(kind, part, x.dtype)
        if parts:
            elements = elements_of(part)
            before = broadcast(extract(parts[-1], elements - 1), elements)
            made = combine(kind, x.dtype, before, made)
        parts.append(made)
    return x.with_parts(parts)


def reduce(kind: str, x: Array) -> ir.Value:
    """Returns the sum, maximum or minimum of all elements, a scalar."""
    if x.is_scalar:
        return x.value
    total = x.parts[0]
    for part in x.parts[1:]:
        total = combine(kind, x.dtype, total, part)
    return extract(scan(kind, total, x.dtype), elements_of(total) - 1)


def mask_reduce(kind: str, mask: ir.Value, elements: int) -> ir.Value:
    """Returns the number of true lanes (sum), or the first one, in each lane."""
    return tpu.all_reduce(
        vector_type(elements, I32),
        mask,
        0,
        ir.Attribute.parse(f"#tpu.reduction_kind<{kind}>"),
    )


def count(mask: Array, lanes: int) -> ir.Value:
    """Returns the number of true elements, an i32 scalar.

    Args:
      lanes: elements of 32 bits in a register.
    """
    total = None
    for part in mask.parts:
        number = extract(mask_reduce("sum", part, lanes), 0)
        total = number if total is None else arith.addi(total, number)
    assert total is not None
    return total


def first(mask: Array, lanes: int) -> ir.Value:
    """Returns the position of the first true element; the size if there is none."""
    found = constant(mask.size, ir.IntegerType.get_signless(32))
    at = mask.size
    for part in reversed(mask.parts):
        elements = elements_of(part)
        at -= elements
        lane = extract(mask_reduce("find_first_set", part, lanes), 0)
        missing = arith.cmpi(
            arith.CmpIPredicate.eq, lane, constant(elements, lane.type)
        )
        here = arith.addi(lane, constant(at, lane.type))
        found = arith.select(missing, found, here)
    return found


def argument(kind: str, x: Array) -> ir.Value:
    """Returns the position of the first maximum or minimum."""
    best = reduce(kind, x)
    masks = []
    for part in x.parts:
        lanes = broadcast(best, elements_of(part))
        name = elementwise.kind_of(x.dtype)
        masks.append(elementwise.compare("eq", name, part, lanes))
    return first(x.with_parts(masks, BOOL), elements_of(x.parts[0]))


def sort(
    keys: ir.Value,
    values: ir.Value,
    dtype: np.dtype,
    *,
    mask: Any = None,
    descending: bool = False,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Sorts two registers by the first: keys, values, and the mask."""
    mask = all_lanes(keys) if mask is None else mask
    given = _ordered(keys, dtype)
    op = tpu.SortOp(
        mask.type, given.type, values.type, given, values, mask=mask,
        descending=descending,
    )  # fmt: skip
    moved, sorted_keys, sorted_values = op.results
    return _ordered(sorted_keys, dtype), sorted_values, moved


def scan_count(part: ir.Value, mask: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Returns how often each lane's value has occurred, and a mask of the last ones."""
    op = tpu.ScanCountOp(
        mask, part, results=[mask.type, vector_type(elements_of(part), I32)]
    )
    last, counts = op.results
    return counts, last


def permute(part: ir.Value, indices: ir.Value) -> ir.Value:
    """Returns the lanes of a register that indices name."""
    return tpu.dynamic_gather(part, indices, [0])


def iota(elements: int) -> ir.Value:
    """Returns the number of each lane, as i32."""
    return tpu.iota(vector_type(elements, I32), [0])


def reverse(part: ir.Value) -> ir.Value:
    """Returns the lanes of a register in the opposite order."""
    lanes = iota(elements_of(part))
    last = constant(elements_of(part) - 1, lanes.type)
    return permute(part, arith.subi(last, lanes))


def is_scannable(dtype: np.dtype) -> bool:
    """Whether lanes of such elements can be scanned, sorted and permuted."""
    return (
        dtype != BOOL
        and (is_float(dtype) or dtype.kind in "iu")
        and (dtype.itemsize == 4)
    )

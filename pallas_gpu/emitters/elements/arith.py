# SPDX-License-Identifier: Apache-2.0
"""The dialect `arith`, whose operations are created by name: see `operations.py`.

Functions have the names and operands of those in `jaxlib.mlir.dialects.arith`.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxlib.mlir import ir
from jaxlib.mlir.dialects.arith import CmpFPredicate as CmpFPredicate
from jaxlib.mlir.dialects.arith import CmpIPredicate as CmpIPredicate
from jaxlib.mlir.dialects.arith import constant as constant

from pallas_gpu.emitters.operations import create, same_type


def _conversion(name: str) -> Callable[[ir.Type, ir.Value], ir.Value]:
    return lambda type_, value: create(name, type_, [value])


def _comparison(name: str) -> Callable[[int, ir.Value, ir.Value], ir.Value]:
    def emit(predicate: int, a: ir.Value, b: ir.Value) -> ir.Value:
        of, result = a.type, ir.IntegerType.get_signless(1)
        number = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), predicate)
        if isinstance(of, ir.VectorType):
            result = ir.VectorType.get(of.shape, result)
        return create(name, result, [a, b], {"predicate": number})

    return emit


def select(condition: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """`arith.select`: one of two values of a type."""
    return create("arith.select", a.type, [condition, a, b])


addi, subi, muli = map(same_type, ("arith.addi", "arith.subi", "arith.muli"))
divsi, divui = map(same_type, ("arith.divsi", "arith.divui"))
remsi, remui = map(same_type, ("arith.remsi", "arith.remui"))
andi, ori, xori = map(same_type, ("arith.andi", "arith.ori", "arith.xori"))
shli, shrsi, shrui = map(same_type, ("arith.shli", "arith.shrsi", "arith.shrui"))
maxsi, maxui = map(same_type, ("arith.maxsi", "arith.maxui"))
minsi, minui = map(same_type, ("arith.minsi", "arith.minui"))
addf, subf, mulf = map(same_type, ("arith.addf", "arith.subf", "arith.mulf"))
divf, negf = map(same_type, ("arith.divf", "arith.negf"))
maximumf, minimumf = map(same_type, ("arith.maximumf", "arith.minimumf"))

extsi, extui, trunci = map(_conversion, ("arith.extsi", "arith.extui", "arith.trunci"))
extf, truncf = map(_conversion, ("arith.extf", "arith.truncf"))
sitofp, uitofp = map(_conversion, ("arith.sitofp", "arith.uitofp"))
bitcast = _conversion("arith.bitcast")
index_cast, index_castui = map(_conversion, ("arith.index_cast", "arith.index_castui"))

cmpi, cmpf = map(_comparison, ("arith.cmpi", "arith.cmpf"))

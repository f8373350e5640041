# SPDX-License-Identifier: Apache-2.0
"""The order of operations in a program."""

from __future__ import annotations

import random

import pytest
from jaxlib.mlir import ir

from pallas_gpu.emitters import module
from pallas_gpu.emitters.program import order as program_order

NESTED = """
func.func @f(%c: i1) {
  "test.mark"() {n = 0} : () -> ()
  scf.if %c {
    "test.mark"() {n = 1} : () -> ()
    scf.if %c {
      "test.mark"() {n = 2} : () -> ()
    }
    "test.mark"() {n = 3} : () -> ()
  } else {
    "test.mark"() {n = 4} : () -> ()
  }
  "test.mark"() {n = 5} : () -> ()
  return
}
"""


@pytest.mark.parametrize("seed", range(4))
def test_operations_are_sorted_as_a_walk_visits_them(seed):
    marks: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == "test.mark":
            marks.append(op)
        return ir.WalkResult.ADVANCE

    with module.make_context(), ir.Location.unknown():
        parsed = ir.Module.parse(NESTED)
        parsed.operation.walk(visit)
        shuffled = random.Random(seed).sample(marks, len(marks))
        assert program_order.in_order(shuffled) == marks


def test_an_enclosing_operation_comes_before_those_in_it():
    with module.make_context(), ir.Location.unknown():
        parsed = ir.Module.parse(NESTED)
        (function,) = (op.operation for op in parsed.body.operations)
        first = function.regions[0].blocks[0].operations[0].operation
        assert program_order.in_order([first, function]) == [function, first]

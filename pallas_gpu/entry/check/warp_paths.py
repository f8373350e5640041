# SPDX-License-Identifier: Apache-2.0
"""Which operations in a `warp_map` the four warps execute alike, as far as is known.

A value may vary among the warps if it depends on the warp's index, on memory, or on the
time: whatever one reads, another may read differently. What is captured from outside,
and what is computed from that alone, does not vary. An operation is executed alike if
no branch and no number of iterations around it varies, and none of its operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pallas_gpu import _jax
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.program.build import region_of
from pallas_gpu.program.flow import Flow
from pallas_gpu.program.nodes import Constant, Kind, Op, Value


def executed_unevenly(warp_map: _jax.JaxprEqn) -> set[int]:
    """Returns the ids of the equations that the warps may not execute alike."""
    region = region_of(warp_map.params["jaxpr"])
    found = _Varies(warp_map.params["axis_name"])
    found.run(region, [*(False for _ in region.inputs[1:]), True])
    return found.uneven


class _Varies(Flow[bool]):
    """Whether a value varies among the warps.

    Attributes:
      uneven: ids of equations that the warps may not execute alike.
    """

    def __init__(self, axis_name: Any):
        super().__init__()
        self._axis_name = axis_name
        self.uneven: set[int] = set()

    def unknown(self, value: Value) -> bool:
        return True

    def constant(self, constant: Constant) -> bool:
        return False

    def join(self, a: bool, b: bool) -> bool:
        return a or b or any(self.conditions)

    def made(self, op: Op, value: Value) -> bool:
        # A loop makes slices of its operands, a scope makes references.
        return op.kind is Kind.FOR and any(map(self.of, op.inputs))

    def stacked(self, fact: bool, value: Value) -> bool:
        return fact

    def visit(self, op: Op, operands: Sequence[bool]) -> None:
        if any(operands) or any(self.conditions):
            self.uneven.add(id(op.equation))

    def results(self, op: Op, operands: Sequence[bool]) -> list[bool]:
        if op.name == "axis_index":
            return [op.params["axis_name"] == self._axis_name]
        operation = registry.operation(op.primitive)
        reads = operation is not None and bool(operation.accesses)
        return [reads or any(operands)] * len(op.results)

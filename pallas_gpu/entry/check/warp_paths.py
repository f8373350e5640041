# SPDX-License-Identifier: Apache-2.0
"""Which operations in a `warp_map` the four warps execute alike, as far as is known.

A value may vary among the warps if it depends on the warp's index, on memory, or on the
time: whatever one reads, another may read differently. What is captured from outside,
and what is computed from that alone, does not vary. An operation is executed alike if
no branch and no number of iterations around it varies, and none of its operands.
"""

from __future__ import annotations

from collections.abc import Sequence

from pallas_gpu import _jax
from pallas_gpu.primitives.indices.facts import Fact
from pallas_gpu.program.build import region_of
from pallas_gpu.program.facts import WARP, Facts
from pallas_gpu.program.nodes import Op


def executed_unevenly(warp_map: _jax.JaxprEqn) -> set[int]:
    """Returns the ids of the equations that the warps may not execute alike."""
    region = region_of(warp_map.params["jaxpr"])
    paths = _Paths()
    *captured, _ = paths.inputs_of(region)
    paths.run(region, [*captured, paths.warp(warp_map.params["axis_name"])])
    return paths.uneven


class _Paths(Facts):
    """Finds operations whose operands or conditions vary among the warps.

    Attributes:
      uneven: ids of equations that the warps may not execute alike.
    """

    def __init__(self) -> None:
        super().__init__()
        self.uneven: set[int] = set()

    def visit(self, op: Op, operands: Sequence[Fact]) -> None:
        if any(fact.depends_on(WARP) for fact in (*operands, *self.conditions)):
            self.uneven.add(id(op.equation))

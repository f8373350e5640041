# SPDX-License-Identifier: Apache-2.0
"""Layouts for the arrays of a program: registers, tilings and swizzles.

`infer` assigns a register layout to each array and operand, and a tiling and swizzle to
each SMEM array, such that the modelled cost of the kernel is minimal.

* `collect` runs the relation of each operation (in `families`), which adds variables,
  edges and uses of memory to the network.
* `candidates` finds the candidate layouts of each array in registers; `spaces`, those
  of arrays in memory.
* `costs` and `assembly` formulate them as a problem, which `solver` solves.
* `explain` reports the conflict where there is no solution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pallas_gpu.layouts import SmemLayout
from pallas_gpu.layouts.registers.placement import Placement
from pallas_gpu.lowering.inference import assembly, collect, explain, solver
from pallas_gpu.lowering.inference.network import Memory, Port, digest
from pallas_gpu.program.nodes import Op


def infer(
    network: collect.Network,
    *,
    scratch_bytes: Sequence[int],
    free_bytes: int | None = None,
    byte_matrices: bool = False,
) -> Assignment:
    """Chooses the layouts of a kernel.

    Args:
      network: its constraints.
      scratch_bytes: SMEM of a warpgroup for relayouts and reductions across warps: the
        sizes to try in order; the first that admits an assignment is used; the last may
        be less than a relayout wants.
      free_bytes: what a warpgroup could have if the author set no limit, for the
        message of the error; None if that is not known.
      byte_matrices: as of `plan_access`.

    Raises:
      LayoutError: no assignment satisfies all operations; the message names those that
        conflict, with their lines, and a change that would resolve the conflict.
    """
    for size in scratch_bytes:
        problem = assembly.Assembly(
            network,
            size,
            free_bytes,
            in_rounds=size == scratch_bytes[-1],
            byte_matrices=byte_matrices,
        )
        error = explain.domain_error(problem)
        if error is not None:
            continue
        solution = problem.solve()
        if solution.feasible:
            return Assignment(network, problem, solution)
    raise error or explain.conflict(problem)


class Assignment:
    """The layouts of a program.

    Attributes:
      network: what was collected.
      scratch_bytes: SMEM that a warpgroup may use for relayouts and reductions.
      exact: whether the assignment has the least cost among the candidates.
      entries: number of table entries computed, a machine-independent measure of work.
    """

    def __init__(
        self,
        network: collect.Network,
        problem: assembly.Assembly,
        solution: solver.Solution,
    ):
        self.scratch_bytes = problem.scratch_bytes
        self.exact = solution.exact
        self.entries = solution.entries
        self.network = network
        self._problem = problem
        self._labels = solution.labels
        self._storages = {
            array.base: problem.storages[array.index][
                solution.labels[problem.array_variable(array)]
            ]
            for array in problem.arrays
        }

    def result(self, path: Any, op: Op, slot: Any) -> Placement | None:
        """The layout of a result; None if it has none, see `Node.defer`."""
        port = self.network.made.get((path, op, slot))
        return None if port is None else self.layout(port)

    def operand(self, path: Any, op: Op, slot: Any) -> Placement | None:
        """The layout that an operation needs of an operand."""
        port = self.network.taken.get((path, op, slot))
        return None if port is None else self.layout(port)

    def smem(self, path: Any, op: Op, i: int) -> SmemLayout:
        """Tiling and swizzle of the array in SMEM that a scope declares."""
        return self.storage(self.network.declared[path, op, i])

    def storage(self, memory: Memory) -> Any:
        """The layout of an array in SMEM or TMEM."""
        found = self._storages.get(memory, memory.given)
        return found or SmemLayout(memory.shape, memory.bits)

    def layout(self, port: Port) -> Placement:
        """The layout on one side of a variable."""
        label = self._labels[port.variable.index]
        return self._problem.book.layouts[self._problem.numbers(port)[label]]


__all__ = ["Assignment", "digest", "infer"]

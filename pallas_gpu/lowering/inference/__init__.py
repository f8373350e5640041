# SPDX-License-Identifier: Apache-2.0
"""Layouts for a kernel of the warpgroup level: registers, tilings and swizzles.

`infer` reads the body of a kernel and assigns a register layout to each vector value
and operand, a tiling and swizzle to each SMEM array, and a layout to each TMEM array,
such that the modelled cost of the kernel is minimal.

* `constraints` runs the infer rule of each operation (in `families`), which adds
  variables, edges and uses of memory.
* `candidates` finds the candidate layouts of each array in registers; `spaces`, those
  of arrays in memory.
* `costs` and `assembly` formulate them as a problem, which `solver` solves.
* `explain` reports the conflict where there is no solution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir

from pallas_gpu.layouts import SmemLayout, TmemLayout
from pallas_gpu.layouts.registers.placement import Placement
from pallas_gpu.lowering.inference import assembly, collect, explain, solver
from pallas_gpu.lowering.inference.annotate import annotate
from pallas_gpu.lowering.inference.constraints import collect as collect_block
from pallas_gpu.lowering.inference.listing import listing
from pallas_gpu.lowering.inference.network import Network, Port, digest
from pallas_gpu.lowering.inference.sources import where
from pallas_gpu.program.nodes import Op


class Assignment:
    """The layouts that `infer` assigned in a kernel.

    Attributes:
      scratch_bytes: SMEM that a warpgroup may use for relayouts and reductions.
      exact: whether the assignment has the least cost among the candidates.
      entries: number of table entries computed, a machine-independent measure of
        work.
    """

    def __init__(self, problem: assembly.Assembly, solution: solver.Solution):
        self.scratch_bytes = problem.scratch_bytes
        self.exact = solution.exact
        self.entries = solution.entries
        self._assembly = problem
        self._labels = solution.labels
        self._storages = {
            array.base: problem.storages[array.index][
                solution.labels[problem.array_variable(array)]
            ]
            for array in problem.arrays
        }

    def result(self, value: ir.Value) -> Placement | None:
        """The layout of a vector: an operation's result or a region's argument.

        None for values without a layout: splats, iotas, and broadcasts and elementwise
        functions of these only. They are materialized in the layout of `operand`.
        """
        return self._layout(self._assembly.network.results.get(value))

    def operand(self, op: ir.Operation, i: int) -> Placement | None:
        """The layout that operand `i` must have on entry to the operation.

        None if it is not a vector, if the result has no layout either, or if the
        operation ignores it. Loops and branches: the operands of `scf.for` and
        `scf.while` that are initial values, those of `scf.yield` and `scf.condition`.
        """
        return self._layout(self._assembly.network.operands.get((op.operation, i)))

    def _layout(self, port: Port | None) -> Placement | None:
        if port is None:
            return None
        label = self._labels[port.variable.index]
        return self._assembly.book.layouts[self._assembly.numbers(port)[label]]

    def smem(self, value: ir.Value) -> SmemLayout:
        """Tiling and swizzle of an SMEM array: of the result of its `slice_smem`."""
        return self._storages[value]

    def tmem(self, value: ir.Value) -> TmemLayout:
        """The layout of an array in TMEM, identified by any memref of it."""
        part = self._assembly.network.part(value)
        assert part is not None
        return self._storages[part.base]


def infer(
    block: ir.Block,
    *,
    scratch_bytes: Sequence[int],
    free_bytes: int | None = None,
    cluster: Sequence[int] = (),
    byte_matrices: bool = False,
) -> Assignment:
    """Chooses the layouts of a kernel.

    Args:
      block: the kernel's body.
        scratch_bytes: SMEM of a warpgroup for relayouts and reductions across warps:
          the sizes to try in order; the first that admits an assignment is used; the
          last may be less than a relayout wants.
        free_bytes: what a warpgroup could have if the author set no limit, for the
          message of the error; None if that is not known.
        cluster: CTAs of a cluster per axis, to which `collective` of a copy refers; if
          empty, copies are assumed to be in one piece.
        byte_matrices: as of `plan_access`.

    Raises:
        LayoutError: no assignment satisfies all operations; the message names those
          that conflict, with their lines, and a change that would resolve the conflict.
    """
    network = collect_block(block, cluster)
    return Assignment(*_solved(network, scratch_bytes, free_bytes, byte_matrices))


def infer_program(network: collect.Network, **options: Any) -> ProgramAssignment:
    """As `infer`, of a program whose constraints are collected."""
    return ProgramAssignment(network, *_solved(network, **options))


def _solved(
    network: Network,
    scratch_bytes: Sequence[int],
    free_bytes: int | None = None,
    byte_matrices: bool = False,
) -> tuple[assembly.Assembly, solver.Solution]:
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
            return problem, solution
    raise error or explain.conflict(problem)


class ProgramAssignment:
    """The layouts of a program.

    Attributes:
      scratch_bytes, exact, entries: as of `Assignment`.
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
        return self._of(self.network.made.get((path, op, slot)))

    def operand(self, path: Any, op: Op, slot: Any) -> Placement | None:
        """The layout that an operation needs of an operand."""
        return self._of(self.network.taken.get((path, op, slot)))

    def smem(self, path: Any, op: Op, i: int) -> SmemLayout:
        """Tiling and swizzle of the array in SMEM that a scope declares."""
        memory = self.network.declared[path, op, i]
        found = self._storages.get(memory)
        if found is None:
            found = memory.given or SmemLayout(memory.shape, memory.bits)
        return found

    def _of(self, port: Port | None) -> Placement | None:
        return None if port is None else self.layout(port)

    def layout(self, port: Port) -> Placement:
        """The layout on one side of a variable."""
        label = self._labels[port.variable.index]
        return self._problem.book.layouts[self._problem.numbers(port)[label]]


__all__ = [
    "Assignment",
    "ProgramAssignment",
    "annotate",
    "digest",
    "infer",
    "infer_program",
    "listing",
    "where",
]

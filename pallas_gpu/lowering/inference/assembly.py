# SPDX-License-Identifier: Apache-2.0
"""From the collected network to a problem for the solver, and from its labels back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pallas_gpu import errors, types
from pallas_gpu.lowering.inference import solver
from pallas_gpu.lowering.inference.candidates import Book, candidates
from pallas_gpu.lowering.inference.costs import Costs, Key, preferences
from pallas_gpu.lowering.inference.network import (
    Array,
    Edge,
    Network,
    Port,
    Use,
    Variable,
    digest,
)
from pallas_gpu.lowering.inference.solver import INFEASIBLE, Problem, Solution
from pallas_gpu.lowering.inference.spaces import smem, tmem

# SmemLayout for an array in SMEM, TmemLayout for one in TMEM.
type Storage = Any


@dataclasses.dataclass(frozen=True)
class Labels:
    """The layouts that a variable's labels stand for, as numbers in the book.

    Attributes:
      source: per label the operand's layout.
      target: per label the result's; that of the operand where there is no result.
    """

    source: tuple[int, ...]
    target: tuple[int, ...]


class Assembly:
    """The problem of a kernel, and the meaning of its variables and labels.

    The network's variables come first, with their own numbers, then the arrays.

    Args:
      network: the collected variables, edges and arrays.
      scratch_bytes: SMEM that relayouts and reductions may use.
      free_bytes: SMEM that they could have, None if that is not known.
      in_rounds: whether a relayout may take less than it wants, at any cost.
      byte_matrices: as of `plan_access`.

    Attributes:
      book: the layouts.
      labels: per variable of the network.
      arrays: the arrays in SMEM and TMEM.
      storages: per array its candidate layouts in memory.
      refusals: per array, use and storage the error if they are incompatible, or None.

    Raises:
      LayoutError: the user's transforms do not fit their array.
    """

    def __init__(
        self,
        network: Network,
        scratch_bytes: int,
        free_bytes: int | None = None,
        in_rounds: bool = True,
        byte_matrices: bool = False,
    ):
        self.network = network
        self.scratch_bytes, self.free_bytes = scratch_bytes, free_bytes
        self.book = Book()
        found = candidates(network, self.book)
        self.labels = [_labels(v, found, self.book) for v in network.variables]
        self.arrays = list(network.arrays.values())
        self.storages = [_storages(array) for array in self.arrays]
        self.refusals = [
            {use: [_refusal(array, use, s) for s in storages] for use in array.uses}
            for array, storages in zip(self.arrays, self.storages, strict=True)
        ]
        self.costs = Costs(self.book, scratch_bytes, in_rounds, byte_matrices)
        self._keys = _keys(network)
        # A value that is two operands of an operation is converted once.
        self._edges = list(
            {(e.producer, e.consumer, e.bits): e for e in network.edges}.values()
        )

    def numbers(self, port: Port) -> tuple[int, ...]:
        """Per label of a variable the layout on one of its sides."""
        labels = self.labels[port.variable.index]
        return labels.source if port.side == "source" else labels.target

    def array_variable(self, array: Array) -> int:
        """The number of an array's variable in the problem."""
        return len(self.labels) + array.index

    # --- the problem ------------------------------------------------------------------

    def problem(self) -> Problem:
        """The problem with the costs computed so far."""
        problem = self._settled.copy()
        for variable in self.network.variables:
            if _accesses_gmem(variable):
                settled = problem.costs[variable.index]
                total = settled + self._operation_costs(variable)
                problem.costs[variable.index] = np.minimum(total, INFEASIBLE)
        for edge in self._edges:
            made, taken = self.numbers(edge.producer), self.numbers(edge.consumer)
            table = self.costs.relayouts(made, taken, edge)
            self._add_edge(problem, edge, table)
        for variable, use in self._accesses():
            array = self.network.array(use.part)
            table = self._access_costs(variable, use, array)
            problem.add_table(variable.index, self.array_variable(array), table)
        return problem

    @functools.cached_property
    def _settled(self) -> Problem:
        """The part of the problem whose costs are exact from the start."""
        problem = Problem()
        for variable in self.network.variables:
            key = self._keys[variable.index]
            costs = preferences(len(self.labels[variable.index].source), key)
            if not _accesses_gmem(variable):
                costs = costs + self._operation_costs(variable)
            problem.add_variable(costs, key)
        for array in self.arrays:
            problem.add_variable(self._array_costs(array), array.base.origin())
        for move in self.network.moves:
            a, b = move.operand.index, move.result.index
            given, made = self.labels[a].source, self.labels[b].source
            problem.add_table(a, b, self.costs.moves(move, given, made))
        for variable, use in self._transfers():
            array = self.network.array(use.part)
            table = self._transfer_costs(variable, use, array)
            problem.add_table(variable.index, self.array_variable(array), table)
        return problem

    def _operation_costs(self, variable: Variable) -> np.ndarray:
        numbers = self.labels[variable.index].source
        costs = [self.costs.operation(variable, number) for number in numbers]
        return np.array(costs, dtype=np.int64)

    def _array_costs(self, array: Array) -> np.ndarray:
        storages = self.storages[array.index]
        costs = preferences(len(storages), array.base.origin())
        for use, refusals in self.refusals[array.index].items():
            for i, (storage, refusal) in enumerate(
                zip(storages, refusals, strict=True)
            ):
                if refusal is not None:
                    costs[i] = INFEASIBLE
                elif use.kind == "copy" and costs[i] < INFEASIBLE:
                    costs[i] += self.costs.copy(use, storage)
        return costs

    def _add_edge(self, problem: Problem, edge: Edge, table: np.ndarray) -> None:
        a, b = edge.producer.variable.index, edge.consumer.variable.index
        alike = self.labels[a] == self.labels[b]
        uniform = self.labels[a].source == self.labels[a].target
        problem.add_table(a, b, table, mergeable=alike and uniform)

    def _accesses(self) -> Iterator[tuple[Variable, Use]]:
        for variable in self.network.variables:
            if variable.access is not None and variable.access.part.space is types.SMEM:
                yield variable, variable.access

    def _access_costs(self, variable: Variable, use: Use, array: Array) -> np.ndarray:
        storages = self.storages[array.index]
        numbers = self.labels[variable.index].source
        refusals = self.refusals[array.index][use]
        table = np.full((len(numbers), len(storages)), INFEASIBLE, dtype=np.int64)
        for j, (storage, refusal) in enumerate(zip(storages, refusals, strict=True)):
            if refusal is not None:
                continue
            for i, number in enumerate(numbers):
                key = self.costs.smem_key(use, storage, number, variable.bits)
                table[i, j] = self.costs.times(key, use.weight)
        return table

    def _transfers(self) -> Iterator[tuple[Variable, Use]]:
        for variable in self.network.variables:
            if variable.access is not None and variable.access.part.space is types.TMEM:
                yield variable, variable.access

    def _transfer_costs(self, variable: Variable, use: Use, array: Array) -> np.ndarray:
        """Zero where an instruction supports the pair: all move the same words."""
        numbers = self.labels[variable.index].source
        layouts = [self.book.layouts[number] for number in numbers]
        fits = [
            [
                tmem.carries(use, storage, layout)
                for storage in self.storages[array.index]
            ]
            for layout in layouts
        ]
        shape = len(numbers), len(self.storages[array.index])
        table = np.array(fits, dtype=bool).reshape(shape)
        return np.where(table, 0, INFEASIBLE).astype(np.int64)

    # --- solutions --------------------------------------------------------------------

    def costs_of(self, labels: Sequence[int]) -> Iterator[Key]:
        """The costs in a solution that may still be lower bounds."""
        for variable in self.network.variables:
            number = self.labels[variable.index].source[labels[variable.index]]
            key = self.costs.gmem_key(variable, number)
            if key is not None:
                yield key
        for edge in self._edges:
            a, b = (
                self.numbers(port)[labels[port.variable.index]]
                for port in (edge.producer, edge.consumer)
            )
            key = self.costs.relayout_key(a, b, edge)
            if key is not None:
                yield key
        for variable, use in self._accesses():
            array = self.network.array(use.part)
            storage = self.storages[array.index][labels[self.array_variable(array)]]
            number = self.labels[variable.index].source[labels[variable.index]]
            yield self.costs.smem_key(use, storage, number, variable.bits)

    def solve(self, *, cheapest: bool = True) -> Solution:
        """The assignment of least cost, or any; infeasible if there is none."""
        entries, series = 0, solver.Series()
        while True:
            problem = self.problem()
            solution = series.solve(problem)
            entries += solution.entries
            if not solution.feasible and not solution.exact:
                solution = solver.solve(problem, solver.TABLE_LIMIT << 6)
                entries += solution.entries
            refined = solution.feasible and self.costs.refine(
                self.costs_of(solution.labels)
            )
            if refined and not cheapest:
                cost = solver.evaluate(self.problem(), list(solution.labels))
                refined = cost >= solver.INFEASIBLE
            if not refined:
                return dataclasses.replace(solution, entries=entries)

    def refine_all(self) -> None:
        """Replaces every bound by the exact cost, for error messages."""
        for edge in self._edges:
            self.costs.refine(
                key
                for a in self.numbers(edge.producer)
                for b in self.numbers(edge.consumer)
                if (key := self.costs.relayout_key(a, b, edge)) is not None
            )
        for variable, use in self._accesses():
            self.costs.refine(
                self.costs.smem_key(use, storage, number, variable.bits)
                for storage in self.storages[self.network.array(use.part).index]
                for number in self.labels[variable.index].source
            )


def _accesses_gmem(variable: Variable) -> bool:
    """Whether the variable's own costs may be bounds."""
    return variable.access is not None and variable.access.part.space is types.GMEM


def _storages(array: Array) -> list[Storage]:
    if array.base.space is types.TMEM:
        return tmem.storages(array)
    return smem.storages(array)


def _refusal(array: Array, use: Use, storage: Storage) -> errors.LayoutError | None:
    if array.base.space is types.TMEM:
        return tmem.refusal(use, storage)
    return smem.refusal(use, storage, given=array.base.given is not None)


def _keys(network: Network) -> list[int]:
    """Per variable a hash of its own key and those of its users."""
    around: list[list[str]] = [[] for _ in network.variables]
    for edge in network.edges:
        consumer = edge.consumer.variable
        around[edge.producer.variable.index].append(f"to {consumer.key}")
    return [
        digest(str(variable.key), *sorted(around[variable.index]))
        for variable in network.variables
    ]


def _labels(variable: Variable, found: dict, book: Book) -> Labels:
    source, target = variable.source.find(), variable.target.find()
    relation = variable.relation
    if relation is None:
        if variable.fixed is not None:
            numbers: tuple[int, ...] = (book.number(variable.fixed),)
        else:
            numbers = found[source]
        return Labels(numbers, numbers)
    given = found[target] if relation.from_result else found[source]
    follow = relation.backward if relation.from_result else relation.forward
    pairs = []
    for number in given:
        layout = follow(book.layouts[number])
        if layout is not None:
            pairs.append((number, book.number(layout)))
        elif not target.shape:  # a reduction to a scalar
            pairs.append((number, number))
    ours, theirs = tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)
    return Labels(theirs, ours) if relation.from_result else Labels(ours, theirs)

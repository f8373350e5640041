# SPDX-License-Identifier: Apache-2.0
"""From the collected network to a problem for the solver, and from its labels back."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pallas_gpu import types
from pallas_gpu.layouts import transfers
from pallas_gpu.lowering.inference import arrays, solver
from pallas_gpu.lowering.inference.candidates import Book, candidates
from pallas_gpu.lowering.inference.costs import Costs, Key, preferences
from pallas_gpu.lowering.inference.network import (
    Array,
    Network,
    Port,
    Use,
    Variable,
    digest,
)
from pallas_gpu.lowering.inference.solver import INFEASIBLE, Problem, Solution


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
        self.storages = [arrays.storages(array) for array in self.arrays]
        self.refusals = [
            {use: [arrays.refusal(use, s) for s in storages] for use in array.uses}
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
        for variable, _ in self._accesses(types.GMEM):
            settled = problem.costs[variable.index]
            total = settled + self._operation_costs(variable)
            problem.costs[variable.index] = np.minimum(total, INFEASIBLE)
        for edge in self._edges:
            made, taken = self.numbers(edge.producer), self.numbers(edge.consumer)
            table = self.costs.relayouts(made, taken, edge)
            a, b = (x.variable.index for x in (edge.producer, edge.consumer))
            first, second = self.labels[a], self.labels[b]
            alike = first == second and first.source == first.target
            problem.add_table(a, b, table, mergeable=alike)
        for variable, use in self._accesses(types.SMEM):
            self._add_accesses(problem, variable, use)
        return problem

    @functools.cached_property
    def _settled(self) -> Problem:
        """The part of the problem whose costs are exact from the start."""
        problem = Problem()
        for variable in self.network.variables:
            key = self._keys[variable.index]
            costs = preferences(len(self.labels[variable.index].source), key)
            use = variable.access
            if use is None or use.part.space is not types.GMEM:
                costs = costs + self._operation_costs(variable)
            problem.add_variable(costs, key)
        for array in self.arrays:
            problem.add_variable(self._array_costs(array), array.base.origin())
        for move in self.network.moves:
            a, b = move.operand.index, move.result.index
            given, made = self.labels[a].source, self.labels[b].source
            problem.add_table(a, b, self.costs.moves(move, given, made))
        for variable, use in self._accesses(types.TMEM):
            self._add_accesses(problem, variable, use)
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

    def _accesses(self, space: types.MemorySpace) -> Iterator[tuple[Variable, Use]]:
        for variable in self.network.variables:
            if variable.access is not None and variable.access.part.space is space:
                yield variable, variable.access

    def _add_accesses(self, problem: Problem, variable: Variable, use: Use) -> None:
        array, numbers = (
            self.network.array(use.part),
            self.labels[variable.index].source,
        )
        storages, refusals = self.storages[array.index], self.refusals[array.index][use]
        table = np.full((len(numbers), len(storages)), INFEASIBLE, dtype=np.int64)
        for j, (storage, refusal) in enumerate(zip(storages, refusals, strict=True)):
            for i, number in enumerate(numbers) if refusal is None else ():
                table[i, j] = self._access_cost(variable, use, storage, number)
        problem.add_table(variable.index, self.array_variable(array), table)

    def _access_cost(self, x: Variable, use: Use, storage: Any, number: int) -> int:
        if use.part.space is types.SMEM:
            key = self.costs.smem_key(use, storage, number, x.bits)
            return self.costs.times(key, use.weight)
        # All instructions that transfer from and to TMEM move the same words.
        fits = transfers(self.book.layouts[number], storage, use.part.bits)
        return 0 if fits else INFEASIBLE

    # --- solutions --------------------------------------------------------------------

    def bounds(self, labels: Sequence[int] | None = None) -> Iterator[Key]:
        """The costs in a solution, or all, that may still be lower bounds."""

        def chosen(variable: int, every: Sequence[Any]) -> Sequence[Any]:
            return every if labels is None else [every[labels[variable]]]

        for variable, _ in self._accesses(types.GMEM):
            index = variable.index
            for number in chosen(index, self.labels[index].source):
                if (key := self.costs.gmem_key(variable, number)) is not None:
                    yield key
        for edge in self._edges:
            made, taken = (
                chosen(port.variable.index, self.numbers(port))
                for port in (edge.producer, edge.consumer)
            )
            for a, b in itertools.product(made, taken):
                if (key := self.costs.relayout_key(a, b, edge)) is not None:
                    yield key
        for variable, use in self._accesses(types.SMEM):
            array, index = self.network.array(use.part), variable.index
            storages = self.storages[array.index]
            for storage in chosen(self.array_variable(array), storages):
                for number in chosen(index, self.labels[index].source):
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
                self.bounds(solution.labels)
            )
            if refined and not cheapest:
                cost = solver.evaluate(self.problem(), list(solution.labels))
                refined = cost >= solver.INFEASIBLE
            if not refined:
                return dataclasses.replace(solution, entries=entries)


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

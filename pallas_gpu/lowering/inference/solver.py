# SPDX-License-Identifier: Apache-2.0
"""Finds the consistent assignment of least cost. Knows nothing of layouts.

A problem has variables with small domains, a cost for each label of a variable, and
tables of costs for pairs of variables. `solve` eliminates the variables one by one: the
tables that mention a variable are added up, and its best label for each combination of
its neighbours' labels is recorded. This is exact, and fast while the tables stay small,
as they do for the graphs of kernels, which are nearly trees.

Where every remaining variable would need a table above `table_limit`, the one with the
smallest table is decided early: it is assigned the label of a neighbour it may be
merged with, or else the label of least cost on its own. The result is then marked as
not exact.

Variables have a key that does not depend on their order in the problem, and costs are
integers, so that neither the order nor rounding changes the answer.
"""

from __future__ import annotations

import dataclasses
import heapq

import numpy as np

INFEASIBLE = 1 << 59
# Sums of eight such numbers fit 64 bits; costs stay far below.
_SAFE_SUMS = 8
TABLE_LIMIT = 1 << 14

Variables = tuple[int, ...]


class Problem:
    """Variables, their costs and the costs of pairs.

    Attributes:
      costs: per variable the cost of each label, int64.
      keys: per variable a number that orders variables.
      tables: per pair (a < b) the cost of each pair of labels, int64.
      mergeable: pairs whose labels mean the same, and cost nothing where equal.
    """

    def __init__(self) -> None:
        self.costs: list[np.ndarray] = []
        self.keys: list[int] = []
        self.tables: dict[tuple[int, int], np.ndarray] = {}
        self.mergeable: set[tuple[int, int]] = set()

    def add_variable(self, costs: np.ndarray, key: int = 0) -> int:
        """Adds a variable with one label per cost; returns its index."""
        self.costs.append(np.minimum(np.asarray(costs, dtype=np.int64), INFEASIBLE))
        self.keys.append(key)
        return len(self.costs) - 1

    def add_table(
        self, a: int, b: int, table: np.ndarray, *, mergeable: bool = False
    ) -> None:
        """Adds the costs [label of a, label of b]; those of one pair add up."""
        if a == b:
            diagonal = np.diagonal(table)
            self.costs[a] = np.minimum(self.costs[a] + diagonal, INFEASIBLE)
            return
        if a > b:
            a, b, table = b, a, table.T
        old = self.tables.get((a, b))
        new = table if old is None else np.minimum(old + table, INFEASIBLE)
        self.tables[a, b] = new
        if mergeable:
            self.mergeable.add((a, b))


@dataclasses.dataclass(frozen=True)
class Solution:
    """What `solve` found.

    Attributes:
      labels: per variable the chosen label.
      cost: the sum of all costs; `INFEASIBLE` or more where there is no solution.
      exact: whether no cheaper choice exists.
      entries: how many table entries were computed: the work, on every machine.
    """

    labels: tuple[int, ...]
    cost: int
    exact: bool
    entries: int

    @property
    def feasible(self) -> bool:
        """Whether the choice is consistent."""
        return self.cost < INFEASIBLE


def solve(problem: Problem, table_limit: int = TABLE_LIMIT) -> Solution:
    """Finds the cheapest labels; the same for every order of variables and tables."""
    elimination = _Elimination(problem, table_limit)
    elimination.run()
    labels = elimination.labels()
    return Solution(
        tuple(labels),
        evaluate(problem, labels),
        elimination.exact,
        elimination.entries,
    )


def evaluate(problem: Problem, labels: list[int]) -> int:
    """The cost of a choice; `INFEASIBLE` where it is not consistent."""
    parts = [int(costs[x]) for costs, x in zip(problem.costs, labels, strict=True)]
    parts += [int(t[labels[a], labels[b]]) for (a, b), t in problem.tables.items()]
    return INFEASIBLE if max(parts, default=0) >= INFEASIBLE else sum(parts)


class _Elimination:
    """The factors that are left, and how each decided variable follows from others."""

    def __init__(self, problem: Problem, table_limit: int):
        self._limit = table_limit
        self._problem = problem
        self._sizes = [len(costs) for costs in problem.costs]
        count = len(self._sizes)
        self._factors: list[dict[Variables, np.ndarray]] = [{} for _ in range(count)]
        self._neighbours: list[set[int]] = [set() for _ in range(count)]
        # Exact integers: a sum of logarithms would depend on the order of its parts.
        self._table_sizes = list(self._sizes)
        self._alive = [True] * count
        self._merges: list[set[int]] = [set() for _ in range(count)]
        self._steps: list[tuple[int, Variables, np.ndarray]] = []
        self._queue: list[tuple[int, int, int]] = []
        self.exact = True
        self.entries = 0
        for variable, costs in enumerate(problem.costs):
            self._factors[variable][(variable,)] = costs
        for (a, b), table in problem.tables.items():
            self._add((a, b), table)
        for a, b in problem.mergeable:
            self._merges[a].add(b)
            self._merges[b].add(a)

    def run(self) -> None:
        for variable in range(len(self._sizes)):
            if self._sizes[variable] == 1:
                self._eliminate(variable)
        for variable, alive in enumerate(self._alive):
            if alive:
                self._enqueue(variable)
        while self._queue:
            size, _, variable = heapq.heappop(self._queue)
            if not self._alive[variable] or size != self._table_sizes[variable]:
                continue
            if size <= self._limit:
                self._eliminate(variable)
            else:
                self.exact = False
                self._decide_early(variable)

    def labels(self) -> list[int]:
        result = [0] * len(self._sizes)
        for variable, variables, best in reversed(self._steps):
            result[variable] = int(best[tuple(result[v] for v in variables)])
        return result

    # --- the graph --------------------------------------------------------------------

    def _enqueue(self, variable: int) -> None:
        key = self._problem.keys[variable]
        heapq.heappush(self._queue, (self._table_sizes[variable], key, variable))

    def _connect(self, a: int, b: int) -> None:
        if b not in self._neighbours[a]:
            self._neighbours[a].add(b)
            self._neighbours[b].add(a)
            self._table_sizes[a] *= self._sizes[b]
            self._table_sizes[b] *= self._sizes[a]

    def _remove(self, variable: int) -> list[tuple[Variables, np.ndarray]]:
        """Takes a variable out of the graph; returns the factors that mention it."""
        factors = list(self._factors[variable].items())
        for variables, _ in factors:
            for other in variables:
                if other != variable:
                    del self._factors[other][variables]
        self._factors[variable] = {}
        for other in self._neighbours[variable]:
            self._neighbours[other].discard(variable)
            self._table_sizes[other] //= self._sizes[variable]
        self._alive[variable] = False
        return factors

    def _add(self, variables: Variables, table: np.ndarray) -> None:
        """Adds a factor with an axis per variable, ascending."""
        for i, a in enumerate(variables):
            for b in variables[i + 1 :]:
                self._connect(a, b)
        old = self._factors[variables[0]].get(variables) if variables else None
        new = table if old is None else np.minimum(old + table, INFEASIBLE)
        for variable in variables:
            self._factors[variable][variables] = new

    # --- steps ------------------------------------------------------------------------

    def _eliminate(self, variable: int) -> None:
        neighbours = tuple(sorted(self._neighbours[variable]))
        if self._sizes[variable] == 1:
            self._fix(variable, 0)
            return
        factors = self._remove(variable)
        order = (*neighbours, variable)
        total = np.zeros([self._sizes[v] for v in order], dtype=np.int64)
        for count, (variables, table) in enumerate(factors, 2):
            total += _broadcast(variables, table, order)
            if count % _SAFE_SUMS == 0:
                np.minimum(total, INFEASIBLE, out=total)
        np.minimum(total, INFEASIBLE, out=total)
        self.entries += total.size
        best = total.argmin(axis=-1)
        self._steps.append((variable, neighbours, best.astype(np.uint8)))
        if neighbours:
            self._add(neighbours, total.min(axis=-1))
        for other in neighbours:
            self._enqueue(other)

    def _fix(self, variable: int, label: int) -> None:
        neighbours = sorted(self._neighbours[variable])
        for variables, table in self._remove(variable):
            rest = tuple(v for v in variables if v != variable)
            if rest:
                self._add(rest, table.take(label, axis=variables.index(variable)))
            self.entries += table.size
        self._steps.append((variable, (), np.array(label)))
        for other in neighbours:
            self._enqueue(other)

    def _decide_early(self, variable: int) -> None:
        target = self._merge_target(variable)
        if target is None:
            self._fix(variable, self._best_alone(variable))
            return
        for other in self._merges[variable]:
            self._merges[other].discard(variable)
            if other != target:
                self._merges[other].add(target)
                self._merges[target].add(other)
        touched = self._neighbours[variable] | {target}
        for variables, table in self._remove(variable):
            self.entries += table.size
            self._add(*_renamed(variables, table, variable, target))
        same = np.arange(self._sizes[variable])
        self._steps.append((variable, (target,), same))
        for other in sorted(touched):
            self._enqueue(other)

    def _merge_target(self, variable: int) -> int | None:
        """The neighbour from which it is most expensive to differ."""
        ranked = []
        for other in self._merges[variable]:
            variables = (min(variable, other), max(variable, other))
            table = self._factors[variable].get(variables)
            if not self._alive[other] or table is None:
                continue
            alone = self._costs(variable) + self._costs(other)
            if (np.minimum(alone, INFEASIBLE) + np.diagonal(table)).min() >= INFEASIBLE:
                continue
            finite = np.minimum(table, INFEASIBLE >> 20)
            weight = int(finite.sum())
            ranked.append((-weight, self._problem.keys[other], other))
        return min(ranked)[2] if ranked else None

    def _costs(self, variable: int) -> np.ndarray:
        return self._factors[variable][(variable,)]

    def _best_alone(self, variable: int) -> int:
        """The label with the least cost if all neighbours comply."""
        total = np.zeros(self._sizes[variable], dtype=np.int64)
        for variables, table in self._factors[variable].items():
            axes = tuple(i for i, v in enumerate(variables) if v != variable)
            total = np.minimum(total + table.min(axis=axes), INFEASIBLE)
            self.entries += table.size
        return int(total.argmin())


def _broadcast(variables: Variables, table: np.ndarray, order: Variables) -> np.ndarray:
    """A factor with its axes at their positions in `order`.

    Both are ascending, but for the last variable of `order`, which the factor has too.
    """
    axis = variables.index(order[-1])
    last = len(variables) - 1
    if last == 0 or variables == order:
        return table
    if axis != last:
        if last == 1:
            table = table.T
        else:
            axes = [*range(axis), *range(axis + 1, last + 1), axis]
            table = table.transpose(axes)
    if len(variables) == len(order):
        return table
    sizes = iter(table.shape)
    return table.reshape([next(sizes) if v in variables else 1 for v in order])


def _renamed(
    variables: Variables, table: np.ndarray, old: int, new: int
) -> tuple[Variables, np.ndarray]:
    """The factor after `old` became another name of `new`."""
    if new in variables:
        a, b = variables.index(old), variables.index(new)
        table = np.diagonal(table, axis1=a, axis2=b)  # its axis goes to the end
        names = [v for v in variables if v not in (old, new)] + [new]
    else:
        names = [new if v == old else v for v in variables]
    order = sorted(range(len(names)), key=names.__getitem__)
    return tuple(names[i] for i in order), table.transpose(order)


# --- why there is no solution ---------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Conflict:
    """A variable for which no label is left.

    Attributes:
      variable: that variable.
      refused: per label the neighbour whose remaining labels all refuse it; None
        where the label's own cost refuses it.
      parents: for each variable that lost labels the neighbours that refused them, in
        order of removal.
    """

    variable: int
    refused: tuple[int | None, ...]
    parents: dict[int, tuple[int, ...]]


def find_conflict(problem: Problem) -> Conflict | None:
    """Removes labels that a neighbour refuses until a variable has none left.

    Returns:
      None if that does not happen: then only several variables together conflict.
    """
    possible = [costs < INFEASIBLE for costs in problem.costs]
    refused: list[list[int | None]] = [[None] * len(c) for c in problem.costs]
    parents: dict[int, list[int]] = {}
    around: list[list[tuple[int, np.ndarray]]] = [[] for _ in problem.costs]
    for (a, b), table in problem.tables.items():
        around[a].append((b, table < INFEASIBLE))
        around[b].append((a, table.T < INFEASIBLE))

    def rank(variable: int) -> tuple[int, int, int]:
        return len(problem.costs[variable]), problem.keys[variable], variable

    queue = sorted(range(len(possible)), key=rank)
    while queue:
        later = []
        for variable in queue:
            if not possible[variable].any():
                found = {v: tuple(p) for v, p in parents.items()}
                return Conflict(variable, tuple(refused[variable]), found)
            for other, allowed in sorted(around[variable], key=lambda x: rank(x[0])):
                supported = allowed[possible[variable]].any(axis=0)
                lost = np.flatnonzero(possible[other] & ~supported)
                for label in lost:
                    refused[other][label] = variable
                if len(lost):
                    possible[other] &= supported
                    parents.setdefault(other, []).append(variable)
                    later.append(other)
        queue = list(dict.fromkeys(later))
    return None

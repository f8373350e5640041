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

A kernel's problem is solved several times, each time with more exact costs. A `Series`
records the operations on tables of a run, and repeats those whose operands have
changed, as long as the early decisions are the same.

Variables have a key that does not depend on their order in the problem, and costs are
integers, so that neither the order nor rounding changes the answer.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

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

    def copy(self) -> Problem:
        """A copy that can be added to; it shares the tables."""
        copy = Problem()
        copy.costs, copy.keys = list(self.costs), list(self.keys)
        copy.tables, copy.mergeable = dict(self.tables), set(self.mergeable)
        return copy

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
    return Series(table_limit).solve(problem)


class Series:
    """Solves problems one after the other that differ in their costs only.

    Args:
      table_limit: see the module.
    """

    def __init__(self, table_limit: int = TABLE_LIMIT) -> None:
        self._limit = table_limit
        self._run: _Elimination | None = None

    def solve(self, problem: Problem) -> Solution:
        """As the function `solve`."""
        run = self._run
        if run is None or not run.repeat(problem):
            run = self._run = _Elimination(problem, self._limit)
            run.run()
        labels = run.labels()
        cost = evaluate(problem, labels)
        entries, run.entries = run.entries, 0
        return Solution(tuple(labels), cost, run.exact, entries)


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
        # Of the factors' tables, the positions in `_values`.
        self._factors: list[dict[Variables, int]] = [{} for _ in range(count)]
        self._values: list[Any] = [*problem.costs, *problem.tables.values()]
        self._tape: list[_Operation] = []
        self._neighbours: list[set[int]] = [set() for _ in range(count)]
        # Exact integers: a sum of logarithms would depend on the order of its parts.
        self._table_sizes = list(self._sizes)
        self._alive = [True] * count
        self._merges: list[set[int]] = [set() for _ in range(count)]
        self._steps: list[tuple[int, Variables, int]] = []
        self._queue: list[tuple[int, int, int]] = []
        self.exact = True
        self.entries = 0
        for variable in range(count):
            self._factors[variable][(variable,)] = variable
        for table, pair in enumerate(problem.tables, count):
            self._add(pair, table)
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
            table = self._values[best]
            result[variable] = int(table[tuple(result[v] for v in variables)])
        return result

    # --- what was computed ------------------------------------------------------------

    def _compute(
        self, function: Callable[..., Any], *operands: int, decides: bool = False
    ) -> int:
        """Computes a value from others, by their positions; returns its position."""
        self._values.append(self._applied(function, operands))
        result = len(self._values) - 1
        self._tape.append(_Operation(function, operands, result, decides))
        return result

    def _applied(self, function: Callable[..., Any], operands: Iterable[int]) -> Any:
        value = function(*(self._values[i] for i in operands))
        if isinstance(value, tuple):
            self.entries += value[2]
        return value

    def repeat(self, problem: Problem) -> bool:
        """Computes what changes with the costs; False if a decision does.

        The problem has the same variables and pairs. After False the run is invalid.
        """
        values, changed = self._values, bytearray(len(self._values))
        for i, value in enumerate((*problem.costs, *problem.tables.values())):
            if value is not values[i]:
                changed[i] = not np.array_equal(value, values[i])
                values[i] = value
        for function, operands, result, decides in self._tape:
            if not any(map(changed.__getitem__, operands)):
                continue
            value, last = self._applied(function, operands), values[result]
            if decides:
                if value != last:
                    return False
                continue
            pair = isinstance(value, tuple)
            changed[result] = pair or not np.array_equal(value, last)
            values[result] = value
        self._problem = problem
        return True

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

    def _remove(self, variable: int) -> list[tuple[Variables, int]]:
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

    def _add(self, variables: Variables, table: int) -> None:
        """Adds a factor with an axis per variable, ascending."""
        for i, a in enumerate(variables):
            for b in variables[i + 1 :]:
                self._connect(a, b)
        old = self._factors[variables[0]].get(variables) if variables else None
        new = table if old is None else self._compute(_sum, old, table)
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
        sizes = [self._sizes[v] for v in order]
        names = [names for names, _ in factors]
        add_up = functools.partial(_add_up, sizes, order, names)
        result = self._compute(add_up, *(table for _, table in factors))
        best = self._compute(operator.itemgetter(0), result)
        self._steps.append((variable, neighbours, best))
        if neighbours:
            self._add(neighbours, self._compute(operator.itemgetter(1), result))
        for other in neighbours:
            self._enqueue(other)

    def _fix(self, variable: int, label: int) -> None:
        neighbours = sorted(self._neighbours[variable])
        for variables, table in self._remove(variable):
            rest = tuple(v for v in variables if v != variable)
            self.entries += self._values[table].size
            if rest:
                axis = variables.index(variable)
                take = operator.methodcaller("take", label, axis=axis)
                self._add(rest, self._compute(take, table))
        self._steps.append((variable, (), self._constant(np.array(label))))
        for other in neighbours:
            self._enqueue(other)

    def _constant(self, value: Any) -> int:
        self._values.append(value)
        return len(self._values) - 1

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
        neighbours = sorted(self._neighbours[variable])
        for variables, table in self._remove(variable):
            self.entries += self._values[table].size
            names, transposed = _renamed(variables, variable, target)
            self._add(names, self._compute(transposed, table))
        same = np.arange(self._sizes[variable])
        self._steps.append((variable, (target,), self._constant(same)))
        for other in neighbours:
            self._enqueue(other)

    def _merge_target(self, variable: int) -> int | None:
        """The neighbour from which it is most expensive to differ."""
        others, operands = [], []
        for other in self._merges[variable]:
            variables = (min(variable, other), max(variable, other))
            table = self._factors[variable].get(variables)
            if self._alive[other] and table is not None:
                others.append((self._problem.keys[other], other))
                operands += [self._costs(variable), self._costs(other), table]
        choose = functools.partial(_dearest, others)
        return self._values[self._compute(choose, *operands, decides=True)]

    def _costs(self, variable: int) -> int:
        return self._factors[variable][(variable,)]

    def _best_alone(self, variable: int) -> int:
        """The label with the least cost if all neighbours comply."""
        factors = self._factors[variable]
        self.entries += sum(self._values[table].size for table in factors.values())
        choose = functools.partial(_cheapest, variable, list(factors))
        return self._values[self._compute(choose, *factors.values(), decides=True)]


def _add_up(
    sizes: list[int], order: Variables, names: list[Variables], *tables: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
    """The best labels of the last variable in `order`, their costs, and the entries."""
    total = np.zeros(sizes, dtype=np.int64)
    for count, (variables, table) in enumerate(zip(names, tables, strict=True), 2):
        total += _broadcast(variables, table, order)
        if count % _SAFE_SUMS == 0:
            np.minimum(total, INFEASIBLE, out=total)
    np.minimum(total, INFEASIBLE, out=total)
    return total.argmin(axis=-1).astype(np.uint8), total.min(axis=-1), total.size


class _Operation(NamedTuple):
    """An operation on tables: a function, the positions of its operands and result.

    Attributes:
      decides: whether the result is a decision, on which later operations depend.
    """

    function: Callable[..., Any]
    operands: tuple[int, ...]
    result: int
    decides: bool


def _sum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.minimum(a + b, INFEASIBLE)


def _dearest(others: list[tuple[int, int]], *tables: np.ndarray) -> int | None:
    """The neighbour from which it is most expensive to differ.

    Args:
      others: the key and the variable of each neighbour.
      tables: for each the costs of the variable and of the neighbour, and their table.
    """
    ranked = []
    for (key, other), mine, theirs, table in zip(
        others, tables[::3], tables[1::3], tables[2::3], strict=True
    ):
        alone = np.minimum(mine + theirs, INFEASIBLE)
        if (alone + np.diagonal(table)).min() >= INFEASIBLE:
            continue
        weight = int(np.minimum(table, INFEASIBLE >> 20).sum())
        ranked.append((-weight, key, other))
    return min(ranked)[2] if ranked else None


def _cheapest(variable: int, names: list[Variables], *tables: np.ndarray) -> int:
    """The label of a variable with the least cost if all neighbours comply."""
    total = np.zeros((), dtype=np.int64)
    for variables, table in zip(names, tables, strict=True):
        axes = tuple(i for i, v in enumerate(variables) if v != variable)
        total = np.minimum(total + table.min(axis=axes), INFEASIBLE)
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
    variables: Variables, old: int, new: int
) -> tuple[Variables, Callable[[np.ndarray], np.ndarray]]:
    """The variables and the table of a factor after `old` became a name of `new`."""
    if new in variables:
        a, b = variables.index(old), variables.index(new)
        names = [v for v in variables if v not in (old, new)] + [new]
    else:
        names = [new if v == old else v for v in variables]
    order = sorted(range(len(names)), key=names.__getitem__)

    def renamed(table: np.ndarray) -> np.ndarray:
        if new in variables:
            table = np.diagonal(table, axis1=a, axis2=b)  # its axis goes to the end
        return table.transpose(order)

    return tuple(names[i] for i in order), renamed


# --- why there is no solution ---------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Conflict:
    """A variable for which no label is left.

    Attributes:
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

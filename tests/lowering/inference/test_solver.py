# SPDX-License-Identifier: Apache-2.0
"""The solver finds what brute force finds, in every order, with little work."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_gpu.lowering.inference import solver
from pallas_gpu.lowering.inference.solver import INFEASIBLE, Problem


def brute_force(problem: Problem) -> int:
    ranges = [range(len(costs)) for costs in problem.costs]
    return min(solver.evaluate(problem, list(x)) for x in itertools.product(*ranges))


costs = st.one_of(st.integers(0, 20), st.just(INFEASIBLE))


@st.composite
def problems(draw, most: int = 6) -> Problem:
    problem = Problem()
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=most))
    for i, size in enumerate(sizes):
        labels = draw(st.lists(costs, min_size=size, max_size=size))
        problem.add_variable(np.array(labels), key=i)
    pairs = list(itertools.combinations(range(len(sizes)), 2))
    for a, b in draw(st.lists(st.sampled_from(pairs), max_size=9)) if pairs else []:
        entries = draw(
            st.lists(costs, min_size=sizes[a] * sizes[b], max_size=sizes[a] * sizes[b])
        )
        problem.add_table(a, b, np.array(entries).reshape(sizes[a], sizes[b]))
    return problem


@given(problems())
@settings(max_examples=150, deadline=None)
def test_the_solution_costs_what_the_best_of_all_choices_costs(problem: Problem):
    solution = solver.solve(problem)
    assert solution.exact
    assert solution.cost == brute_force(problem)
    assert solution.cost == solver.evaluate(problem, list(solution.labels))


def chain(count: int, labels: int, *, seed: int = 0, extra: int = 0) -> Problem:
    """Variables in a row; each may differ from the one before at a cost."""
    rng = np.random.default_rng(seed)
    problem = Problem()
    differ = (1 - np.eye(labels, dtype=np.int64)) * 10
    for i in range(count):
        problem.add_variable(rng.integers(0, 30, labels), key=i)
    pairs = [(i, i + 1) for i in range(count - 1)]
    pairs += [tuple(rng.choice(count, 2, replace=False)) for _ in range(extra)]
    for a, b in pairs:
        problem.add_table(int(a), int(b), differ, mergeable=True)
    return problem


@pytest.mark.parametrize(
    ("labels", "extra", "most"), [(8, 0, 2.1), (6, 1, 3)], ids=["chain", "no tree"]
)
def test_the_work_grows_linearly_with_the_number_of_variables(labels, extra, most):
    problems = [chain(n, labels, extra=extra * n) for n in (250, 500, 1000)]
    work = [solver.solve(problem).entries for problem in problems]
    assert work[1] < most * work[0]
    assert work[2] < most * work[1]


def test_a_graph_with_too_large_tables_is_solved_but_not_exactly():
    problem = chain(60, 6, extra=200)
    solution = solver.solve(problem, table_limit=1 << 10)
    assert not solution.exact
    assert solution.feasible
    same = [solver.evaluate(problem, [x] * 60) for x in range(6)]
    assert solution.cost <= min(same)


def test_without_variables_to_merge_one_is_decided_alone():
    problem = chain(12, 4, extra=50)
    problem.mergeable.clear()
    solution = solver.solve(problem, table_limit=64)
    assert not solution.exact
    assert solution.feasible


@pytest.mark.parametrize("limit", [1 << 14, 1 << 8])
def test_a_series_solves_each_problem_as_if_it_were_the_first(limit: int):
    """Whether it repeats the last run, or decides something else early."""
    rng = np.random.default_rng(0)
    problem, series, works = chain(30, 4, extra=30), solver.Series(limit), []
    for _ in range(30):
        alone, next_one = solver.solve(problem, limit), series.solve(problem)
        works.append((next_one.entries, alone.entries))
        assert next_one == dataclasses.replace(alone, entries=next_one.entries)
        problem = problem.copy()
        for pair in rng.choice(list(problem.tables), 2):
            a, b = map(int, pair)
            problem.tables[a, b] = problem.tables[a, b] + rng.integers(0, 3, (4, 4))
        variable = rng.integers(len(problem.costs))
        problem.costs[variable] = problem.costs[variable] + rng.integers(0, 3, 4)
    assert any(again < alone for again, alone in works)
    assert limit == 1 << 14 or any(again == alone for again, alone in works[1:])


@pytest.mark.parametrize("limit", [1 << 14, 1 << 8])
@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_variables_and_tables_does_not_matter(limit: int, seed: int):
    count, labels = 30, 4
    original = chain(count, labels, extra=30)
    order = list(range(count))
    random.Random(seed).shuffle(order)
    shuffled = Problem()
    for i in order:
        shuffled.add_variable(original.costs[i], key=original.keys[i])
    place = {old: new for new, old in enumerate(order)}
    for (a, b), table in reversed(original.tables.items()):
        shuffled.add_table(place[b], place[a], table.T, mergeable=True)
    first, second = solver.solve(original, limit), solver.solve(shuffled, limit)
    assert [second.labels[place[i]] for i in range(count)] == list(first.labels)
    assert first.entries == second.entries


def test_tables_of_one_pair_add_up_and_one_variable_twice_is_its_own_cost():
    problem = Problem()
    a = problem.add_variable(np.array([0, 0]))
    b = problem.add_variable(np.array([0, 0]))
    problem.add_table(a, b, np.array([[0, 5], [5, 4]]))
    problem.add_table(b, a, np.array([[3, 5], [5, 0]]))
    problem.add_table(a, a, np.array([[0, 9], [9, 2]]))
    assert solver.solve(problem).cost == 3


def test_infeasible_costs_do_not_overflow():
    problem = Problem()
    for _ in range(8):
        problem.add_variable(np.array([INFEASIBLE, INFEASIBLE]))
    for a, b in itertools.combinations(range(8), 2):
        problem.add_table(a, b, np.full((2, 2), INFEASIBLE))
    solution = solver.solve(problem)
    assert not solution.feasible
    assert solution.cost == INFEASIBLE


def test_a_conflict_names_the_variable_and_who_refuses_each_label():
    problem = Problem()
    left = problem.add_variable(np.array([0]), key=1)
    middle = problem.add_variable(np.array([0, 0]), key=2)
    right = problem.add_variable(np.array([0]), key=3)
    problem.add_table(left, middle, np.array([[0, INFEASIBLE]]))
    problem.add_table(middle, right, np.array([[INFEASIBLE], [0]]))
    conflict = solver.find_conflict(problem)
    assert conflict is not None
    assert conflict.variable == middle
    assert set(conflict.refused) == {left, right}


def test_a_conflict_at_the_end_of_a_chain_leads_back_to_its_start():
    problem = Problem()
    same = np.where(np.eye(2, dtype=bool), 0, INFEASIBLE)
    first = problem.add_variable(np.array([0, INFEASIBLE]), key=0)
    row = [first, *(problem.add_variable(np.zeros(2), key=i) for i in (1, 2, 3))]
    last = problem.add_variable(np.array([INFEASIBLE, 0]), key=4)
    for a, b in itertools.pairwise([*row, last]):
        problem.add_table(a, b, same)
    conflict = solver.find_conflict(problem)
    assert conflict is not None
    ends = set()
    for neighbour in conflict.refused:
        while neighbour in conflict.parents:
            neighbour = conflict.parents[neighbour][0]
        ends.add(neighbour)
    assert {first, last} & ends


def test_a_solvable_problem_has_no_conflict():
    assert solver.find_conflict(chain(5, 3)) is None


@given(problems(most=4))
@settings(max_examples=100, deadline=None)
def test_a_conflict_is_only_found_where_there_is_no_solution(problem: Problem):
    if solver.find_conflict(problem) is not None:
        assert not solver.solve(problem).feasible

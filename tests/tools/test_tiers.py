# SPDX-License-Identifier: Apache-2.0
"""How the tests of a tier are chosen, and what a mutant of a line is."""

from __future__ import annotations

import ast
import subprocess
import sys

import numpy as np

from tools.source_tree import ROOT
from tools.tiers import source_mutants
from tools.tiers.choice import Choice, Measured


def measured(lines, seconds=None, killers=None) -> Measured:
    """Tests t0, t1, … that each run some of eight lines."""
    bits = np.array([[i in row for i in range(8)] for row in lines], np.bool_)
    return Measured(
        [f"t{i}" for i in range(len(lines))],
        np.array(seconds or [1.0] * len(lines)),
        np.packbits(bits, axis=1),
        killers or {},
    )


def test_every_line_is_covered_by_the_cheapest_tests():
    choice = Choice(measured([{0, 1, 2}, {0}, {1}, {2}, {3}], [9.0, 1, 1, 1, 1]))
    choice.cover(1)
    assert choice.names == {"t1", "t2", "t3", "t4"}


def test_a_line_is_covered_twice_where_two_tests_run_it():
    choice = Choice(measured([{0, 1}, {0}, {0}]))
    choice.cover(2)
    assert len(choice.names) == 2
    assert "t0" in choice.names


def test_a_cover_stays_in_its_time():
    choice = Choice(measured([{0}, {1}, {2}, {3}]))
    choice.cover(1, budget=2.5)
    assert len(choice.names) == 2


def test_every_mutant_is_killed_and_a_second_time_where_that_is_cheap():
    killers = {"a": ["t0", "t1"], "b": ["t1", "t2"], "c": []}
    choice = Choice(measured([{0}, {1}, {2}], [1.0, 1.0, 5.0], killers))
    choice.kill(1)
    assert choice.names == {"t1"}
    choice.kill(2, cheap=2.0)
    assert choice.names == {"t0", "t1"}


def test_functions_without_a_case_get_their_cheapest_one():
    choice = Choice(measured([{0}, {1}, {2}], [0.2, 0.1, 9.0]))
    choice.cheapest_cases({"f": ["t0", "t1"], "g": ["t2"]}, budget=100.0)
    assert choice.names == {"t1"}


def test_a_mutant_changes_the_functions_that_exist():
    (site,) = [
        x
        for x in source_mutants.sites("tools/tiers/planted.py")
        if x.function == "function_named" and "not folder" in x.change
    ][:1]
    program = f"""
import sys
from tools.tiers import planted, source_mutants
site = source_mutants.Site(*{(site.path, site.function, site.line, site.change)!r})
before = planted.function_named("a/b::c")
assert source_mutants.apply(site) == 1
assert planted.function_named("a/b::c") != before
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_the_type_of_a_local_variable_has_no_mutant():
    sites = source_mutants.sites("pallas_gpu/lowering/inference/solver.py")
    assert not any("int | None ->" in site.change for site in sites)


def test_a_line_has_one_mutant_and_docstrings_have_none():
    for path in source_mutants.files()[::20]:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        strings = {
            x.lineno
            for x in ast.walk(tree)
            if isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant)
        }
        lines = [site.line for site in source_mutants.sites(path)]
        assert len(lines) == len(set(lines))
        assert strings.isdisjoint(lines)

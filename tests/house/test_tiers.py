# SPDX-License-Identifier: Apache-2.0
"""The lists of the tiers: they name tests that exist, and find every planted bug."""

from __future__ import annotations

import pytest

from tests.support import tiers
from tests.support.features import REFUSED, rows
from tests.support.mutations.subjects import SUBJECTS
from tools.tiers import planted, source_mutants

AGAIN = (
    "`make tiers-choose` chooses again from what was measured, `make tiers` measures"
)
CHECK, DEFAULT = tiers.read("check"), tiers.read("default")
KILLS, EQUIVALENT = tiers.mutants("kills"), tiers.mutants("equivalent")


def test_the_lists_name_tests_that_exist(request):
    collected = request.config.stash.get(tiers.COLLECTED, None)
    if collected is None:
        pytest.skip("needs all tests to be collected")
    if request.config.getoption("--tier") == "measured":
        pytest.skip("the lists are about to be written")
    killers = frozenset(name for names in KILLS.values() for name in names)
    gone = (CHECK.chosen | DEFAULT.chosen | killers) - collected
    assert not gone, f"{AGAIN}, or rename in tests/tiers/: {sorted(gone)[:20]}"


def test_the_default_tier_kills_every_mutant_of_the_matrix():
    unnoticed = [
        mutant
        for mutant, names in KILLS.items()
        if mutant not in EQUIVALENT
        and not any(DEFAULT.runs(name, new=True) for name in names)
    ]
    assert not unnoticed, AGAIN
    assert len(KILLS) - len(EQUIVALENT) >= 340


def test_the_matrix_names_functions_that_exist():
    gone = [mutant for mutant in KILLS if not source_mutants.exists(mutant)]
    assert len(gone) < 20, f"{AGAIN}, or remove them from the matrix: {gone}"


def test_what_no_test_can_notice_is_explained():
    assert EQUIVALENT.keys() == {mutant for mutant, names in KILLS.items() if not names}
    assert all(map(any, EQUIVALENT.values()))


def test_the_default_tier_runs_every_kernel_with_a_mistake():
    file, function = planted.WHOLE[0].split("::")
    cases = {x for x in DEFAULT.chosen if x.startswith(f"{file}::{function}[")}
    mutants = {f"{s.name}-{m.name}" for s in SUBJECTS for m in s.mutants}
    assert {x.partition("[")[2][:-1] for x in cases} == {
        name.replace(" ", "-") for name in mutants
    }


def test_the_default_tier_has_a_test_of_every_feature():
    functions = tiers.functions(DEFAULT.chosen)
    for name in {r.runs for r in rows()} | {r.test for r in REFUSED}:
        function = planted.function_named(name)
        assert function in functions or DEFAULT.runs(function, new=True), AGAIN


def test_the_default_tier_has_every_rule_of_the_house():
    assert not [x for x in DEFAULT.left if x.startswith(planted.HOUSE)], AGAIN


def test_check_is_a_part_of_the_default_tier():
    assert DEFAULT.chosen >= CHECK.chosen


def test_what_a_list_does_not_know_runs_by_default():
    listed = tiers.parsed("tests/test_a.py\n    test_x[1]\n    - test_y\n")
    assert listed.runs("tests/test_a.py::test_x[1]", new=True)
    assert not listed.runs("tests/test_a.py::test_x[2]", new=True)
    assert not listed.runs("tests/test_a.py::test_y", new=True)
    assert listed.runs("tests/test_a.py::test_z[3]", new=True)
    assert not listed.runs("tests/test_a.py::test_z[3]", new=False)


def test_a_list_is_read_as_it_is_written():
    text = (tiers.FOLDER / "default.txt").read_text(encoding="utf-8")
    assert DEFAULT.text() == text


def test_a_name_chooses_the_same_variant_in_every_run():
    names = [f"test_{i}" for i in range(64)]
    chosen = [tiers.one_of(name, ("lane", "warpgroup")) for name in names]
    assert chosen == [tiers.one_of(name, ("lane", "warpgroup")) for name in names]
    assert 16 < chosen.count("lane") < 48

# SPDX-License-Identifier: Apache-2.0
"""What `make check` chooses from the tests."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support import quick
from tests.support.every import every
from tools.source_tree import ROOT


@dataclasses.dataclass(frozen=True)
class Item:
    nodeid: str
    marks: tuple[str, ...] = ()

    def iter_markers(self):
        return (getattr(pytest.mark, name).mark for name in self.marks)


def chosen(*items: Item) -> list[str]:
    return [item.nodeid for item in quick.choose(items)]


def test_one_case_of_each_function_comes_before_a_second_of_any():
    functions = [[(i, case) for case in range(10)] for i in range(3)]
    assert {i for i, _ in quick.spread(functions, 3)} == {0, 1, 2}
    assert sorted(i for i, _ in quick.spread(functions, 5)) == [0, 0, 1, 2, 2]


def test_cases_are_from_all_over_a_table_and_none_comes_twice():
    (cases,) = [list(quick.spread([range(100)], 6))]
    assert len(set(cases)) == len(cases) == 2
    assert abs(cases[0] - cases[1]) > 20
    many = [range(100)] * 20
    assert {x // 25 for x in quick.spread(many, 20)} == {0, 1, 2, 3}


def test_a_file_of_many_functions_is_sampled_from_its_start_to_its_end():
    functions = [[i] for i in range(100)]
    assert list(quick.spread(functions, 4)) == [12, 37, 62, 87]


def test_long_tests_and_those_that_compile_are_left_out():
    path = "tests/types/test_x.py"
    items = [Item(f"{path}::test_{m}", (m,)) for m in ("slow", "offline", "smoke")]
    assert chosen(*items) == [f"{path}::test_smoke"]


def test_a_file_marked_quick_is_whole_and_others_are_bounded():
    def cases(path, *marks):
        return [Item(f"{path}::test_{i}[0]", marks) for i in range(50)]

    whole, part = (
        cases("tests/types/test_x.py", "quick"),
        cases("tests/types/test_y.py"),
    )
    found = chosen(*whole, *part)
    assert len(found) == len(whole) + quick.CASES["tests"]


@every(quick.CASES)
def test_the_rows_of_the_table_name_what_exists_and_hold_for_all_within(path):
    assert (ROOT / path).exists()
    assert quick.cases_of(f"{path}/test_x.py") == quick.CASES[path]

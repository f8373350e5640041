# SPDX-License-Identifier: Apache-2.0
"""The tests that hold planted bugs, and those of the features in tables.

Kernels with a mistake, emitted modules with a fault, and forms of copies that leave
something out are tests by themselves: nothing else can find them. Mutants of emitted
operations (`tests/emitters/test_mutated_*.py`) are found by the programs that they
change, which are in `tests/emitters/test_programs.py`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence

from tests.support.features import REFUSED, rows

# Functions all of whose cases the default tier runs.
WHOLE = (
    "tests/mutations/test_mutants.py::test_a_mistake_is_reported_with_its_line",
    "tests/mutations/test_copy_forms.py::*",
    "tests/lockstep/test_*faults.py::*",
    "tests/emitters/test_programs.py::*",
)
HOUSE = "tests/house/"


def tests(names: Iterable[str]) -> list[str]:
    """Those of the tests that hold a planted bug."""
    return [
        name
        for name in names
        if any(fnmatch.fnmatchcase(name.partition("[")[0], x) for x in WHOLE)
    ]


def house(functions: Mapping[str, Sequence[str]]) -> list[Sequence[str]]:
    """The cases of each test of the source and its pages, of which no mutant is."""
    return [cases for name, cases in functions.items() if name.startswith(HOUSE)]


def features(functions: Mapping[str, Sequence[str]]) -> list[Sequence[str]]:
    """For each feature of the tables of coverage, the tests one of which is needed.

    Args:
      functions: the cases of each test function, by `file::function`.
    """
    named = {row.runs for row in rows()} | {row.test for row in REFUSED}
    return [functions.get(function_named(name), ()) for name in sorted(named)]


def function_named(name: str) -> str:
    """`file::function` of a test as the tables of features name it."""
    path, _, function = name.partition("::")
    folder, _, file = path.rpartition("/")
    return f"tests/{folder}{'/' if folder else ''}test_{file}.py::test_{function}"

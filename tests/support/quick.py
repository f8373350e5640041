# SPDX-License-Identifier: Apache-2.0
"""Which tests `make check` runs: a bounded number of cases of each file.

They are spread over the functions of the file, and over the table of each function,
and are the same in every run and process. What is marked `slow` or `offline` is never
chosen; what is marked `quick` by hand always is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import pytest

# Cases of a file, by its path or the longest part of it that is listed. A row is there
# because a case takes longer or less than the usual 50 ms.
CASES = {
    "tests": 3,
    "tests/bridge": 2,
    "tests/composites": 1,
    "tests/lockstep": 3,
    "tests/lowering/families": 3,
    "tests/ops": 1,
    "tests/ops/flash/test_attention_backward_bias.py": 0,
    "tests/ops/flash/test_attention_backward_packed.py": 0,
    "tests/porting": 2,
    "tests/public/test_wrong_arguments.py": 0,
    "tests/tutorials": 2,
}
# A step through a table whose multiples are spread evenly over it: the golden ratio.
_STEP = 0.618


def cases_of(path: str) -> int:
    """The number of cases of a file, by its path from the repository's root."""
    while path not in CASES:
        path = path.rpartition("/")[0]
    return CASES[path]


def choose(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Yields the tests of `make check`."""
    marked = ((item, _marks(item)) for item in items)
    allowed = (x for x in marked if x[1].isdisjoint(("slow", "offline", "gpu")))
    for path, of_file in itertools.groupby(
        allowed, lambda x: x[0].nodeid.partition("::")[0]
    ):
        functions: dict[str, list[pytest.Item]] = {}
        for item, marks in of_file:
            if "quick" in marks:
                yield item
            else:
                functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
        yield from spread(list(functions.values()), cases_of(path))


def spread[T](functions: Sequence[Sequence[T]], count: int) -> Iterator[T]:
    """Yields up to `count` cases: one of each function, or of some, then a second."""
    chosen: set[tuple[int, int]] = set()
    for turn in range(2):
        left = min(count - len(chosen), len(functions))
        for k in range(left):
            i = (2 * k + 1) * len(functions) // (2 * left)
            size = len(functions[i])
            place = i, int((i + 0.5 + turn / 2) * _STEP % 1 * size)
            if place not in chosen:
                chosen.add(place)
                yield functions[i][place[1]]


def _marks(item: pytest.Item) -> set[str]:
    return {mark.name for mark in item.iter_markers()}

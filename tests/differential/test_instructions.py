# SPDX-License-Identifier: Apache-2.0
"""Ours has no more instructions than upstream's, class by class, or it says why."""

from __future__ import annotations

import jax
import pytest

if not jax.__version__.startswith("0.11."):
    pytest.skip("compares with upstream 0.11", allow_module_level=True)

from tests.differential import counts
from tests.differential.explanations import FEWER, MORE
from tests.differential.kernels import KERNELS


def complaints(kernel: str, pairs: dict[str, counts.Pair]) -> list[str]:
    """One line for each column that needs an explanation or has one in vain."""
    found = []
    for column, pair in pairs.items():
        for word, differs, table in (
            ("more", pair.more, MORE),
            ("fewer", pair.fewer, FEWER),
        ):
            explained = (kernel, column) in table
            if differs and not explained:
                found.append(f"{column}: {pair}, {word} than upstream's: say why")
            if explained and not differs:
                found.append(f"{column}: {pair}, the explanation is stale")
    return found


@pytest.mark.offline
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("semantics", counts.SEMANTICS)
def test_instructions_are_as_many_as_upstreams_or_explained(semantics, kernel):
    assert complaints(kernel, counts.compare(kernel, semantics)) == []


def test_explanations_are_of_kernels_and_columns_that_exist():
    for kernel, column in (*MORE, *FEWER):
        assert kernel in KERNELS and column in counts.COLUMNS


def test_no_column_has_more_and_fewer():
    assert not MORE.keys() & FEWER.keys()


@pytest.mark.parametrize(
    "ours, theirs, word",
    [(4, 0, ""), (5, 0, "more"), (105, 100, ""), (106, 100, "more"), (0, 5, "fewer")],
)
def test_the_margin_is_five_percent_or_four_instructions(ours, theirs, word):
    pair = counts.Pair(ours, theirs)
    assert (pair.more, pair.fewer) == (word == "more", word == "fewer")


def test_a_difference_without_an_explanation_is_found():
    (line,) = complaints("copy", {"tma": counts.Pair(9, 2)})
    assert line == "tma: 9 / 2, more than upstream's: say why"


def test_an_explanation_that_is_not_needed_is_found():
    (line,) = complaints("plain SMEM", {"total": counts.Pair(186, 186)})
    assert line == "total: 186 / 186, the explanation is stale"

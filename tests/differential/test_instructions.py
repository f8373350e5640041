# SPDX-License-Identifier: Apache-2.0
"""Ours has no more instructions than upstream's, class by class, or it says why."""

from __future__ import annotations

import re

import jax
import pytest

if not jax.__version__.startswith("0.11."):
    pytest.skip("compares with upstream 0.11", allow_module_level=True)

import pallas_gpu as plgpu
from tests.support.differential import counts, machine_code, sides
from tests.support.differential.explanations import FEWER, MORE
from tests.support.differential.kernels import KERNELS, SEMANTICS

CASES = [
    pytest.param(kernel, semantics, id=f"{semantics}-{kernel}")
    for kernel, entry in KERNELS.items()
    for semantics in entry.semantics
]


def complaints(kernel: str, semantics: str, pairs: dict[str, counts.Pair]) -> list[str]:
    """One line for each column that needs an explanation or has one in vain."""
    found = []
    for column, pair in pairs.items():
        for word, differs, table in (
            ("more", pair.more, MORE[semantics]),
            ("fewer", pair.fewer, FEWER[semantics]),
        ):
            explained = (kernel, column) in table
            if differs and not explained:
                found.append(f"{column}: {pair}, {word} than upstream's: say why")
            if explained and not differs:
                found.append(f"{column}: {pair}, the explanation is stale")
    return found


@pytest.mark.offline
@pytest.mark.parametrize("kernel, semantics", CASES)
def test_instructions_are_as_many_as_upstreams_or_explained(kernel, semantics):
    pairs = counts.compare(kernel, semantics)
    assert complaints(kernel, semantics, pairs) == []


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_explanations_are_of_kernels_and_columns_that_exist(semantics):
    for kernel, column in (*MORE[semantics], *FEWER[semantics]):
        assert semantics in KERNELS[kernel].semantics
        assert column in sides.COLUMNS


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_no_column_has_more_and_fewer(semantics):
    assert not MORE[semantics].keys() & FEWER[semantics].keys()


@pytest.mark.parametrize(
    "ours, theirs, word",
    [(4, 0, ""), (5, 0, "more"), (105, 100, ""), (106, 100, "more"), (0, 5, "fewer")],
)
def test_the_margin_is_five_percent_or_four_instructions(ours, theirs, word):
    pair = counts.Pair(ours, theirs)
    assert (pair.more, pair.fewer) == (word == "more", word == "fewer")


def test_a_difference_without_an_explanation_is_found():
    (line,) = complaints("copy", "Lane", {"tma": counts.Pair(9, 2)})
    assert line == "tma: 9 / 2, more than upstream's: say why"


def test_an_explanation_that_is_not_needed_is_found():
    (line,) = complaints("plain SMEM", "Lane", {"total": counts.Pair(186, 186)})
    assert line == "total: 186 / 186, the explanation is stale"


@pytest.mark.offline
@pytest.mark.sass
def test_machine_instructions_are_those_that_the_disassembler_shows():
    entry = KERNELS["copy"]
    function = entry.ours(plgpu, plgpu.CompilerParams())
    (report,) = plgpu.offline.compile(function, *entry.args)
    if report.sass is None:
        pytest.skip(report.note)
    # An address in a comment, then an instruction; NOPs fill the end up.
    shown = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?!NOP\b)\S", report.sass)
    assert machine_code.instructions(report.ptx, "sm_90a") == len(shown) > 0

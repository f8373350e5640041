# SPDX-License-Identifier: Apache-2.0
"""What the emitters of mosaic/ compute and move, run in lockstep against NumPy."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from pallas_gpu.mosaic.elements import dtypes, table
from pallas_gpu.mosaic.moves import reductions, scans
from tests.support import element_programs as elements
from tests.support import movement_programs as movements

pytestmark = pytest.mark.quick

MOVES = movements.combinations() | movements.movements()


@pytest.mark.parametrize("key", elements.row_programs(), ids="-".join)
def test_a_row_computes_what_lax_defines(key):
    for program in elements.row_programs()[key]:
        assert program.is_right(program.results(program.module()))


def test_every_row_has_a_program_for_each_kind_of_dtype():
    rows = {
        (name, kind)
        for name, row in table.TABLE.items()
        if name not in elements.CONVERSIONS_ONLY
        for kind in row.kinds
        if not elements.is_elsewhere(name, kind)
    }
    assert {key[:2] for key in elements.row_programs()} == rows


@pytest.mark.parametrize("name", elements.approximations())
def test_an_approximation_is_close(name):
    program = elements.approximations()[name]
    assert program.is_right(program.results(program.module()))


@pytest.mark.parametrize(("src", "dst"), list(elements.conversions()))
def test_a_conversion_gives_what_lax_defines(src, dst):
    program = elements.conversion_program(src, dst)
    assert program.is_right(program.results(program.module()))


def test_every_dtype_converts_in_a_program():
    known = {x for x in vars(dtypes).values() if isinstance(x, np.dtype)}
    sources = {np.dtype(src) for src, _ in elements.conversions()}
    assert sources == known - {np.dtype(x) for x in elements.CONVERTED_ELSEWHERE}


def test_every_kind_of_reduction_and_scan_has_a_program():
    kinds = {movements.kind_of(name) for name in movements.combinations()}
    assert kinds == {*get_args(reductions.Kind), *get_args(scans.Kind)}


@pytest.mark.parametrize("name", MOVES)
def test_a_movement_loses_no_element(name):
    program = MOVES[name]
    assert program.is_right(program.results(program.module()))

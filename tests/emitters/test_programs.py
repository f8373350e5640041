# SPDX-License-Identifier: Apache-2.0
"""What emitters compute and move: in lockstep and on a GPU, by NumPy."""

from __future__ import annotations

import dataclasses
from typing import get_args

import numpy as np
import pytest

from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.moves import reductions, scans
from tests.support import card
from tests.support import element_programs as elements
from tests.support import movement_programs as movements
from tests.support.lockstep import bodies as lockstep

MOVES = movements.combinations() | movements.movements()


@pytest.fixture(
    params=[lockstep, pytest.param(card, marks=pytest.mark.gpu)],
    ids=["lockstep", "card"],
)
def wrong(request):
    """The names of the programs that compute something else than they should."""
    machine = request.param

    def find(programs, on_card=0.0):
        found = []
        for name, program in programs:
            if machine is card and program.arch > card.capability():
                continue
            results = program.results(program.module(), machine)
            tolerance = max(program.tolerance, on_card * (machine is card))
            if not dataclasses.replace(program, tolerance=tolerance).is_right(results):
                found.append(name)
        return found

    return find


@pytest.mark.parametrize("name", elements.rows())
def test_a_row_computes_what_lax_defines(name, wrong):
    assert not wrong(
        ((dtype, i), program)
        for kind, dtype in elements.rows()[name]
        for i, program in enumerate(elements.row_programs(name, kind, dtype))
    )


def test_every_dtype_is_tried():
    known = {x for x in vars(dtypes).values() if isinstance(x, np.dtype)}
    assert known == set(map(np.dtype, elements.ALL))
    kinds = {
        dtypes.kind(np.dtype(d)): k for k, ds in elements.DTYPES.items() for d in ds
    }
    assert all(given == known for given, known in kinds.items())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_an_approximation_is_close(dtype, wrong):
    assert not wrong(elements.approximations(dtype).items(), on_card=1e-2)


@pytest.mark.parametrize("src", elements.ALL)
def test_a_conversion_gives_what_lax_defines(src, wrong):
    assert not wrong(
        (dst, elements.conversion_program(src, dst))
        for dst in elements.conversions(src)
    )


def test_every_kind_of_reduction_and_scan_has_a_program():
    kinds = {movements.kind_of(name) for name in movements.combinations()}
    assert kinds == {*get_args(reductions.Kind), *get_args(scans.Kind)}


@pytest.mark.parametrize("name", MOVES)
def test_a_movement_loses_no_element(name):
    program = MOVES[name]
    assert program.is_right(program.results(program.module()))

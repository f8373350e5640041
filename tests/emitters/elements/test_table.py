# SPDX-License-Identifier: Apache-2.0
"""The table of elementwise operations: what its rows say, and which rows it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_gpu import errors
from pallas_gpu.emitters.elements import arithmetic, dtypes, table
from pallas_gpu.emitters.elements.row import Case, Row
from pallas_gpu.layouts import rates
from tests.support.refusal import refused

CASE = Case(arithmetic.identity)


@pytest.mark.parametrize(
    "cases",
    [{}, {"floating": Case(None)}, {"signed": CASE, "approx": CASE}],
    ids=["none", "no function", "of nothing"],
)
@refused
def test_a_row_without_an_emitter_is_an_error(cases):
    Row("twice", **cases)


@refused
def test_two_rows_of_one_name_are_an_error():
    table.by_name([Row("twice", floating=CASE), Row("twice", signed=CASE)])


def test_an_unknown_operation_is_unsupported():
    with pytest.raises(errors.UnsupportedError, match="'fft'"):
        table.lookup("fft")


@refused
def test_an_error_names_the_kinds_of_dtype_that_a_row_has_emitters_for():
    Row("twice", floating=CASE, unsigned=CASE).case(dtypes.I32)


def test_the_dtype_of_the_result_follows_from_the_row():
    assert table.lookup("add").result_dtype(dtypes.F16) == dtypes.F16
    assert table.lookup("lt").result_dtype(dtypes.F16) == dtypes.BOOL
    convert = table.lookup("convert_element_type")
    assert convert.result_dtype(dtypes.F16, dtypes.I8) == dtypes.I8
    with pytest.raises(errors.InternalError, match="requires the result's dtype"):
        convert.result_dtype(dtypes.F16)


def test_an_approximation_has_a_cost_of_its_own():
    row = Row(
        "f", floating=Case(CASE.emit, 24.0), widen=True, approx=Case(CASE.emit, 8)
    )
    assert row.cost(dtypes.F32) == 24
    assert [row.cost(np.dtype(d), True) for d in (dtypes.F32, dtypes.BF16)] == [8, 8]
    assert row.cost(dtypes.F64, True) == 24
    assert Row("f", signed=CASE).cost(dtypes.I32) == rates.ELEMENT

# SPDX-License-Identifier: Apache-2.0
"""Vector clocks and access records, without a kernel around them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_gpu import errors
from pallas_gpu.emulator.engine import ordering

A, B = 1, 2


def access(actor, low, high, *, writes=True, time=1, by_copy=False, where="k.py:1"):
    box = ((low, high),)
    return ordering.Access(
        box, writes, actor, time, by_copy, f"actor {actor}", where, ""
    )


def checked(history, new, clock):
    history.check(new, clock, "tile", threads_too=True)
    history.add(new, clock, [clock])


def test_a_write_after_an_unknown_write_is_a_race():
    history = ordering.History()
    checked(history, access(A, 0, 4), {A: 1})
    with pytest.raises(errors.RaceError, match="tile is written"):
        checked(history, access(B, 3, 5), {B: 1})


def test_a_write_after_a_known_write_is_no_race():
    history = ordering.History()
    checked(history, access(A, 0, 4), {A: 1})
    checked(history, access(B, 3, 5), {A: 1, B: 1})


def test_two_reads_are_no_race():
    history = ordering.History()
    checked(history, access(A, 0, 4, writes=False), {A: 1})
    checked(history, access(B, 0, 4, writes=False), {B: 1})


def test_accesses_apart_are_no_race():
    history = ordering.History()
    checked(history, access(A, 0, 4), {A: 1})
    checked(history, access(B, 4, 8), {B: 1})


def test_an_access_after_the_release_is_not_known():
    history = ordering.History()
    checked(history, access(A, 0, 4, time=2), {A: 2})
    with pytest.raises(errors.RaceError):
        checked(history, access(B, 0, 4), {A: 1, B: 1})


def test_threads_are_compared_with_copies_always_and_with_threads_on_request():
    history = ordering.History()
    history.add(access(A, 0, 4), {A: 1}, [])
    history.check(access(B, 0, 4), {B: 1}, "tile", threads_too=False)
    with pytest.raises(errors.RaceError):
        copy = access(B, 0, 4, by_copy=True)
        history.check(copy, {B: 1}, "tile", threads_too=False)


def test_neighbours_of_one_loop_become_one_record():
    history = ordering.History()
    for row in range(100):
        checked(history, access(A, row, row + 1), {A: 1})
    assert [r.box for r in history.records] == [((0, 100),)]


def test_a_long_history_forgets_what_everybody_knows():
    history = ordering.History()
    for i in range(200):
        new = access(A, 2 * i, 2 * i + 1, time=i)
        history.add(new, {A: i}, [{A: i}, {A: i, B: 1}])
    assert len(history.records) < 60


@given(
    first=st.tuples(st.integers(0, 6), st.integers(1, 6)),
    second=st.tuples(st.integers(0, 6), st.integers(1, 6)),
)
def test_boxes_overlap_where_their_elements_do(first, second):
    a = set(range(first[0], sum(first)))
    b = set(range(second[0], sum(second)))
    boxes = (((first[0], sum(first)),), ((second[0], sum(second)),))
    assert ordering.overlap(*boxes) == bool(a & b)

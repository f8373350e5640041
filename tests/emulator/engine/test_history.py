# SPDX-License-Identifier: Apache-2.0
"""The accesses to one array: which conflict, and what an access costs."""

from __future__ import annotations

import itertools
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_gpu import errors
from pallas_gpu.emulator.engine import ordering
from pallas_gpu.emulator.engine.history import History
from pallas_gpu.emulator.engine.ordering import Access, Fence, Viewer

_ACTORS = ordering.Actors()
A, B, C = (_ACTORS.thread() for _ in range(3))
COPY = _ACTORS.other()
# Two groups of threads.
CTA_0, CTA_1 = (Viewer(f"CTA {i}") for i in range(2))


def history(shape=(8,)):
    return History(shape, Fence.SMEM)


def access(actor, low, high, *, writes=True, time=1, by_copy=False, viewer=None):
    box = ((low, high),)
    return Access(box, writes, actor, time, by_copy, f"actor {actor}", viewer=viewer)


def do(to, new, clock, **options):
    to.access(new, clock, "tile", **options)


def fenced(clock):
    ordering.fence(clock, Fence.SMEM)
    return clock


# --- an order between accesses --------------------------------------------------------


def test_a_write_after_an_unknown_write_is_a_race():
    tile = history()
    do(tile, access(A, 0, 4), {A: 1})
    with pytest.raises(errors.RaceError, match="tile is written"):
        do(tile, access(B, 3, 5), {B: 1})


def test_a_write_after_a_known_write_is_no_race():
    tile = history()
    do(tile, access(A, 0, 4), {A: 1})
    do(tile, access(B, 3, 5), {A: 1, B: 1})


def test_two_reads_are_no_race():
    tile = history()
    do(tile, access(A, 0, 4, writes=False), {A: 1})
    do(tile, access(B, 0, 4, writes=False), {B: 1})


def test_each_of_several_readers_has_to_come_before_a_write():
    tile = history()
    do(tile, access(A, 0, 4, writes=False), {A: 1})
    do(tile, access(B, 0, 4, writes=False), {B: 1})
    with pytest.raises(errors.RaceError, match=f"actor {B} has read it"):
        do(tile, access(C, 0, 4), {A: 1, C: 1})
    do(tile, access(C, 0, 4), {A: 1, B: 1, C: 1})


def test_accesses_apart_are_no_race():
    tile = history()
    do(tile, access(A, 0, 4), {A: 1})
    do(tile, access(B, 4, 8), {B: 1})


def test_an_access_after_the_release_is_not_known():
    tile = history()
    do(tile, access(A, 0, 4, time=2), {A: 2})
    with pytest.raises(errors.RaceError):
        do(tile, access(B, 0, 4), {A: 1, B: 1})


def test_a_later_read_is_not_covered_by_an_order_after_an_earlier_one():
    tile = history()
    do(tile, access(A, 0, 4, writes=False), {A: 1})
    do(tile, access(A, 0, 4, writes=False, time=2), {A: 2})
    with pytest.raises(errors.RaceError):
        do(tile, access(B, 0, 4), {A: 1, B: 1})


def test_an_order_after_a_write_is_an_order_after_the_reads_before_it():
    tile = history()
    do(tile, access(A, 0, 4, writes=False), {A: 1})
    do(tile, access(B, 0, 4), {A: 1, B: 1})
    do(tile, access(C, 0, 4), {A: 1, B: 1, C: 1})


def test_threads_are_compared_with_copies_always_and_with_threads_on_request():
    tile = history()
    do(tile, access(A, 0, 4), {A: 1})
    do(tile, access(B, 0, 4), {A: 0, B: 1}, threads_too=False)
    tile = history()
    do(tile, access(A, 0, 4), {A: 1})
    with pytest.raises(errors.RaceError):
        do(tile, access(B, 0, 4, by_copy=True), {B: 1}, threads_too=False)


# --- stores that change nothing -------------------------------------------------------


def test_two_stores_of_the_same_values_are_no_race():
    tile = history()
    do(tile, access(A, 0, 4), {A: 1})
    seen = []
    do(tile, access(B, 2, 8), {B: 1}, unchanged=lambda box: not seen.append(box))
    assert seen == [((2, 4),)], "only where they overlap"


def test_a_store_of_the_same_values_is_no_race_with_a_read():
    tile = history()
    do(tile, access(A, 0, 4, writes=False), {A: 1})
    do(tile, access(B, 0, 4), {B: 1}, unchanged=lambda box: True)
    # The reader is still there.
    with pytest.raises(errors.RaceError, match="has read it"):
        do(tile, access(B, 0, 4, time=2), {B: 2})


def test_one_of_two_writers_of_the_same_values_suffices_for_a_reader():
    for first in (A, B):
        tile = history()
        do(tile, access(A, 0, 4), {A: 1})
        do(tile, access(B, 0, 4), {B: 1}, unchanged=lambda box: True)
        do(tile, access(C, 0, 4, writes=False), {first: 1, C: 1})
        with pytest.raises(errors.RaceError):
            do(tile, access(C, 0, 4, time=2), {first: 1, C: 2})


def test_a_copy_of_the_same_values_is_a_race():
    tile = history()
    do(tile, access(A, 0, 4, by_copy=True), {B: 1})
    with pytest.raises(errors.RaceError, match="before actor"):
        do(tile, access(B, 0, 4), {B: 1}, unchanged=lambda box: True)


@pytest.mark.parametrize("first", [A, B])
def test_each_writer_needs_a_fence_where_threads_are_not_compared(first):
    """Their values may differ: nothing has compared the two stores."""
    second = A + B - first
    tile = history()
    do(tile, access(first, 0, 4), {first: 1}, threads_too=False)
    do(tile, access(second, 0, 4), {second: 1}, threads_too=False)
    clock = fenced({A: 1})
    clock[B] = 1
    with pytest.raises(errors.RaceError, match="not fenced"):
        do(tile, access(C, 0, 4, writes=False, by_copy=True), clock, threads_too=False)


# --- fences ---------------------------------------------------------------------------


@pytest.mark.parametrize("writes", [True, False])
def test_a_copy_after_a_store_needs_a_fence(writes):
    tile = history()
    do(tile, access(A, 0, 4), {A: 1})
    copy = access(C, 0, 4, writes=writes, by_copy=True)
    with pytest.raises(errors.RaceError, match="not fenced"):
        do(tile, copy, {A: 1})
    do(tile, copy, fenced({A: 1}))


@pytest.mark.parametrize("writes", [True, False])
def test_a_copy_after_a_load_needs_no_fence(writes):
    tile = history()
    do(tile, access(A, 0, 4, writes=False), {A: 1})
    do(tile, access(C, 0, 4, writes=writes, by_copy=True), {A: 1})


def test_an_access_after_a_copy_needs_no_fence():
    tile = history()
    do(tile, access(C, 0, 4, by_copy=True), {A: 1})
    do(tile, access(A, 0, 4), {A: 1, C: 1})
    tile = history()
    do(tile, access(C, 0, 4, by_copy=True), {A: 1})
    do(tile, access(C, 0, 4, time=2, by_copy=True), {A: 1, C: 1})


# --- groups ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (True, True, "tile is written by one CTA and written by another"),
        (True, False, "tile is read by one CTA and written by another"),
        (False, True, "tile is written by one CTA and read by another"),
    ],
)
def test_accesses_of_two_groups_need_an_order(first, second, text):
    tile = history()
    do(tile, access(A, 0, 4, writes=first, viewer=CTA_0), {A: 1})
    with pytest.raises(errors.RaceError, match=text) as caught:
        do(tile, access(B, 3, 8, writes=second, viewer=CTA_1), {B: 1})
    assert re.search(r"element \[3\], \w+ by CTA 0", str(caught.value))
    do(tile, access(B, 3, 8, writes=second, viewer=CTA_1), {A: 1, B: 1})


def test_groups_are_compared_on_request():
    tile = history()
    do(tile, access(A, 0, 4, viewer=CTA_0), {A: 1})
    do(tile, access(B, 0, 4, viewer=CTA_1), {B: 1}, threads_too=False)


# --- costs ----------------------------------------------------------------------------


def _steps(run):
    """Returns how many lines of Python a function executes."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


PATTERNS = {
    "rows of several threads": lambda i: access(4 * (i % 4), i, i + 1),
    "copies to rows": lambda i: access(3, i, i + 1, time=i + 1, by_copy=True),
    "reads of one part": lambda i: access(3, 0, 64, writes=False, time=i + 1),
    "alternating": lambda i: access(A, i % 7, i % 7 + 1, writes=i % 2 == 0, time=i + 1),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_an_access_costs_the_same_however_many_there_were(name):
    tile = history((4096,))
    pattern = PATTERNS[name]

    def some(first):
        for i in range(first, first + 64):
            do(tile, pattern(i), {A: i})

    some(0)
    early = _steps(lambda: some(64))
    for first in range(128, 2048, 64):
        some(first)
    # The least of three: in one of them superseded accesses may be dropped.
    late = min(_steps(lambda first=first: some(first)) for first in (2048, 2112, 2176))
    assert late < 1.5 * early


def test_what_is_superseded_is_forgotten():
    tile = history((64,))
    for i in range(4000):
        do(tile, access(A, i % 64, i % 64 + 1, time=i + 1), {A: i + 1})
    assert len(tile.live()) == 64


# --- the same as comparing all pairs --------------------------------------------------

# --- writes that are issued part by part ----------------------------------------------


def gradual_write(to, low, high, *issued):
    """Records a copy to a range of which some parts have been issued."""
    whole = access(COPY, low, high, by_copy=True)
    parts = ordering.Issued([((a, b),) for a, b in issued])
    whole.gradual = ordering.Gradual(parts, to.present(whole.box))
    do(to, whole, fenced({A: 1}))
    return parts


def test_what_is_superseded_in_a_single_element_is_forgotten():
    """A reference without dimensions, too, is accessed any number of times."""
    tile = history(shape=())
    for time in range(1, 4000):
        copy = Access((), True, COPY, time, True, "copy")
        do(tile, copy, {COPY: time})
    assert len(tile.live()) == 1
    with pytest.raises(errors.RaceError):
        do(tile, Access((), True, A, 1, False, "a"), {A: 1})


def test_a_part_that_has_not_been_issued_may_be_accessed():
    tile = history()
    parts = gradual_write(tile, 0, 8, (0, 4))
    assert not parts.disturbed
    do(tile, access(B, 4, 8), {B: 1})
    assert parts.disturbed
    with pytest.raises(errors.RaceError, match=f"before actor {COPY} has been waited"):
        do(tile, access(B, 2, 6, writes=False), {B: 1})


def test_where_no_part_has_been_issued_the_earlier_accesses_count():
    tile = history()
    do(tile, access(A, 0, 8), {A: 1})
    gradual_write(tile, 0, 8, (0, 4))
    do(tile, access(B, 4, 8, writes=False), {A: 1, B: 1})
    with pytest.raises(errors.RaceError, match=f"actor {A} has written it"):
        do(tile, access(C, 4, 8, writes=False), {C: 1})


ACCESSES = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 2]),  # thread
        st.booleans(),  # whether it writes
        st.tuples(*[st.tuples(st.integers(0, 11), st.integers(1, 6))] * 2),
        st.sampled_from([None, 0, 1, 2]),  # the thread that it waits for before
    ),
    max_size=14,
)  # fmt: skip


@settings(max_examples=150)
@given(steps=ACCESSES)
def test_a_race_is_found_when_two_accesses_conflict(steps):
    """Compares with all earlier accesses, element by element."""
    shape = (12, 13)
    tile = History(shape, Fence.SMEM)
    clocks = [{4 * i: 1} for i in range(3)]
    earlier = []
    for thread, writes, ranges, source in steps:
        clock = clocks[thread]
        if source is not None and source != thread:
            ordering.join(clock, dict(clocks[source]))
            clocks[source][4 * source] += 1
        box = tuple(
            (low, min(low + n, end))
            for (low, n), end in zip(ranges, shape, strict=True)
        )
        new = Access(box, writes, 4 * thread, clock[4 * thread], False, "")
        elements = set(itertools.product(*(range(*r) for r in box)))
        race = any(
            (writes or old_writes) and elements & old and clock.get(actor, 0) < time
            for actor, time, old_writes, old in earlier
        )
        if race:
            with pytest.raises(errors.RaceError):
                do(tile, new, clock)
            return
        do(tile, new, clock)
        earlier.append((new.actor, new.time, writes, elements))

# SPDX-License-Identifier: Apache-2.0
"""The accesses to one array: which conflict, and what an access costs."""

from __future__ import annotations

import contextlib
import itertools
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_gpu import errors
from pallas_gpu.emulator.engine import ordering
from pallas_gpu.emulator.engine.history import History
from pallas_gpu.emulator.engine.ordering import Access, Fence
from pallas_gpu.emulator.gpu.machine.races import ClusterViewer

_ACTORS = ordering.Actors()
A, B, C = (_ACTORS.thread() for _ in range(3))
COPY = _ACTORS.other()
# Two groups of threads.
CTA_0, CTA_1 = (ClusterViewer(f"CTA {i}") for i in range(2))


def history(shape=(8,)):
    return History(shape, Fence.SMEM)


def access(actor, low, high, *, writes=True, time=1, by_copy=False, **options):
    box = ((low, high),)
    return Access(box, writes, actor, time, by_copy, f"actor {actor}", **options)


def do(to, new, clock, **options):
    to.access(new, clock, "tile", **options)


def fenced(clock):
    ordering.fence(clock, Fence.SMEM)
    return clock


def write(actor, low=0, high=4, **options):
    return access(actor, low, high, **options)


def read(actor, **options):
    return access(actor, 0, 4, writes=False, **options)


def copy(actor, **options):
    return access(actor, 0, 4, by_copy=True, **options)


ALONE = {"threads_too": False}
UNCHANGED = {"unchanged": lambda box: True}
UNFENCED = "not fenced"
# What the comparison with all pairs below does not try, or not with its report:
# accesses, each with what its actor knows, options, and how it is refused if it is.
RULES = {
    "a write after an unknown write is a race": (
        (write(A), {A: 1}),
        (write(B, 3, 5), {B: 1}, {}, "tile is written"),
    ),
    "each of several readers has to come before a write": (
        (read(A), {A: 1}),
        (read(B), {B: 1}),
        (write(C), {A: 1, C: 1}, {}, f"actor {B} has read it"),
        (write(C), {A: 1, B: 1, C: 1}),
    ),
    "threads are compared with threads on request": (
        (write(A), {A: 1}),
        (write(B), {A: 0, B: 1}, ALONE),
    ),
    "threads are compared with copies always": (
        (write(A), {A: 1}),
        (copy(B), {B: 1}, ALONE, "tile is"),
    ),
    "a store of the same values is no race with a read, and keeps the reader": (
        (read(A), {A: 1}),
        (write(B), {B: 1}, UNCHANGED),
        (write(B, time=2), {B: 2}, {}, "has read it"),
    ),
    "one of two writers of the same values suffices for a reader: the first": (
        (write(A), {A: 1}),
        (write(B), {B: 1}, UNCHANGED),
        (read(C), {A: 1, C: 1}),
        (write(C, time=2), {A: 1, C: 2}, {}, "tile is"),
    ),
    "one of two writers of the same values suffices for a reader: the second": (
        (write(A), {A: 1}),
        (write(B), {B: 1}, UNCHANGED),
        (read(C), {B: 1, C: 1}),
        (write(C, time=2), {B: 1, C: 2}, {}, "tile is"),
    ),
    "a store of the values that a copy stores is a race": (
        (copy(A), {B: 1}),
        (write(B), {B: 1}, UNCHANGED, "before actor"),
    ),
    "a copy of the values that a thread stores is a race": (
        (write(A), {A: 1}),
        (copy(B), {C: 1}, UNCHANGED, "has written it without"),
    ),
    "copies of the same values are no race": (
        (copy(A), {C: 1}),
        (copy(B), {C: 1}, UNCHANGED),
        (copy(B, time=2), {B: 1}, {}, "before actor"),
    ),
    "a copy of the same values is a race with a copy that reads": (
        (read(A, by_copy=True), {C: 1}),
        (copy(B), {C: 1}, UNCHANGED, "may still read"),
    ),
    "a copy of the same values is a race with a reduction": (
        (copy(A, atomic=True), {C: 1}),
        (copy(B), {C: 1}, UNCHANGED, "before actor"),
    ),
    # Nothing has compared the values of the two stores.
    "each writer needs a fence where threads are not compared: the first": (
        (write(A), {A: 1}, ALONE),
        (write(B), {B: 1}, ALONE),
        (read(C, by_copy=True), {**fenced({A: 1}), B: 1}, ALONE, UNFENCED),
    ),
    "each writer needs a fence where threads are not compared: the second": (
        (write(B), {B: 1}, ALONE),
        (write(A), {A: 1}, ALONE),
        (read(C, by_copy=True), {**fenced({A: 1}), B: 1}, ALONE, UNFENCED),
    ),
    "a copy to what was stored needs a fence": (
        (write(A), {A: 1}),
        (copy(C), {A: 1}, {}, UNFENCED),
        (copy(C), fenced({A: 1})),
    ),
    "a copy of what was stored needs a fence": (
        (write(A), {A: 1}),
        (read(C, by_copy=True), {A: 1}, {}, UNFENCED),
        (read(C, by_copy=True), fenced({A: 1})),
    ),
    "a copy of what was loaded needs no fence": (
        (read(A), {A: 1}),
        (read(C, by_copy=True), {A: 1}),
    ),
    "a copy to what was loaded needs a fence": (
        (read(A), {A: 1}),
        (copy(C), {A: 1}, {}, UNFENCED),
        (copy(C), fenced({A: 1})),
    ),
    "an access after a copy needs no fence": (
        (copy(C), {A: 1}),
        (write(A), {A: 1, C: 1}),
    ),
    "a copy after a copy needs no fence": (
        (copy(C), {A: 1}),
        (copy(C, time=2), {A: 1, C: 1}),
    ),
    "groups are compared on request": (
        (write(A, viewer=CTA_0), {A: 1}),
        (write(B, viewer=CTA_1), {B: 1}, ALONE),
    ),
}


@pytest.mark.parametrize("steps", RULES.values(), ids=RULES)
def test_a_rule_about_accesses(steps):
    tile = history()
    for new, clock, *rest in steps:
        options = rest[0] if rest else {}
        refused = pytest.raises(errors.RaceError, match=rest[1]) if rest[1:] else None
        with refused or contextlib.nullcontext():
            do(tile, new, dict(clock), **options)


def test_two_stores_of_the_same_values_are_no_race():
    tile = history()
    do(tile, access(A, 0, 4), {A: 1})
    seen = []
    do(tile, access(B, 2, 8), {B: 1}, unchanged=lambda box: not seen.append(box))
    assert seen == [((2, 4),)], "only where they overlap"


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


# --- the same as comparing all pairs --------------------------------------------------

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

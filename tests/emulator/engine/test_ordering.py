# SPDX-License-Identifier: Apache-2.0
"""Vector clocks and boxes, without a kernel around them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pallas_gpu.emulator.engine import ordering
from pallas_gpu.emulator.engine.ordering import Access, Fence


def test_a_clock_that_is_joined_has_the_later_time_of_each_actor():
    clock = {1: 5, 2: 1}
    ordering.join(clock, {1: 3, 2: 4, 3: 2})
    assert clock == {1: 5, 2: 4, 3: 2}


def test_threads_and_other_actors_have_different_numbers():
    actors = ordering.Actors()
    numbers = [actors.thread(), actors.other(), actors.thread(), actors.other()]
    # The next numbers of a thread are those of its fences.
    taken = [*numbers, *(n + kind for n in numbers[::2] for kind in Fence)]
    assert len(set(taken)) == len(taken)


def test_a_fence_covers_the_known_stores_of_all_threads_for_one_memory():
    actors = ordering.Actors()
    mine, other, barrier = actors.thread(), actors.thread(), actors.other()
    clock = {mine: 2, other: 3, barrier: 1}
    ordering.fence(clock, Fence.GMEM)
    store = Access(((0, 1),), True, other, 3, False, "a store")
    assert store.is_fenced_for(clock, Fence.GMEM, writes=True)
    assert not store.is_fenced_for(clock, Fence.SMEM, writes=True)
    later = Access(((0, 1),), True, other, 4, False, "a store")
    assert not later.is_fenced_for(clock, Fence.GMEM, writes=True)


@given(
    first=st.tuples(st.integers(0, 6), st.integers(1, 6)),
    second=st.tuples(st.integers(0, 6), st.integers(1, 6)),
)
def test_boxes_overlap_where_their_elements_do(first, second):
    a = set(range(first[0], sum(first)))
    b = set(range(second[0], sum(second)))
    boxes = (((first[0], sum(first)),), ((second[0], sum(second)),))
    assert ordering.overlap(*boxes) == bool(a & b)

# SPDX-License-Identifier: Apache-2.0
"""Arrays that clusters share: races between the CTAs of different clusters."""

from __future__ import annotations

import re

import numpy as np
import pytest

from pallas_gpu import errors
from pallas_gpu.emulator.engine.ordering import Access
from pallas_gpu.emulator.gpu.gmem import GlobalArray, Owners

# Actors in clocks: cluster i is actor i.
SHAPE = (8,)


def array(shape=SHAPE):
    data = np.zeros(shape, np.float32)
    return GlobalArray("out", data, np.zeros(shape, np.bool_), owners=Owners(shape))


def views(count=3, of=None):
    of = of or array()
    return [of.seen_by(i, f"CTA {i}") for i in range(count)]


def access(view, actor, low, high, *, writes, time=1, knows=None, where="k.py:1"):
    new = Access(((low, high),), writes, actor, time, False, "who", where, "")
    view.watcher.access(new, {actor: time, **(knows or {})}, view.name)


def test_clusters_that_use_their_own_elements_do_not_race():
    for i, view in enumerate(views()):
        access(view, i, 2 * i, 2 * i + 2, writes=True)
        access(view, i, 2 * i, 2 * i + 2, writes=False)
        access(view, i, 2 * i, 2 * i + 2, writes=True)


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (True, True, "out is written by one CTA and written by another"),
        (True, False, "out is read by one CTA and written by another"),
        (False, True, "out is written by one CTA and read by another"),
    ],
)
def test_two_accesses_of_which_one_writes_race_without_an_order(first, second, text):
    a, b, _ = views()
    access(a, 0, 0, 4, writes=first, where="k.py:7")
    with pytest.raises(errors.RaceError, match=text) as caught:
        access(b, 1, 3, 8, writes=second)
    assert re.search(r"element \[3\], \w+ by CTA 0 at k.py:7", str(caught.value))
    a, b, _ = views()
    access(a, 0, 0, 4, writes=first)
    access(b, 1, 3, 8, writes=second, knows={0: 1})


def test_two_reads_do_not_race():
    a, b, _ = views()
    access(a, 0, 0, 4, writes=False)
    access(b, 1, 0, 4, writes=False)


def test_each_of_several_readers_has_to_come_before_a_write():
    a, b, c = views()
    access(a, 0, 0, 4, writes=False)
    access(b, 1, 0, 4, writes=False)
    with pytest.raises(errors.RaceError, match="read by CTA 1"):
        access(c, 2, 0, 4, writes=True, knows={0: 1})
    access(c, 2, 0, 4, writes=True, knows={0: 1, 1: 1})


def test_a_later_read_is_not_covered_by_an_order_after_an_earlier_one():
    a, b, _ = views()
    access(a, 0, 0, 4, writes=False)
    access(a, 0, 0, 4, writes=False, time=2)
    with pytest.raises(errors.RaceError):
        access(b, 1, 0, 4, writes=True, knows={0: 1})


def test_an_order_after_a_write_is_an_order_after_the_reads_before_it():
    a, b, c = views()
    access(a, 0, 0, 4, writes=False)
    access(b, 1, 0, 4, writes=True, knows={0: 1})
    access(c, 2, 0, 4, writes=True, knows={0: 1, 1: 1})


def test_writes_of_a_row_loop_are_found_one_by_one():
    a, b, _ = views()
    for i in range(4):
        access(a, 0, i, i + 1, writes=True)
    with pytest.raises(errors.RaceError, match=r"element \[2\]"):
        access(b, 1, 2, 3, writes=True)


def test_parts_of_an_array_share_its_owners():
    whole = array((2, 4))
    first, _ = views(2, whole.at((0,)))
    _, second = views(2, whole.at((0,)))
    _, other = views(2, whole.at((1,)))
    access(first, 0, 0, 4, writes=True)
    access(other, 1, 0, 4, writes=True)
    with pytest.raises(errors.RaceError, match="by CTA 0"):
        access(second, 1, 0, 4, writes=False)


def test_an_input_is_not_watched():
    data = np.zeros(SHAPE, np.float32)
    assert GlobalArray("in", data, None, read_only=True).seen_by(0, "").watcher is None

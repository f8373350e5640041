# SPDX-License-Identifier: Apache-2.0
"""Accesses to SMEM: who has to know of whom, and what the async proxy sees."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_gpu.errors import PtxError
from pallas_gpu.lockstep.engine import Strand
from tests.support.lockstep import stand

PLACES = 4 * np.arange(128)[:, None] + np.arange(4)
BYTES = np.arange(512, dtype=np.uint8).reshape(128, 4)
ROWS = np.arange(4)


def two_warpgroups():
    cluster = stand.cluster(warpgroups=2)
    first, second = stand.strands(cluster)
    return cluster.ctas[0].smem, cluster.clocks, first, second


def fenced(clocks, strand: Strand) -> None:
    clocks.fence(strand.rows, 0)


def test_a_thread_sees_what_it_has_stored():
    smem, _, first, _ = two_warpgroups()
    smem.store(first, PLACES, BYTES)
    np.testing.assert_array_equal(smem.load(first, PLACES), BYTES)


def test_other_threads_have_to_meet_the_writer():
    smem, clocks, first, second = two_warpgroups()
    smem.store(first, PLACES, BYTES)
    with pytest.raises(PtxError, match="loaded before the threads have met"):
        smem.load(first, PLACES[::-1])
    with pytest.raises(PtxError, match="loaded before the threads have met"):
        smem.load(second, PLACES)
    clocks.meet(np.arange(8), together=True)
    smem.load(first, PLACES[::-1])
    smem.load(second, PLACES)


def test_a_warp_that_meets_says_nothing_to_other_warps():
    smem, clocks, first, _ = two_warpgroups()
    smem.store(first, PLACES, BYTES)
    clocks.meet(ROWS, together=False)
    smem.load(first, PLACES.reshape(4, 32, 4)[:, ::-1].reshape(128, 4))
    with pytest.raises(PtxError, match="before the threads have met"):
        smem.load(first, PLACES[::-1])


def test_readers_have_to_be_done_before_others_store():
    smem, clocks, first, second = two_warpgroups()
    smem.load(first, PLACES)
    with pytest.raises(PtxError, match="stored before the threads have met"):
        smem.store(second, PLACES, BYTES)
    clocks.meet(np.arange(8), together=True)
    smem.store(second, PLACES, BYTES)


def test_the_async_proxy_sees_stores_behind_a_fence():
    smem, clocks, first, _ = two_warpgroups()
    smem.store(first, PLACES, BYTES)
    clocks.meet(ROWS, together=True)
    with pytest.raises(PtxError, match=r"without fence\.proxy\.async"):
        smem.begin_read(ROWS, PLACES.reshape(-1), "a copy")
    fenced(clocks, first)
    smem.begin_read(ROWS, PLACES.reshape(-1), "a copy")


def test_the_async_proxy_has_to_know_of_the_writers():
    smem, clocks, first, second = two_warpgroups()
    smem.store(first, PLACES, BYTES)
    fenced(clocks, first)
    with pytest.raises(PtxError, match="before the threads have met"):
        smem.begin_read(second.rows, PLACES.reshape(-1), "a copy")


def test_bytes_under_way_are_nobodys():
    smem, _, first, _ = two_warpgroups()
    smem.begin_write(0, PLACES.reshape(-1), "a copy")
    for access in (
        lambda: smem.load(first, PLACES),
        lambda: smem.store(first, PLACES, BYTES),
        lambda: smem.begin_read(ROWS, PLACES.reshape(-1), "a copy"),
        lambda: smem.begin_write(0, PLACES.reshape(-1), "a copy"),
    ):
        with pytest.raises(PtxError, match="still writes them"):
            access()


def test_bytes_that_are_read_may_be_read_and_not_written():
    smem, _, first, _ = two_warpgroups()
    smem.begin_read(ROWS, PLACES.reshape(-1), "a copy")
    smem.load(first, PLACES)
    with pytest.raises(PtxError, match="still reads them"):
        smem.store(first, PLACES, BYTES)


def test_what_a_copy_brings_is_seen_by_who_waits_for_it():
    smem, clocks, first, _ = two_warpgroups()
    agent = clocks.agent("copies")
    smem.begin_write(0, PLACES.reshape(-1), "a copy")
    smem.end_write(PLACES, BYTES, agent, epoch=1)
    with pytest.raises(PtxError, match="loaded before"):
        smem.load(first, PLACES)
    clocks.learn(ROWS, agent, 1)
    np.testing.assert_array_equal(smem.load(first, PLACES), BYTES)


def test_a_copy_overwrites_only_what_its_issuer_knows_to_be_free():
    smem, clocks, first, second = two_warpgroups()
    smem.load(first, PLACES)
    with pytest.raises(PtxError, match="overwrites bytes"):
        smem.begin_write(int(second.rows[0]), PLACES.reshape(-1), "a copy")
    fenced(clocks, first)
    clocks.meet(np.arange(8), together=True)
    smem.begin_write(int(second.rows[0]), PLACES.reshape(-1), "a copy")


@pytest.mark.parametrize("who", [0, 1])
def test_a_copy_overwrites_what_threads_have_read_behind_a_fence(who):
    """Of those that have read it, or of others that they have met."""
    smem, clocks, *both = two_warpgroups()
    issuer = int(both[1].rows[0])
    fenced(clocks, both[0])
    smem.load(both[0], PLACES)
    clocks.meet(np.arange(8), together=True)
    with pytest.raises(PtxError, match=r"have read without fence\.proxy\.async"):
        smem.begin_write(issuer, PLACES.reshape(-1), "a copy")
    fenced(clocks, both[who])
    smem.begin_write(issuer, PLACES.reshape(-1), "a copy")


def test_a_fence_of_others_before_they_meet_the_reader_is_none():
    smem, clocks, first, second = two_warpgroups()
    smem.load(first, PLACES)
    fenced(clocks, second)
    clocks.meet(np.arange(8), together=True)
    with pytest.raises(PtxError, match="have read without"):
        smem.begin_write(int(second.rows[0]), PLACES.reshape(-1), "a copy")


def test_an_access_out_of_bounds_is_found():
    smem, _, first, _ = two_warpgroups()
    with pytest.raises(PtxError, match="out of bounds"):
        smem.load(first, PLACES + 4096 - 508)

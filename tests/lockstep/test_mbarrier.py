# SPDX-License-Identifier: Apache-2.0
"""mbarriers: when a phase ends, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_gpu.errors import PtxError
from pallas_gpu.lockstep.sync.mbarrier import Mbarrier
from tests.support.lockstep import stand


def barrier(count: int = 1) -> Mbarrier:
    return Mbarrier(stand.cluster().ctas[0], 1024, count, row=0)


def test_a_phase_ends_with_its_last_arrival():
    b = barrier(2)
    b.arrive(1, None)
    assert not b.passed(0) and b.passed(1)
    b.arrive(1, None)
    assert b.passed(0) and not b.passed(1)
    assert b.pending == 2


def test_a_phase_waits_for_the_bytes_of_copies():
    b = barrier()
    b.expect(64)
    b.arrive(1, None)
    b.complete_tx(48, agent=5, epoch=1)
    assert not b.passed(0)
    b.complete_tx(16, agent=5, epoch=1)
    assert b.passed(0)


def test_bytes_may_arrive_before_they_are_expected():
    b = barrier()
    b.complete_tx(64, agent=5, epoch=1)
    assert not b.passed(0)
    b.expect(64)
    b.arrive(1, None)
    assert b.passed(0)


def test_more_arrivals_than_a_phase_has_are_refused():
    b = barrier()
    b.expect(16)
    b.arrive(1, None)
    with pytest.raises(PtxError, match="more arrivals"):
        b.arrive(1, None)


@pytest.mark.parametrize("count", [0, 1 << 20])
def test_a_count_beyond_the_limits_is_refused(count):
    with pytest.raises(PtxError, match="count"):
        barrier(count)


def test_a_wait_makes_known_what_came_before_the_arrivals():
    cluster = stand.cluster(warpgroups=2)
    clocks = cluster.clocks
    writer, reader = np.array([0]), np.array([4])
    b = Mbarrier(cluster.ctas[0], 1024, 1, row=0)
    clocks.meet(writer, together=True)
    b.arrive(1, clocks.released(0, lane=3))
    assert clocks.known[4, 0] == 0
    clocks.acquire(reader, b.completed)
    assert clocks.known[4, 0] == 1


def test_an_initialisation_is_unknown_until_the_threads_have_met():
    cluster = stand.cluster(ctas=2)
    b = Mbarrier(cluster.ctas[0], 1024, 1, row=0)
    b.check_known(0, "an arrival")
    with pytest.raises(PtxError, match=r"mbarrier\.init is known"):
        b.check_known(1, "an arrival")
    cluster.barrier.generation += 1
    with pytest.raises(PtxError, match=r"mbarrier\.init is known"):
        b.check_known(4, "an arrival")
    b.fenced = True
    b.check_known(4, "an arrival")


@pytest.mark.parametrize(("lanes", "known"), [([3], 1), ([3, 5], 0), ([], 0)])
def test_an_arrival_releases_what_its_thread_alone_has_done(lanes, known):
    cluster = stand.cluster(warpgroups=1)
    mask = np.zeros(32, bool)
    mask[lanes] = True
    cluster.clocks.touch(np.array([0]), mask)
    assert cluster.clocks.released(0, lane=3)[0] == known

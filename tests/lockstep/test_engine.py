# SPDX-License-Identifier: Apache-2.0
"""Strands that wait, work under way, and exchange between lanes."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_gpu.lockstep.engine import DeadlockError, Scheduler, SplitWarps, Wait
from pallas_gpu.lockstep.registers import source_lane
from tests.support.lockstep import stand

LANES = np.arange(32)


class Flag:
    """Work that sets a flag when it completes."""

    def __init__(self) -> None:
        self.done = False

    def complete(self) -> None:
        self.done = True


def test_work_completes_when_nobody_else_can_run():
    flag, seen, scheduler = Flag(), [], Scheduler()
    first, second = stand.strands(stand.cluster(warpgroups=2))

    def waits():
        yield Wait(lambda: flag.done, lambda: "the flag")
        seen.append(("waited", flag.done))

    def runs():
        scheduler.in_flight.append(flag)
        for _ in range(3):
            yield Wait(lambda: True, lambda: "nothing")
            seen.append(("ran", flag.done))

    scheduler.run([(first, waits()), (second, runs())])
    assert seen == [("ran", False)] * 3 + [("waited", True)]


def test_a_deadlock_names_everybody_who_waits():
    first, second = stand.strands(stand.cluster(warpgroups=2))

    def never(what):
        yield Wait(lambda: False, lambda: what)

    with pytest.raises(DeadlockError) as info:
        Scheduler().run([(first, never("a horse")), (second, never("a cart"))])
    assert "CTA 0 warps 0-3 waits for a horse" in str(info.value)
    assert "CTA 0 warps 4-7 waits for a cart" in str(info.value)


def test_warps_that_differ_need_strands_of_their_own():
    (together,) = stand.strands(stand.cluster())
    by_warp = np.arange(128) // 32
    with pytest.raises(SplitWarps):
        together.uniform(by_warp)
    together.mask = by_warp == 2
    assert together.uniform(by_warp) == 2


@pytest.mark.parametrize(
    ("kind", "b", "c", "expected"),
    [
        ("bfly", 5, 31, LANES ^ 5),
        ("idx", 7, 31, np.full(32, 7)),
        ("up", 3, 0, np.where(LANES >= 3, LANES - 3, LANES)),
        ("down", 3, 31, np.where(LANES + 3 < 32, LANES + 3, LANES)),
        # Segments of eight lanes: the mask 0b11000, the clamp 7.
        ("idx", 2, 0x1807, LANES // 8 * 8 + 2),
        ("down", 6, 0x1807, np.where(LANES % 8 < 2, LANES + 6, LANES)),
    ],
)
def test_each_lane_of_a_shuffle_reads_another(kind, b, c, expected):
    source = source_lane(kind, LANES, np.array([b]), np.array([c]))
    np.testing.assert_array_equal(source, expected)

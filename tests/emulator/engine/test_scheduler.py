# SPDX-License-Identifier: Apache-2.0
"""Who runs next, and what happens to work in flight."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from pallas_gpu import errors
from pallas_gpu.emulator.engine import scheduler


class Counted:
    """Work of two stages."""

    def __init__(self):
        self.stages = 0

    def advance(self):
        self.stages += 1
        return self.stages == 2


def thread(name, generator):
    return SimpleNamespace(
        name=name, generator=generator, wait=None, done=False, where=lambda: "k.py:1"
    )


def noting(log, name, turns):
    for _ in range(turns):
        log.append(name)
        yield None


def order(seed):
    log: list[str] = []
    rng = random.Random(seed)
    threads = [thread(n, noting(log, n, 5)) for n in "ab"]
    scheduler.run(threads, scheduler.InFlight("late", rng), rng)
    return "".join(log)


def test_the_seed_decides_the_order():
    assert order(1) == order(1)
    assert len({order(seed) for seed in range(6)}) > 1


def test_eager_work_is_done_when_it_is_submitted():
    work = Counted()
    in_flight = scheduler.InFlight("eager", random.Random(0))
    in_flight.submit(work)
    assert work.stages == 2 and len(in_flight) == 0


def test_late_work_waits_until_nobody_can_run():
    work = Counted()
    rng = random.Random(0)
    in_flight = scheduler.InFlight("late", rng)
    seen = []

    def waiting():
        in_flight.submit(work)
        seen.append(work.stages)
        yield None
        seen.append(work.stages)
        yield scheduler.Wait(lambda: work.stages == 2, "work", str)

    scheduler.run([thread("a", waiting())], in_flight, rng)
    assert seen == [0, 0] and work.stages == 2


def test_drain_completes_everything():
    in_flight = scheduler.InFlight("late", random.Random(0))
    works = [Counted() for _ in range(3)]
    for work in works:
        in_flight.submit(work)
    in_flight.drain()
    assert [w.stages for w in works] == [2, 2, 2]


def test_a_deadlock_lists_waits_and_ends():
    def waiting():
        yield scheduler.Wait(lambda: False, "a barrier", lambda: "0 of 1 arrivals")

    rng = random.Random(0)
    threads = [thread("first", waiting()), thread("second", iter(()))]
    with pytest.raises(errors.DeadlockError) as caught:
        scheduler.run(threads, scheduler.InFlight("late", rng), rng)
    text = str(caught.value)
    assert "1 of 2 warpgroups wait" in text
    assert "first: waits for a barrier at k.py:1" in text
    assert "0 of 1 arrivals" in text
    assert "second: has ended" in text

# SPDX-License-Identifier: Apache-2.0
"""When asynchronous work advances."""

from __future__ import annotations

import random

from pallas_gpu.emulator.engine import scheduler
from pallas_gpu.emulator.engine.execution import Execution
from pallas_gpu.emulator.engine.in_flight import InFlight
from pallas_gpu.emulator.engine.threads import Group, Thread
from pallas_gpu.emulator.engine.waits import Wait


class Counted:
    """Work of two stages."""

    def __init__(self):
        self.stages = 0

    def advance(self):
        self.stages += 1
        return self.stages == 2


def test_eager_work_is_done_when_it_is_submitted():
    work = Counted()
    in_flight = InFlight("eager", random.Random(0))
    in_flight.submit(work)
    assert work.stages == 2 and len(in_flight) == 0


def test_late_work_waits_until_no_thread_can_run():
    work = Counted()
    group = Group(Execution(asynchrony="late"))
    seen = []

    def waiting():
        group.in_flight.submit(work)
        seen.append(work.stages)
        yield None
        seen.append(work.stages)
        yield Wait(lambda: work.stages == 2, "work", str)

    thread = Thread(group, alone=True)
    thread.generator = waiting()
    group.threads.append(thread)
    pool = scheduler.Pool(iter([group]), 1, 1, "groups", "places")
    scheduler.run(group.execution, [pool])
    assert seen == [0, 0] and work.stages == 2


def test_drain_completes_everything():
    in_flight = InFlight("late", random.Random(0))
    works = [Counted() for _ in range(3)]
    for work in works:
        in_flight.submit(work)
    in_flight.drain()
    assert [w.stages for w in works] == [2, 2, 2]

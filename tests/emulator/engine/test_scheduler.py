# SPDX-License-Identifier: Apache-2.0
"""Who runs next: threads of a group, and groups that get a place as others end."""

from __future__ import annotations

import pytest

from pallas_gpu import errors
from pallas_gpu.emulator.engine import scheduler
from pallas_gpu.emulator.engine.execution import Execution
from pallas_gpu.emulator.engine.threads import Group, Thread
from pallas_gpu.emulator.engine.waits import ITERATION, Wait
from tests.support.refusal import refused


def group(execution, *bodies):
    """A group with a thread for each generator."""
    made = Group(execution)
    for body in bodies:
        thread = Thread(made, alone=False)
        thread.generator = body
        made.threads.append(thread)
    return made


def run(execution, make, total=1, capacity=1):
    """Runs `total` groups, of which `make(i)` returns the bodies."""
    groups = (group(execution, *make(i)) for i in range(total))
    pool = scheduler.Pool(groups, total, capacity, "groups", "places")
    scheduler.run(execution, [pool])


def noting(log, name, turns):
    for _ in range(turns):
        log.append(name)
        yield None


@refused
def test_a_deadlock_lists_waits_and_ends():
    def waiting():
        yield Wait(lambda: False, "a barrier", lambda: "0 of 1 arrivals")

    run(Execution(), lambda i: [waiting(), iter(())])


def test_groups_that_do_not_wait_run_one_after_the_other():
    log: list[int] = []
    run(Execution(), lambda i: [noting(log, i, 3)], total=4, capacity=4)
    assert log == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_a_group_starts_when_it_has_a_place():
    started: list[int] = []
    most = 0
    left: list[int] = []

    def body(i):
        nonlocal most
        started.append(i)
        most = max(most, len(started) - len(left))
        # Waits for its neighbour, so that two have to be there at once.
        yield Wait(lambda: i ^ 1 in started, f"group {i ^ 1}", str, across_groups=True)
        left.append(i)

    run(Execution(), lambda i: [body(i)], total=6, capacity=2)
    assert started == list(range(6))
    assert most == 2


def meeting(n, poll):
    """Bodies of groups that all wait for all."""
    arrived: list[int] = []

    def body(i):
        arrived.append(i)
        if not poll:
            yield Wait(lambda: len(arrived) == n, "all", str, across_groups=True)
        while len(arrived) < n:
            yield ITERATION

    return lambda i: [body(i)]


@pytest.mark.parametrize("poll", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_groups_that_wait_for_one_another_end(poll, seed):
    run(Execution(seed), meeting(10, poll), total=10, capacity=10)


@refused
def test_more_groups_than_places_deadlock_and_the_report_counts_the_places():
    run(Execution(), meeting(10, poll=False), total=10, capacity=8)


def test_a_deadlock_within_a_group_is_reported_before_other_groups_start():
    started: list[int] = []

    def body(i):
        started.append(i)
        yield Wait(lambda: False, "a barrier", str)

    with pytest.raises(errors.DeadlockError, match="1 of 1 threads wait") as caught:
        run(Execution(), lambda i: [body(i)], total=5, capacity=2)
    assert started == [0]
    assert "fit at once" not in str(caught.value)


def test_two_pools_fill_their_own_places():
    execution = Execution()
    arrived: list[tuple[str, int]] = []

    def body(pool, i):
        arrived.append((pool, i))
        yield Wait(lambda: len(arrived) == 4, "all", str, across_groups=True)

    def pool(name):
        groups = (group(execution, body(name, i)) for i in range(2))
        return scheduler.Pool(groups, 2, 2, "groups", name)

    scheduler.run(execution, [pool("a"), pool("b")])
    assert sorted(arrived) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


def test_a_group_finishes_after_its_work():
    execution = Execution(asynchrony="late")
    log: list[str] = []

    class Work:
        def advance(self):
            log.append("work")
            return True

    class Noting(Group):
        def finish(self):
            log.append("finish")

    made = Noting(execution)
    made.in_flight.submit(Work())
    made.threads.append(Thread(made, alone=True))
    scheduler.run(execution, [scheduler.Pool(iter([made]), 1, 1, "groups", "places")])
    assert log == ["work", "finish"]
    assert not execution.resident

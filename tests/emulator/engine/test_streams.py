# SPDX-License-Identifier: Apache-2.0
"""Streams of asynchronous work, and the typed keys that threads find them by."""

from __future__ import annotations

from typing import Any

import pytest

from pallas_gpu.emulator.engine.execution import Execution
from pallas_gpu.emulator.engine.streams import Stream
from pallas_gpu.emulator.engine.tables import Key
from pallas_gpu.emulator.engine.threads import Group, Thread


def thread():
    return Thread(Group(Execution()), alone=True)


def waits_of(run):
    """What a wait yields until its conditions hold; None when it goes on at once."""
    return next(run, None)


def test_a_wait_holds_until_the_groups_before_the_last_n_have_passed():
    one = thread()
    stream = Stream(one, milestones=1)
    (done,) = stream.milestones
    groups = []
    for _ in range(3):
        groups.append(stream.issue())
        stream.close_group()
    assert groups == [1, 2, 3]
    wait = waits_of(stream.wait(one, 1, passed=1, what="copies"))
    assert not wait.ready()
    assert wait.state() == "2 copies are pending"
    done.passed(1)
    assert not wait.ready()
    done.passed(2)
    assert wait.ready()


def test_work_of_an_open_group_is_not_awaited():
    one = thread()
    stream = Stream(one, milestones=1)
    stream.issue()
    assert waits_of(stream.wait(one, 0, passed=1, what="copies")) is None


@pytest.mark.parametrize("passed", [1, 2])
def test_a_wait_makes_the_awaited_milestones_known(passed):
    one = thread()
    stream = Stream(one, milestones=2)
    group = stream.issue()
    stream.close_group()
    for milestone in stream.milestones[:passed]:
        milestone.passed(group)
    assert waits_of(stream.wait(one, 0, passed, "copies")) is None
    known = [one.clock.get(m.actor, 0) for m in stream.milestones]
    assert known == [1] * passed + [0] * (2 - passed)
    assert [m.awaited for m in stream.milestones] == known


def test_a_wait_for_fewer_groups_does_not_forget_what_was_awaited():
    one = thread()
    stream = Stream(one, milestones=1)
    group = stream.issue()
    stream.close_group()
    stream.milestones[0].passed(group)
    for n in (0, 1):
        assert waits_of(stream.wait(one, n, 1, "copies")) is None
    assert stream.milestones[0].awaited == 1


def test_each_owner_has_its_own_state_of_a_key():
    key: Key[Thread, list[Any]] = Key("names", lambda owner: [owner])
    a, b = thread(), thread()
    assert key.find(a) is None
    key.of(a).append("more")
    assert key.of(a) == [a, "more"]
    assert key.find(a) is key.of(a)
    assert key.of(b) == [b]


def test_two_keys_of_one_name_are_two_states():
    first: Key[Thread, list[str]] = Key("names", lambda owner: [])
    second: Key[Thread, list[str]] = Key("names", lambda owner: [])
    one = thread()
    first.of(one).append("x")
    assert second.of(one) == []

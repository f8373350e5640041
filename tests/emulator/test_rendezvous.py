# SPDX-License-Identifier: Apache-2.0
"""Kernels whose devices access each other's memory, on eight CPU devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest

from pallas_gpu import errors
from pallas_gpu.emulator import rendezvous
from pallas_gpu.emulator.rendezvous import Rendezvous
from tests.support.devices.rendezvous import CHECKS

DEVICES = "--xla_force_host_platform_device_count=8"


@pytest.fixture(scope="module")
def found():
    """What has come of each check, in one process for all of them."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}"
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.devices.rendezvous"],
        capture_output=True,
        text=True,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CHECKS)
def test_devices_meet(name, found):
    assert found[name] == ""


# --- the rendezvous by itself ---------------------------------------------------------


def at_once(*calls):
    """Calls functions in threads of their own; returns results or errors, in order."""
    found = [None] * len(calls)

    def run(i):
        try:
            found[i] = calls[i]()
        except errors.PallasGpuError as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_each_device_gets_its_own_results():
    place = Rendezvous(3, lambda each: [sum(each, ())] * 3, "k", None)
    found = at_once(*(lambda i=i: place.launch(i, (i,)) for i in range(3)))
    assert found == [(0, 1, 2)] * 3


def test_an_error_reaches_all_devices():
    def run(each):
        raise errors.RaceError("both")

    place = Rendezvous(2, run, "k", None)
    found = at_once(*(lambda i=i: place.launch(i, ()) for i in range(2)))
    assert [str(error) for error in found] == ["both"] * 2


def test_a_device_may_be_a_launch_ahead():
    place = Rendezvous(2, list, "k", None)
    found = at_once(
        lambda: place.launch(0, "a"),
        lambda: place.launch(0, "b"),
        lambda: [place.launch(1, "c"), place.launch(1, "d")],
    )
    assert {*found[:2], *found[2]} == {"a", "b", "c", "d"}


def test_a_missing_device_is_named(monkeypatch):
    monkeypatch.setattr(rendezvous, "PATIENCE_S", 0.05)
    place = Rendezvous(4, list, "k", "f.py:3 (k)")
    found = at_once(*(lambda i=i: place.launch(i, ()) for i in (0, 1, 3)))
    assert all(isinstance(error, errors.DeadlockError) for error in found)
    assert "launches on [0, 1, 3] and none on [2]" in str(found[0])
    assert "f.py:3" in str(found[0])


def test_nobody_is_missing_while_a_kernel_runs(monkeypatch):
    monkeypatch.setattr(rendezvous, "PATIENCE_S", 0.05)
    place, ended = Rendezvous(2, list, "k", None), threading.Event()

    def late():
        with rendezvous.running():
            ended.wait(0.3)
        return place.launch(1, "b")

    assert at_once(lambda: place.launch(0, "a"), late) == ["a", "b"]

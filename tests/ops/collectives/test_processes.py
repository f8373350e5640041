# SPDX-License-Identifier: Apache-2.0
"""Two processes of one host, connected by `jax.distributed`: see several_devices.md."""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys

import pytest

from tests import conftest
from tools.source_tree import ROOT

pytestmark = pytest.mark.skipif(conftest.PLATFORM != "cpu", reason="the emulator's")


@functools.cache
def outcomes() -> list[dict[str, object]]:
    """Returns what each process says of each function."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.support.devices.processes", str(port)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    running = [
        subprocess.Popen(
            [*command, str(i)], env=environment, cwd=ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for i in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=120) for process in running]
    for process, (_, errors) in zip(running, said, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def test_a_kernel_that_stays_on_its_device_runs():
    assert [x["stays"] for x in outcomes()] == [[0, 2], [257, 259]]


@pytest.mark.parametrize("name", ["reaches", "reaches as emitted code"])
def test_a_kernel_that_accesses_other_devices_is_refused(name):
    for found in outcomes():
        assert str(found[name]).startswith("UnsupportedError: kernel reaches: ")
        assert "2 processes" in str(found[name])


def test_collectives_fall_back_to_lax():
    for found in outcomes():
        assert found["all_reduce"] == [128, 130]


def test_a_collective_that_has_to_be_a_kernel_is_refused():
    for found in outcomes():
        assert "the devices are those of several processes" in str(
            found["required kernel"]
        )

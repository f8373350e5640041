# SPDX-License-Identifier: Apache-2.0
"""Each cell of docs/composition.md: it passes, or raises what the table says."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from tests import conftest
from tests.support.composition import CELLS, ROWS, Row, Way
from tests.support.composition.row import run_cell

pytestmark = pytest.mark.skipif(conftest.PLATFORM != "cpu", reason="the emulator's")


def _cells() -> list[Any]:
    found = []
    for row in ROWS:
        marks = [pytest.mark.offline] * row.offline
        for way in CELLS:
            name = f"{row.name} {way}".replace("`", "")
            found.append(pytest.param(row, way, marks=marks, id=name))
    return found


@pytest.mark.parametrize(("row", "way"), _cells())
def test_a_cell_of_the_table(row: Row, way: Way):
    if row.devices == 1:
        run_cell(row, way)
    else:
        failure = _on_two_devices()[f"{row.name} {way}"]
        assert failure is None, failure


@functools.cache
def _on_two_devices() -> dict[str, str | None]:
    """Runs the cells that need two devices, all in one process."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.composition.devices"],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"},
        cwd=pathlib.Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])

# SPDX-License-Identifier: Apache-2.0
"""The tuner and processes: two that tune at once, and those of the offline compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu.testing.tuning import store
from tests.support import everywhere

PROGRAM = """
import sys
import numpy as np
import jax
import pallas_gpu as plgpu
from tests.support.fake_device import FakeDevice

device = FakeDevice()


@plgpu.autotune(configs=["a", "b"], timer=device, flush_l2=False, cache_dir=sys.argv[1])
def f(x, *, config):
    launch = lambda v: device.launch(config, {"a": 2.0, "b": 1.0}[config], v)[0]
    return jax.pure_callback(launch, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


print(f.best(np.ones(8, np.float32)), len(device.launched))
"""


def test_processes_that_tune_at_once_measure_once_and_agree(tmp_path: Path):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        for _ in range(2)
    ]
    answers = [process.communicate(timeout=120)[0].split() for process in started]
    assert [choice for choice, _ in answers] == ["b", "b"]
    assert sorted(int(calls) > 0 for _, calls in answers) == [False, True]
    (file,) = tmp_path.glob("*.json")
    assert json.loads(file.read_text())["config"] == "'b'"
    assert list(tmp_path.glob(".*.json.*")) == []  # nothing is half written


def test_a_lock_that_is_held_for_long_is_not_waited_for(tmp_path: Path):
    path = tmp_path / "f.json"
    start = time.monotonic()
    with store.locked(path, 10), store.locked(path, 0.2):
        assert 0.2 <= time.monotonic() - start < 5


X = np.ones((64, 1024), np.float32)


def plus_one(x, *, config):
    """x + 1 by tiles of `config` columns, each of which is in registers as a whole."""

    def body(x_ref, o_ref):
        part = plgpu.ds(jax.lax.axis_index("i") * config, config)
        tile = x_ref[:, part]
        o_ref[:, part] = tile + (1 + 0 * jnp.max(tile))

    return everywhere.kernel(body, x, grid={"i": x.shape[1] // config})()(x)


def tuned(folder: Path, processes: int) -> plgpu.testing.TuningReport:
    """The report of tuning `plus_one` with a timer that finds all alike."""

    def timer(run):
        run()
        return [("k", 1.0)]

    options = {"timer": timer, "flush_l2": False, "cache_dir": folder}
    decorate = plgpu.autotune(configs=[1024, 128], processes=processes, **options)
    return decorate(plus_one).tune(X)


@pytest.mark.offline
def test_what_spills_registers_is_not_run(tmp_path: Path):
    report = tuned(tmp_path, processes=2)
    wide, narrow = report.rows
    assert (wide.outcome, narrow.outcome) == ("spills", "measured")
    assert "go to memory" in wide.reason
    assert wide.milliseconds is None
    assert "compile offline" in report.steps


def test_without_processes_nothing_is_compiled_offline(tmp_path: Path):
    report = tuned(tmp_path, processes=0)
    assert [row.outcome for row in report.rows] == ["measured", "measured"]
    assert "compile offline" not in report.steps


@pytest.mark.gpu
def test_a_kernel_is_tuned_on_a_gpu(tmp_path: Path):
    decorate = plgpu.autotune(configs=[128, 256], processes=0, cache_dir=tmp_path)
    with jax.default_device(jax.devices("cuda")[0]):
        x = jnp.asarray(X)
        report = decorate(plus_one).tune(x)
        assert all(0 < row.milliseconds < 1 for row in report.rows)
        again = decorate(plus_one)
        np.testing.assert_array_equal(jax.jit(again)(x), X + 1)
    (known,) = again.reports.values()
    assert known.stored
    assert known.card == jax.devices("cuda")[0].device_kind

# SPDX-License-Identifier: Apache-2.0
"""The demo's kernels: the same bodies in the emulator, offline and on a GPU."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from demo import first_light
from demo.kernels import (
    COLUMNS,
    Job,
    scale_and_add,
    scale_and_add_job,
    shifted_exp,
    shifted_exp_job,
)
from demo.matmul import blackwell_matmul_job, matmul_job
from tests.support.semantics import BOTH
from tools.source_tree import ROOT

JOBS = {
    "scale_and_add": scale_and_add_job((100, 300)),
    "scale_and_add-no-edge": scale_and_add_job((128, 256)),
    "scale_and_add-one-element": scale_and_add_job((1, 1)),
    "shifted_exp-f16": shifted_exp_job(128, np.float16),
    "shifted_exp-bf16": shifted_exp_job(128, jnp.bfloat16),
    "shifted_exp-f32": shifted_exp_job(128, np.float32),
    "matmul": matmul_job(),
    "matmul-one-cluster": matmul_job(256, 256, 64),
}
BLACKWELL = blackwell_matmul_job(128, 256, 64)


@pytest.fixture(params=JOBS.values(), ids=JOBS.keys())
def job(request: pytest.FixtureRequest) -> Job:
    return request.param


# --- the emulator ---------------------------------------------------------------------


@pytest.mark.smoke
def test_jobs_under_jit_and_eager_agree_with_numpy_in_the_emulator(job: Job):
    jitted = job.jitted(interpret=True)(*job.arguments)
    assert job.error(jitted) <= job.tolerance
    eager = job.function(*job.arguments, interpret=True)
    np.testing.assert_array_equal(eager, jitted)


@pytest.mark.parametrize(
    "name", ["scale_and_add", "shifted_exp-f16", "matmul-one-cluster"]
)
def test_no_schedule_changes_a_result(name: str):
    job = JOBS[name]
    params = plgpu.InterpretParams(schedules=9)
    result = job.function(*job.arguments, interpret=params)
    assert job.error(result) <= job.tolerance


def test_rows_that_tma_cannot_address_are_copied_by_threads():
    job = scale_and_add_job((70, 999))
    result = job.jitted(interpret=True)(*job.arguments)
    assert job.error(result) <= job.tolerance


def test_both_kernels_work_in_one_program():
    x = np.random.default_rng(2).standard_normal((128, COLUMNS), np.float32)

    @jax.jit
    def program(x):
        total = scale_and_add(x, shifted_exp(x, interpret=True), interpret=True)
        return shifted_exp(total, interpret=True)

    inner = np.exp(x - x.max(axis=1, keepdims=True))
    total = 0.7 * x + inner
    expected = np.exp(total - total.max(axis=1, keepdims=True))
    np.testing.assert_allclose(program(x), expected, rtol=1e-5, atol=1e-6)


def test_vmap_runs_a_job_for_each_batch_element():
    x = np.random.default_rng(3).standard_normal((3, 128, COLUMNS), np.float32)
    y = np.random.default_rng(4).standard_normal((128, COLUMNS), np.float32)

    def both(x, y):
        return shifted_exp(scale_and_add(x, y, interpret=True), interpret=True)

    batched = jax.jit(jax.vmap(both, in_axes=(0, None)))(x, y)
    np.testing.assert_array_equal(batched, [both(element, y) for element in x])


# --- offline --------------------------------------------------------------------------


# Copies of each job's kernel, whatever its sizes are.
TMA_COPIES = {"scale_and_add": 3, "shifted_exp-f16": 2, "shifted_exp-f32": 2}
THREADS_COPY = "scale_and_add-one-element"


@pytest.mark.offline
@pytest.mark.sass
@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize(
    "name", [*TMA_COPIES, "shifted_exp-bf16", "matmul", THREADS_COPY]
)
def test_a_job_compiles_for_hopper_without_spills(name: str, semantics: Any):
    job = JOBS[name]
    (report,) = plgpu.offline.compile(
        job.jitted(semantics=semantics), *job.arguments, target="sm_90a"
    )
    assert report.name == job.name
    assert ".target sm_90a" in report.ptx
    assert report.sass is None or "EXIT" in report.sass
    assert report.resources.spill_store_bytes == 0
    assert report.resources.spill_load_bytes == 0
    assert 0 < report.resources.smem_bytes <= report.resources.smem_limit_bytes
    # The matrix product has a producer and two consumers, the others one warpgroup.
    warpgroups = 3 if job.name == "matmul" else 1
    assert report.resources.threads_per_block == 128 * warpgroups
    if name != THREADS_COPY:
        check_instructions(name, report)


def check_instructions(name: str, report: Any) -> None:
    """A block travels in one TMA copy; a product uses the tensor core and a cluster."""
    counts = report.instruction_counts
    if name == "matmul":
        assert counts["wgmma"] >= 4
        assert counts["cp.async.bulk.tensor"] >= 3
        # One warpgroup gives registers back, the others take them.
        assert counts["setmaxnreg"] == 2
        assert ".multicast::cluster" in report.ptx
        # One block fills an SM's memory, and the barriers are two for each stage.
        assert report.resources.occupancy_blocks_per_sm == 1
        assert report.resources.num_barriers == 8
        return
    assert counts["cp.async.bulk.tensor"] == TMA_COPIES.get(name, 2)
    assert "ld.global" not in counts
    assert "st.global" not in counts
    if name == "shifted_exp-f16":
        # A warpgroup's 64 x 128 tile is 16 KiB; one .x4 instruction of a warp carries
        # 512 bytes, so each of the four warps needs 8.
        assert counts["ldmatrix"] == counts["stmatrix"] == 8


# --- a GPU ----------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("interpret", [None, False])
@pytest.mark.parametrize("semantics", BOTH)
def test_a_job_under_jit_agrees_with_numpy_on_the_gpu(
    job: Job, interpret: bool | None, semantics: Any
):
    gpu = jax.devices("cuda")[0]
    arguments = jax.device_put(job.arguments, gpu)
    result = job.jitted(interpret, semantics)(*arguments)
    assert result.device == gpu
    assert job.error(result) <= job.tolerance


@pytest.mark.gpu
def test_an_eager_call_on_arrays_of_the_gpu_runs_there(job: Job):
    gpu = jax.devices("cuda")[0]
    result = job.function(*jax.device_put(job.arguments, gpu))
    assert result.device == gpu
    assert job.error(result) <= job.tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("semantics", BOTH)
def test_the_emulator_and_the_gpu_agree_to_the_last_bits(job: Job, semantics: Any):
    arguments = jax.device_put(job.arguments, jax.devices("cuda")[0])
    on_gpu = np.asarray(job.jitted(semantics=semantics)(*arguments), np.float32)
    emulated = np.asarray(job.jitted(interpret=True)(*arguments), np.float32)
    # Both round what they compute; exp and fma may round differently.
    np.testing.assert_allclose(on_gpu, emulated, atol=2 * job.tolerance, rtol=0)


# --- the demo -------------------------------------------------------------------------


def test_the_demo_passes_its_own_checks():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "demo/first_light.py"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("scale_and_add", "shifted_exp", "matmul", "matmul on Blackwell"):
        assert f"{name}: " in done.stdout
    assert "sm_100a: " in done.stdout
    assert "all checks passed" in done.stdout
    assert done.stderr == ""


def test_a_wrong_result_fails_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    wrong = dataclasses.replace(
        JOBS["scale_and_add"], reference=lambda x, y: x.astype(np.float64)
    )
    monkeypatch.setattr(first_light, "scale_and_add_job", lambda: wrong)
    monkeypatch.setattr(first_light, "shifted_exp_job", lambda: JOBS["shifted_exp-f16"])
    monkeypatch.setattr(first_light, "matmul_job", lambda: JOBS["matmul-one-cluster"])
    monkeypatch.setattr(first_light, "blackwell_matmul_job", lambda: BLACKWELL)
    monkeypatch.setattr(first_light, "compile_offline", _no_wheels)
    monkeypatch.setattr(first_light, "find_gpu", lambda: (None, "not asked"))
    assert first_light.main() == 1
    said = capsys.readouterr().out
    assert "emulator  FAILED: AssertionError: max error" in said
    assert "offline compilation was skipped: the wheels are missing" in said
    assert "checks FAILED: 1" in said


def _no_wheels(job: Job, semantics: Any) -> list[str]:
    raise plgpu.errors.OfflineUnavailableError("the wheels are missing")

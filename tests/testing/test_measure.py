# SPDX-License-Identifier: Apache-2.0
"""measure: results of a function with the times of its kernels."""

from __future__ import annotations

import jax
import pytest

import pallas_gpu as plgpu
from pallas_gpu.runtime import cupti
from pallas_gpu.testing import measure
from tests.support.fake_device import FakeDevice
from tests.support.refusal import refused


@pytest.fixture
def device(monkeypatch) -> FakeDevice:
    fake = FakeDevice()
    monkeypatch.setattr(cupti, "require_gpu", lambda: None)
    monkeypatch.setattr(cupti, "kernel_times", fake)
    # The functions of the device cannot be traced.
    monkeypatch.setattr(jax, "jit", lambda f: f)
    return fake


def two(device):
    first, second = device.kernel("a", 9, 1, 3), device.kernel("b", 9, 2, 4)
    return lambda *args: (first(*args), second(*args))


# The first call of a function compiles it.
@pytest.mark.parametrize(
    ("options", "times"),
    [
        ({}, 3),
        ({"aggregate": False}, [("a", 1), ("b", 2)]),
        ({"iterations": 2}, [3, 7]),
        (
            {"iterations": 2, "aggregate": False},
            [[("a", 1), ("b", 2)], [("a", 3), ("b", 4)]],
        ),
    ],
)
def test_the_times_of_one_iteration_or_of_each(device, options, times):
    assert measure(two(device), **options)(7) == (((7,), (7,)), times)


def test_without_kernels_there_is_no_time(device):
    assert measure(lambda x: x)(7) == (7, None)


@refused
def test_iterations_that_differ(device):
    names = iter("aaab")

    def f(x):
        return device.launch(next(names), 1, x)

    measure(f, iterations=3)(7)  # HERE


@refused
def test_iterations_with_more_launches(device):
    counts = iter((1, 1, 2))

    def f(x):
        return [device.launch("a", 1, x) for _ in range(next(counts))]

    measure(f, iterations=2)(7)  # HERE


@refused
def test_no_iterations():
    measure(lambda x: x, iterations=0)  # HERE


@refused
def test_no_gpu(monkeypatch):
    monkeypatch.setattr(cupti, "first_gpu", lambda: None)
    measure(lambda x: x)(7)  # HERE


def test_upstreams_names_are_there():
    assert plgpu.profiler.measure is measure
    spec = plgpu.profiler.ProfilerSpec(16, dump_path="traces")
    assert (spec.recording.space, spec.dump_path) == (3, "traces")
    assert spec.trace_scope is plgpu.TraceScope.WARPGROUP


def test_the_sponge_is_the_folder_of_a_tests_outputs(monkeypatch, tmp_path):
    monkeypatch.setenv("TEST_UNDECLARED_OUTPUTS_DIR", str(tmp_path))
    assert plgpu.profiler.ProfilerSpec(16).dump_path == str(tmp_path)


@refused
def test_a_spec_without_room():
    plgpu.profiler.ProfilerSpec(6)  # HERE

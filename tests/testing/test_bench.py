# SPDX-License-Identifier: Apache-2.0
"""do_bench: rounds, order, statistics, and what each call launched."""

from __future__ import annotations

import functools
import time

import jax
import jax.numpy as jnp
import pytest

from pallas_gpu import testing
from pallas_gpu.runtime import cupti
from pallas_gpu.testing.rounds import Rounds
from tests.support import everywhere
from tests.support.fake_device import FakeDevice
from tests.support.refusal import refused

QUICK = {"flush_l2": False, "pause_seconds": 0}


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


# The first two calls are those that learn which kernels there are.
@pytest.mark.parametrize(
    ("found", "times", "options"),
    [
        (2, (1, 2, 30), {"warmup": 0, "rounds": 3}),
        (1, (100, 1, 1, 1), {"warmup": 1, "rounds": 3}),
        (
            (1, 3, 4.5, 5),
            (1, 2, 3, 4, 5),
            {"warmup": 0, "rounds": 5, "quantiles": (0, 0.5, 0.875, 1)},
        ),
    ],
    ids=["median", "warm-up", "quantiles"],
)
def test_the_rounds_in_milliseconds(device, found, times, options):
    f = device.kernel("k", 9, 9, *times)
    assert testing.do_bench(f, timer=device, **options, **QUICK) == found


def test_a_call_takes_the_sum_of_its_kernels(device):
    first, second = device.kernel("k1", 1), device.kernel("k2", 2)
    f = lambda: (first(), second())  # noqa: E731
    assert testing.do_bench(f, rounds=2, timer=device, **QUICK) == 3


def test_several_functions_are_interleaved_in_changing_order(device):
    names = ["a", "b", "c"]
    functions = {name: device.kernel(name, i) for i, name in enumerate(names)}
    found = testing.do_bench(functions, warmup=0, rounds=12, timer=device, **QUICK)
    assert found == {"a": 0, "b": 1, "c": 2}
    measured = device.launched[2 * len(names) :]
    rounds = [tuple(measured[i : i + 3]) for i in range(0, len(measured), 3)]
    assert all(sorted(order) == names for order in rounds)
    assert len(set(rounds)) > 3
    # The first call after a pause is slower than the others.
    assert all(
        sorted(places) == sorted(4 * names) for places in zip(*rounds, strict=True)
    )


def test_the_inputs_are_used_in_turn(device):
    used = []
    k = device.kernel("k", 1)
    inputs = [(1,), (2,)]
    testing.do_bench(
        lambda x: (used.append(x), k()), inputs=inputs, rounds=2, timer=device, **QUICK
    )
    assert used == [1, 2, 1, 2, 1]


def test_the_first_call_after_a_pause_is_not_counted(device):
    f = device.kernel("k", 9, 9, *(3, 1) * 4)
    options = {"warmup": 0, "rounds": 4, "flush_l2": False, "pause_seconds": 1e-3}
    assert testing.do_bench(f, timer=device, quantiles=(0, 1), **options) == (1, 1)
    functions = {name: device.kernel(name, 1) for name in "ab"}
    del device.launched[:]
    testing.do_bench(functions, timer=device, **options)
    rounds = zip(*[iter(device.launched[4:])] * 3, strict=True)
    assert {"".join(names) for names in rounds} == {"aba", "bab"}


@pytest.mark.parametrize("inputs", [False, True])
def test_each_call_finds_donated_arrays_and_references_as_they_were(device, inputs):
    """And the caller's remain. What is not donated is not copied."""
    seen, kept = [], []
    x, y, ref = jnp.ones(4), jnp.ones(4), jax.new_ref(jnp.zeros(4))
    launch = device.kernel("k", 1)

    @functools.partial(jax.jit, donate_argnums=0)
    def donated(pair, y, ref):
        ref[...] += pair[0]
        return pair[0] + y

    def f(pair, y, ref):
        launch()
        kept.append(y)
        result = donated(pair, y, ref)
        assert pair[0].is_deleted()
        seen.append((result, ref[...]))

    args = ((x, jnp.ones(4)), y, ref)
    given = {"inputs": [args, args]} if inputs else {}
    testing.do_bench(
        f, *(() if inputs else args), **given, rounds=3, timer=device, flush_l2=False
    )
    for result, written in seen:
        assert result.tolist() == [2.0] * 4
        assert written.tolist() == [1.0] * 4
    assert x.tolist() == [1.0] * 4
    assert ref[...].tolist() == [0.0] * 4
    assert sum(z is not y for z in kept) == (2 if inputs else 1)


def test_copies_of_arguments_are_not_measured(device, monkeypatch):
    launch = device.kernel("copy", 50)
    copy = jnp.copy
    monkeypatch.setattr(jnp, "copy", lambda x: (launch(), copy(x))[1])
    ref, k = jax.new_ref(jnp.zeros(4)), device.kernel("k", 1)
    found = testing.do_bench(lambda ref: k(), ref, rounds=3, timer=device, **QUICK)
    assert found == 1
    assert "copy" in device.launched


def test_a_call_that_launches_other_kernels_than_before_is_measured_by_itself(device):
    # As a loop whose length depends on data: two kernels in every third call.
    count = iter(range(100))
    once, twice = device.kernel("once", 1), device.kernel("twice", 1)
    f = lambda: (once(), twice()) if next(count) % 3 == 2 else once()  # noqa: E731
    functions = {"f": f, "g": device.kernel("g", 5)}
    found = testing.do_bench(functions, warmup=0, rounds=6, timer=device, **QUICK)
    assert found["g"] == 5
    assert 1 <= found["f"] <= 2


def test_the_l2_is_flushed_before_each_call_and_that_is_not_counted(device):
    rounds = Rounds(
        {"a": device.kernel("a", 1), "b": device.kernel("b", 2)},
        timer=device,
        flush_l2=False,
    )
    rounds._flush = device.kernel("flush", 50)
    rounds._flush_kernels = ("flush",)
    del device.launched[:]
    rounds.run()
    assert rounds.times == {"a": [1], "b": [2]}
    assert device.launched[::2] == ["flush", "flush"]


def test_the_default_flush_runs_where_jax_does(device):
    f = device.kernel("k", 1)
    assert testing.do_bench(f, rounds=1, timer=device, pause_seconds=0) == 1


def test_the_seconds_end_the_measurement(device):
    def f():
        device.launch("k", 1)
        time.sleep(0.01)

    start = time.monotonic()
    testing.do_bench(f, seconds=0.1, timer=device, **QUICK)
    assert 0.1 <= time.monotonic() - start < 2


REFUSED = {
    "launches nothing": lambda timer: testing.do_bench(lambda: 1, timer=timer, **QUICK),
    "other arguments": lambda timer: testing.do_bench(lambda x: x, 1, 2, timer=timer),
    "arguments twice": lambda timer: testing.do_bench(
        lambda x: x, 1, inputs=[(1,)], timer=timer
    ),
    "kernel_times takes no arguments": lambda _: testing.kernel_times(lambda x: x),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
@refused
def test_a_call_that_cannot_be_measured_is_refused(device, monkeypatch, call):
    monkeypatch.setattr(cupti, "kernel_times", lambda run: run())
    call(device)


RESULTS = [None, 1, [1], [("k",)], [(1, 2)], [("k", "x")]]


@pytest.mark.parametrize("result", RESULTS, ids=repr)
@refused
def test_a_timer_that_returns_something_else_is_refused(result):
    testing.do_bench(lambda: 0, timer=lambda run: result, **QUICK)


@pytest.mark.parametrize("call", [testing.do_bench, testing.kernel_times])
@refused
def test_without_a_gpu_and_a_timer_there_is_nothing_to_measure(call):
    if everywhere.has_gpu():
        pytest.skip("there is a GPU")
    call(lambda: 0)


@pytest.mark.gpu
def test_cupti_measures_kernels_on_a_gpu():
    with jax.default_device(jax.devices("cuda")[0]):
        x = jnp.ones((2048, 2048), jnp.bfloat16)
        functions = {
            "one": jax.jit(lambda x: x @ x),
            "two": jax.jit(lambda x: x @ x @ x),
        }
        found = testing.do_bench(functions, x, rounds=5)
    assert 0.005 < found["one"] < found["two"] < 1


EFFECTS = {
    f"testing.do_bench.{name}": test
    for name, test in {
        "args": "test_a_call_that_cannot_be_measured_is_refused",
        "inputs": "test_the_inputs_are_used_in_turn",
        "warmup": "test_the_rounds_in_milliseconds",
        "rounds": "test_the_rounds_in_milliseconds",
        "seconds": "test_the_seconds_end_the_measurement",
        "quantiles": "test_the_rounds_in_milliseconds",
        "flush_l2": "test_the_l2_is_flushed_before_each_call_and_that_is_not_counted",
        "pause_seconds": "test_the_rounds_in_milliseconds",
        "timer": "test_without_a_gpu_and_a_timer_there_is_nothing_to_measure",
    }.items()
}

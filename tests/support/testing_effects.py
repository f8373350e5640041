# SPDX-License-Identifier: Apache-2.0
"""The effects of arguments of `plgpu.testing` and of the tuner."""

from __future__ import annotations

from collections.abc import Callable

BENCH = "tests/testing/test_bench.py"

EFFECTS: dict[str, Callable[[], list[str]] | str] = {
    f"testing.do_bench.{name}": f"{BENCH}::{test}"
    for name, test in {
        "args": "test_arguments_given_twice_are_refused",
        "inputs": "test_the_inputs_are_used_in_turn",
        "warmup": "test_warm_up_rounds_are_not_counted",
        "rounds": "test_the_median_of_the_rounds_in_milliseconds",
        "seconds": "test_the_seconds_end_the_measurement",
        "quantiles": "test_quantiles_are_interpolated",
        "flush_l2": "test_the_l2_is_flushed_before_each_call_and_that_is_not_counted",
        "pause_seconds": "test_the_median_of_the_rounds_in_milliseconds",
        "timer": "test_without_a_gpu_and_a_timer_there_is_nothing_to_measure",
    }.items()
}

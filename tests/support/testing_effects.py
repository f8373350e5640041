# SPDX-License-Identifier: Apache-2.0
"""The effects of arguments of `plgpu.testing` and of the tuner."""

from __future__ import annotations

from collections.abc import Callable

BENCH = "tests/testing/test_bench.py"
TUNE = "tests/testing/test_autotune.py"
PROCESSES = "tests/testing/test_tuning_processes.py"
REPORT = "tests/testing/test_perf_report.py"
COST = "tests/testing/test_cost.py"

EFFECTS: dict[str, Callable[[], list[str]] | str] = {
    f"testing.do_bench.{name}": f"{BENCH}::{test}"
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
EFFECTS |= {
    f"autotune.{name}": f"{TUNE}::{test}"
    for name, test in {
        "key": "test_a_key_of_names_leaves_the_other_arguments_out",
        "reference": "test_a_reference_finds_the_first_configuration_wrong",
        "rtol": "test_tolerances_or_a_check_of_the_users_say_what_is_wrong",
        "atol": "test_tolerances_or_a_check_of_the_users_say_what_is_wrong",
        "check": "test_tolerances_or_a_check_of_the_users_say_what_is_wrong",
        "inputs": "test_inputs_of_the_users_are_used_under_jit",
        "seconds": "test_without_time_the_first_configuration_is_measured_once",
        "top": "test_only_the_best_by_the_cost_model_are_measured",
        "flush_l2": "test_the_l2_is_flushed_on_request",
        "cache_dir": "test_a_result_is_read_from_disk",
        "progress": "test_the_progress_is_shown_if_tqdm_is_there",
        "timer": "test_without_a_gpu_the_cost_model_chooses_and_that_is_said",
    }.items()
}
EFFECTS |= {
    "autotune.processes": f"{PROCESSES}::"
    "test_without_processes_nothing_is_compiled_offline",
    "testing.rank.args": f"{COST}::test_the_work_of_a_product_is_that_of_its_tiles",
    "testing.rank.target": f"{COST}::test_the_target_is_an_argument",
}
EFFECTS |= {
    f"testing.Benchmark.{name}": f"{REPORT}::{test}"
    for name, test in {
        "line_names": "test_lines_have_titles",
        "plot_name": "test_the_table_is_saved",
        "args": "test_other_arguments_come_from_the_benchmark_and_from_run",
        "xlabel": "test_a_plot_has_a_line_for_each_column",
        "ylabel": "test_a_plot_has_a_line_for_each_column",
        "x_log": "test_a_plot_has_a_line_for_each_column",
        "y_log": "test_a_plot_has_a_line_for_each_column",
    }.items()
}

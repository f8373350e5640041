# SPDX-License-Identifier: Apache-2.0
"""perf_report: calls, tables, files and plots."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from unittest import mock

import pytest

from pallas_gpu import errors, testing
from tests.support.refusal import refused


def benchmark(**options) -> testing.Benchmark:
    given = {
        "x_names": ["n"],
        "x_vals": [1, 2],
        "line_arg": "of",
        "line_vals": ["ours", "theirs"],
        "plot_name": "speeds",
        **options,
    }
    return testing.Benchmark(**given)


def times(n, of, scale=1.0):
    return scale * (n if of == "ours" else 10.0 * n)


def run(function=times, /, *, args=None, **options):
    report = testing.perf_report(benchmark(**options))(function)
    return report.run(print_data=False, **(args or {}))


def test_every_size_and_line_is_measured():
    assert run().records() == [
        {"n": 1, "ours": 1.0, "theirs": 10.0},
        {"n": 2, "ours": 2.0, "theirs": 20.0},
    ]


def test_the_table_is_printed_as_markdown(capsys):
    testing.perf_report(benchmark())(times).run()
    assert capsys.readouterr().out.splitlines() == [
        "speeds, ms",
        "",
        "| n | ours | theirs |",
        "| --- | --- | --- |",
        "| 1 | 1 | 10 |",
        "| 2 | 2 | 20 |",
    ]


def test_lines_have_titles():
    assert run(line_names=["A", "B"]).columns == ["n", "A", "B"]


def test_other_arguments_come_from_the_benchmark_and_from_run():
    assert run(args={"scale": 2.0}).records()[0]["ours"] == 2.0
    fixed = testing.perf_report(benchmark(args={"scale": 3.0}))(times)
    assert fixed.run(print_data=False).records()[0]["ours"] == 3.0


def test_several_arguments_vary_together():
    def area(m, n, of):
        return float(m * n)

    shared = run(area, x_names=["m", "n"], x_vals=[2, (3, 4)])
    assert [row["ours"] for row in shared.records()] == [4.0, 12.0]
    assert shared.columns == ["m", "n", "ours", "theirs"]


def test_results_can_have_bounds_and_be_missing():
    table = run(lambda n, of: (2.0, 1.0, 3.0) if of == "ours" else None)
    (ours, theirs), _ = table.rows
    assert ours == (2.0, 1.0, 3.0)
    assert all(map(math.isnan, theirs))


def test_the_table_is_saved(tmp_path):
    report = testing.perf_report(benchmark())(times)
    report.run(print_data=False, save_path=tmp_path / "made")
    text = (tmp_path / "made" / "speeds.csv").read_text()
    assert text == "n,ours,theirs\n1,1.0,10.0\n2,2.0,20.0\n"
    record = json.loads((tmp_path / "made" / "speeds.json").read_text())
    assert record["unit"] == "ms"
    assert record["rows"][1] == {"n": 2, "ours": 2.0, "theirs": 20.0}


def test_several_benchmarks_give_several_tables():
    report = testing.perf_report([benchmark(), benchmark(x_vals=[5])])(times)
    first, second = report.run(print_data=False)
    assert len(first.rows) == 2
    assert second.records()[0]["ours"] == 5.0


def test_the_function_can_still_be_called():
    assert testing.perf_report(benchmark())(times)(3, "ours") == 3.0


def fake_pyplot(monkeypatch) -> mock.Mock:
    """A module that records what is drawn."""
    figure, package = mock.Mock(), mock.Mock()
    package.pyplot.subplots.return_value = figure, figure
    monkeypatch.setitem(sys.modules, "matplotlib", package)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", package.pyplot)
    return figure


def test_a_plot_has_a_line_for_each_column(monkeypatch, tmp_path):
    figure = fake_pyplot(monkeypatch)
    made = benchmark(xlabel="size", ylabel="GB/s", x_log=True, y_log=True)
    report = testing.perf_report(made)(times)
    report.run(print_data=False, show_plots=True, save_path=tmp_path)
    assert figure.plot.call_count == 4  # saved and shown
    figure.set_xlabel.assert_called_with("size")
    figure.set.assert_called_with(title="speeds", ylabel="GB/s")
    for called in ("set_xscale", "set_yscale", "savefig", "show"):
        assert getattr(figure, called).called


def test_without_matplotlib_a_plot_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    report = testing.perf_report(benchmark())(times)
    with pytest.raises(errors.UnsupportedError, match="requires matplotlib") as caught:
        report.run(print_data=False, show_plots=True)
    assert "pallas-gpu[tune]" in str(caught.value)
    report.run(print_data=False, save_path=tmp_path)
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".csv", ".json"]


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is missing"
)
def test_matplotlib_draws_the_plot(tmp_path):
    testing.perf_report(benchmark())(times).run(print_data=False, save_path=tmp_path)
    assert (tmp_path / "speeds.png").stat().st_size > 1000


REFUSED = [
    {"line_names": ["A"]},
    {"x_names": ["m", "n"], "x_vals": [(1, 2, 3)]},
    {"args": {"of": 1}},
    {"plot_name": "a/b"},
    {"x_names": []},
    {"x_vals": []},
    {"x_vals": 3},
    {"args": 3},
]


@pytest.mark.parametrize("options", REFUSED, ids=repr)
@refused
def test_a_benchmark_that_does_not_fit_is_refused(options):
    benchmark(**options)


@pytest.mark.parametrize("result", ["fast", (1.0, 2.0), {}], ids=repr)
@refused
def test_other_results_are_refused(result):
    run(lambda n, of: result)


@refused
def test_a_function_of_other_arguments_is_refused():
    run(lambda size: 1.0)


EFFECTS = {
    "testing.Benchmark.line_names": "test_lines_have_titles",
    "testing.Benchmark.plot_name": "test_the_table_is_saved",
    "testing.Benchmark.args": (
        "test_other_arguments_come_from_the_benchmark_and_from_run"
    ),
    **{
        f"testing.Benchmark.{name}": "test_a_plot_has_a_line_for_each_column"
        for name in ("xlabel", "ylabel", "x_log", "y_log")
    },
}

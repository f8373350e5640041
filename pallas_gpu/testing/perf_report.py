# SPDX-License-Identifier: Apache-2.0
"""`perf_report`: a function measured over sizes and variants: table, file, plot."""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pallas_gpu import errors, expect
from pallas_gpu.testing import calling
from pallas_gpu.testing.tuning.report import markdown


def _values(value: Any, what: str) -> tuple[Any, ...]:
    if expect.is_sequence(value) and len(value):
        return tuple(value)
    raise expect.wrong_type(
        what, "a list of values", "one or more values", value, "e.g. [1024, 2048]"
    )


def _named(value: Any, what: str) -> dict[str, Any]:
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return dict(value)
    raise expect.wrong_type(
        what, "a dict of arguments", "{'name': value}", value, "omit it for none"
    )


@expect.arguments(x_vals=_values, line_vals=_values, args=_named)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark:
    """What `perf_report` measures: sizes, variants, labels.

    Attributes:
      x_names: names of the arguments that vary along a line; all get the same value, or
        one each if `x_vals` has sequences.
      x_vals: their values, a row of the table each.
      line_arg: name of the argument that says which line.
      line_vals: its values, a column of the table each.
      line_names: titles of the lines; default: the values.
      plot_name: title of the table, and name of the files.
      args: other arguments, the same in all calls.
      xlabel: title of the horizontal axis; default: the names of the arguments.
      ylabel: what the function returns, with its unit.
      x_log: whether the horizontal axis is logarithmic.
      y_log: whether the vertical axis is logarithmic.

    Raises:
      ArgumentError: names and values that do not match each other.
    """

    x_names: Sequence[str]
    x_vals: Sequence[Any]
    line_arg: str
    line_vals: Sequence[Any]
    line_names: Sequence[str] | None = None
    plot_name: str = "benchmark"
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    xlabel: str = ""
    ylabel: str = "ms"
    x_log: bool = False
    y_log: bool = False

    def __post_init__(self):
        if not self.x_names or len(self.titles) != len(self.line_vals):
            raise errors.ArgumentError(
                "Benchmark: names and values do not match",
                expected=f"one or more x_names, and {len(self.line_vals)} line_names",
                got=f"{list(self.x_names)}, {list(self.titles)}",
                hint="omit line_names to use the values",
            )
        wrong = [x for x in self.x_vals if len(self._each(x)) != len(self.x_names)]
        if wrong:
            raise errors.ArgumentError(
                "Benchmark: x_vals and x_names do not match",
                expected=f"one value, or {len(self.x_names)}: {list(self.x_names)}",
                got=expect.shown(wrong[0]),
                hint="a value that is one alone is that of all names",
            )
        names = [*self.x_names, self.line_arg, *self.args]
        if len(set(names)) != len(names) or os.sep in self.plot_name:
            raise errors.ArgumentError(
                "Benchmark: invalid names",
                expected="different names of arguments, and a plot_name without /",
                got=f"{names}, plot_name={self.plot_name!r}",
                hint="an argument is in one of x_names, line_arg and args",
            )

    @property
    def titles(self) -> tuple[str, ...]:
        """The titles of the lines."""
        if self.line_names is not None:
            return tuple(self.line_names)
        return tuple(map(str, self.line_vals))

    def _each(self, x: Any) -> tuple[Any, ...]:
        return tuple(x) if expect.is_sequence(x) else (x,) * len(self.x_names)

    def arguments(self, x: Any, line: Any) -> dict[str, Any]:
        """Returns the arguments of one call."""
        varied = dict(zip(self.x_names, self._each(x), strict=True))
        return {**self.args, **varied, self.line_arg: line}


@dataclasses.dataclass(frozen=True)
class PerfTable:
    """The results of a `Benchmark`. `str()` returns a Markdown table.

    Attributes:
      benchmark: what was measured.
      rows: for each of its `x_vals` the results of the lines: (value, low, high).
    """

    benchmark: Benchmark
    rows: tuple[tuple[tuple[float, float, float], ...], ...]

    @property
    def columns(self) -> list[str]:
        """The titles of the columns."""
        return [*self.benchmark.x_names, *self.benchmark.titles]

    def records(self) -> list[dict[str, Any]]:
        """Returns a dict for each row, by the titles of the columns."""
        b = self.benchmark
        return [
            {
                **{name: b.arguments(x, None)[name] for name in b.x_names},
                **{t: v for t, (v, _, _) in zip(b.titles, row, strict=True)},
            }
            for x, row in zip(b.x_vals, self.rows, strict=True)
        ]

    def csv(self) -> str:
        """Returns the table as comma-separated values."""
        stream = io.StringIO()
        writer = csv.DictWriter(stream, self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.records())
        return stream.getvalue()

    def json(self) -> str:
        """Returns the table as JSON, with its title and unit."""
        b = self.benchmark
        record = {"title": b.plot_name, "unit": b.ylabel, "rows": self.records()}
        return json.dumps(record, indent=1, default=str) + "\n"

    def save(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Writes CSV, JSON and, if matplotlib is installed, a plot; returns the paths.

        Args:
          folder: where to write; it is made if it does not exist.

        Raises:
          OSError: the folder cannot be written to.
        """
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        written = []
        for suffix, text in (("csv", self.csv()), ("json", self.json())):
            written.append(place / f"{self.benchmark.plot_name}.{suffix}")
            written[-1].write_text(text, encoding="utf-8")
        if _pyplot() is not None:
            written.append(place / f"{self.benchmark.plot_name}.png")
            self.plot().savefig(written[-1])
        return written

    def plot(self) -> Any:
        """Returns a figure of matplotlib with a line for each column.

        Raises:
          UnsupportedError: matplotlib is not installed.
        """
        pyplot = _pyplot()
        if pyplot is None:
            raise errors.UnsupportedError(
                "a plot requires matplotlib, which is not installed",
                expected="matplotlib",
                got="no module of that name",
                hint="pip install 'pallas-gpu[tune]'",
            )
        b = self.benchmark
        figure, axes = pyplot.subplots()
        is_number = all(isinstance(x, (int, float)) for x in b.x_vals)
        xs = list(b.x_vals) if is_number else [str(x) for x in b.x_vals]
        for number, title in enumerate(b.titles):
            value, low, high = zip(*(row[number] for row in self.rows), strict=True)
            axes.plot(xs, value, marker="o", label=title)
            axes.fill_between(xs, low, high, alpha=0.15)
        axes.set(title=b.plot_name, ylabel=b.ylabel)
        axes.set_xlabel(b.xlabel or ", ".join(b.x_names))
        if b.x_log and is_number:
            axes.set_xscale("log")
        if b.y_log:
            axes.set_yscale("log")
        axes.legend()
        return figure

    def __str__(self) -> str:
        cells = [[_text(record[c]) for c in self.columns] for record in self.records()]
        title = f"{self.benchmark.plot_name}, {self.benchmark.ylabel}"
        return "\n".join([title, "", *markdown(self.columns, cells)])


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _pyplot() -> Any:
    try:
        from matplotlib import pyplot
    except ImportError:
        return None
    return pyplot


class PerfReport:
    """A function that `perf_report` has decorated: it is measured by `run`."""

    def __init__(
        self,
        function: Callable[..., Any],
        benchmarks: Sequence[Benchmark],
        is_single: bool,
    ):
        functools.update_wrapper(self, function)
        self._function = function
        self._benchmarks, self._is_single = tuple(benchmarks), is_single

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Calls the function itself."""
        return self._function(*args, **named)

    def run(
        self,
        *,
        print_data: bool = True,
        show_plots: bool = False,
        save_path: str | os.PathLike[str] | None = None,
        **args: Any,
    ) -> PerfTable | list[PerfTable]:
        """Measures all sizes and lines.

        Args:
          print_data: print the table.
          show_plots: open a window with the plot, which requires matplotlib.
          save_path: a folder for CSV, JSON and, if matplotlib is installed, a plot.
          **args: more arguments of the function.

        Returns:
          The table; a list of tables for a list of benchmarks.

        Raises:
          UnsupportedError: matplotlib is not installed, and a plot is asked for.
          ArgumentTypeError: the function returned something else than numbers.
        """
        tables = []
        for benchmark in self._benchmarks:
            rows = [
                tuple(
                    self._measured({**benchmark.arguments(x, line), **args})
                    for line in benchmark.line_vals
                )
                for x in benchmark.x_vals
            ]
            table = PerfTable(benchmark, tuple(rows))
            tables.append(table)
            if print_data:
                print(table)
            if save_path is not None:
                table.save(save_path)
            if show_plots:
                table.plot().show()
        return tables[0] if self._is_single else tables

    def _measured(self, arguments: dict[str, Any]) -> tuple[float, float, float]:
        found = calling.call("perf_report", self._function, **arguments)
        numbers = tuple(found) if expect.is_sequence(found) else (found,)
        numbers = tuple(math.nan if x is None else x for x in numbers)
        if len(numbers) == 1:
            numbers *= 3
        if len(numbers) != 3 or isinstance(found, Mapping):
            raise expect.wrong_type(
                "perf_report: what the function returned",
                "a number or three",
                "a number, (value, low, high), or None for what cannot be measured",
                found,
                "return do_bench(...), or with quantiles=(0.5, 0.2, 0.8)",
            )
        who = "perf_report: what the function returned"
        value, low, high = (expect.number(x, who) for x in numbers)
        return value, low, high


def _benchmarks(value: Any, what: str) -> Any:
    one = expect.instance(Benchmark, written="plgpu.testing.Benchmark(...)")
    if expect.is_sequence(value) and len(value):
        return [one(each, what) for each in value]
    return one(value, what)


@expect.arguments(benchmarks=_benchmarks)
def perf_report(
    benchmarks: Benchmark | Sequence[Benchmark],
) -> Callable[[Callable[..., Any]], PerfReport]:
    """Returns a decorator of functions that are measured over sizes and variants.

    Since: any GPU of JAX. Issued by: the host. The function gets the arguments that the
    benchmark names, and returns a time or a speed: a number, three numbers (value, low,
    high), or None for what cannot be measured. `run` calls it for each size and line.

    Args:
      benchmarks: a benchmark, or several.

    Returns:
      A decorator; the decorated function has the method `run(print_data=True,
      show_plots=False, save_path=None, **args)`, which returns a `PerfTable`.

    Raises:
      ArgumentTypeError: not benchmarks, or not a function.

    Example:
      >>> @plgpu.testing.perf_report(plgpu.testing.Benchmark(
      ...     x_names=["n"], x_vals=[1024, 2048], line_arg="of",
      ...     line_vals=["ours", "XLA"], ylabel="ms"))
      ... def products(n, of): ...
      >>> products.run(save_path="results")
    """
    is_single = isinstance(benchmarks, Benchmark)
    each = [benchmarks] if isinstance(benchmarks, Benchmark) else list(benchmarks)

    def decorate(function: Callable[..., Any]) -> PerfReport:
        checked = expect.function(function, "perf_report: the decorated object")
        return PerfReport(checked, each, is_single)

    return decorate

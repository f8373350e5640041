# SPDX-License-Identifier: Apache-2.0
"""autotune: what is tried, what is chosen, what is remembered, what is reported."""

from __future__ import annotations

import json
import sys
import time
import types
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import everywhere
from tests.support.fake_device import FakeDevice
from tests.support.refusal import refused

X = np.arange(1.0, 9.0, dtype=np.float32)
X2 = jax.ShapeDtypeStruct((64, 128), np.float32)


class Tuned:
    """A function that launches one kernel of a fake device, with chosen times.

    Attributes:
      device: the device.
      traces: the configurations that were traced, in order.
      function: the tuned function.
    """

    def __init__(self, folder: Path, times: dict[Any, Any], **options: Any):
        self.device = FakeDevice()
        self.traces: list[Any] = []
        self.times = times

        def double(x, *, config):
            self.traces.append(config)
            return self.compute(x, config)

        self.function = plgpu.autotune(
            **{
                "configs": list(times),
                "timer": self.device,
                "cache_dir": folder,
                "flush_l2": False,
                **options,
            }
        )(double)

    def compute(self, x, config):
        """2 x, in the time of the configuration; an exception is raised."""
        milliseconds = self.times[config]
        if isinstance(milliseconds, Exception):
            raise milliseconds

        def launch(value):
            return self.device.launch(str(config), milliseconds, value)[0]

        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(launch, like, x) * self.factor(config)

    def factor(self, config) -> float:
        return 2.0

    def again(self, folder: Path, **options: Any) -> Tuned:
        """The same function in another process, which knows what is on disk."""
        return type(self)(folder, self.times, **options)

    @property
    def measured(self) -> set[str]:
        return set(self.device.launched)

    def outcomes(self, x=X) -> dict[str, str]:
        (report,) = self.function.reports.values()
        return {row.config: row.outcome for row in report.rows}


def one_kernel(run):
    """A timer that finds every call alike."""
    run()
    return [("k", 1.0)]


class WrongAt(Tuned):
    """A function that one configuration computes wrongly."""

    wrong: Any = "b"

    def factor(self, config) -> float:
        return 3.0 if config == self.wrong else 2.0


def test_the_fastest_configuration_is_used(tmp_path):
    tuned = Tuned(tmp_path, {"a": 3.0, "b": 1.0, "c": 2.0})
    np.testing.assert_array_equal(tuned.function(X), 2 * X)
    assert tuned.function.best(X) == "b"
    (report,) = tuned.function.reports.values()
    assert (report.config, report.milliseconds) == ("'b'", 1.0)


def test_a_key_is_tuned_once(tmp_path):
    tuned = Tuned(tmp_path, {"a": 3.0, "b": 1.0})
    tuned.function(X)
    tuned.device.launched.clear()
    tuned.function(X + 1)
    assert tuned.device.launched == ["b"]
    tuned.function(X[:4])
    assert len(tuned.function.reports) == 2


def test_config_by_name_is_used_as_it_is(tmp_path):
    tuned = Tuned(tmp_path, {"a": 3.0, "b": 1.0})
    tuned.function(X, config="a")
    assert tuned.measured == {"a"}
    assert list(tmp_path.iterdir()) == []


def test_the_slow_ones_end_early(tmp_path):
    tuned = Tuned(tmp_path, {"a": 1.0, "b": 9.0, "c": 1.01})
    tuned.function(X)
    assert tuned.outcomes() == {"'a'": "measured", "'b'": "slower", "'c'": "measured"}
    count = tuned.device.launched.count
    assert count("b") < 8 < 40 <= count("a")


def test_the_time_is_a_budget(tmp_path):
    tuned = Tuned(tmp_path, {"a": 1.0, "b": 1.0}, seconds=0.4)
    slow = tuned.device.launch

    def launch(*args):
        time.sleep(0.02)
        return slow(*args)

    tuned.device.launch = launch
    start = time.monotonic()
    tuned.function(X)
    assert time.monotonic() - start < 3
    assert len(tuned.device.launched) < 80


def test_without_time_the_first_configuration_is_measured_once(tmp_path):
    tuned = Tuned(tmp_path, {"a": 2.0, "b": 1.0}, seconds=0)
    assert tuned.function.best(X) == "a"
    assert tuned.outcomes() == {"'a'": "measured", "'b'": "left out"}


def test_a_wrong_result_is_not_used_however_fast(tmp_path):
    tuned = WrongAt(tmp_path, {"a": 3.0, "b": 1.0})
    assert tuned.function.best(X) == "a"
    (report,) = tuned.function.reports.values()
    assert report.rows[1].outcome == "failed"
    assert "differs from the reference" in report.rows[1].reason


def test_a_reference_finds_the_first_configuration_wrong(tmp_path):
    tuned = WrongAt(tmp_path, {"b": 1.0, "a": 3.0}, reference=lambda x: 2 * x)
    assert tuned.function.best(X) == "a"


@pytest.mark.parametrize(
    ("best", "options"),
    [
        ("b", {"rtol": 0.6}),
        ("b", {"rtol": 0.1, "atol": 9.0}),
        ("a", {"rtol": 0.1, "atol": 6.0}),
        ("b", {"check": lambda x, y: True}),
        ("a", {"check": lambda x, y: bool((x == y).all())}),
    ],
)
def test_tolerances_or_a_check_of_the_users_say_what_is_wrong(tmp_path, best, options):
    tuned = WrongAt(tmp_path, {"a": 3.0, "b": 1.0}, **options)
    assert tuned.function.best(X) == best


def test_a_configuration_that_fails_is_left_out(tmp_path):
    bad = errors.ShapeError("tiles do not divide", expected="more", got="less")
    tuned = Tuned(tmp_path, {"a": bad, "b": 1.0, "c": 2.0})
    assert tuned.function.best(X) == "b"
    (report,) = tuned.function.reports.values()
    assert report.rows[0].reason == "ShapeError: tiles do not divide"


@refused
def test_when_all_fail_the_error_says_why_each_did(tmp_path):
    first = errors.ShapeError("tiles do not divide", expected="more", got="less")
    tuned = Tuned(tmp_path, {"a": first, "b": ValueError("no\nsecond line")})
    try:
        tuned.function(X)
    finally:
        assert list(tmp_path.glob("*.json")) == []


def test_a_result_is_read_from_disk(tmp_path):
    tuned = Tuned(tmp_path, {"a": 3.0, "b": 1.0})
    tuned.function(X)
    (file,) = tmp_path.glob("*.json")
    assert json.loads(file.read_text())["config"] == "'b'"
    again = tuned.again(tmp_path)
    assert again.function.best(X) == "b"
    assert again.measured == set()
    (report,) = again.function.reports.values()
    assert report.stored
    assert [row.milliseconds for row in report.rows] == [3.0, 1.0]


def test_tune_measures_anew(tmp_path):
    tuned = Tuned(tmp_path, {"a": 3.0, "b": 1.0})
    tuned.function(X)
    tuned.times.update(a=0.5)
    assert tuned.again(tmp_path).function.tune(X).config == "'a'"
    assert tuned.again(tmp_path).function.best(X) == "a"


def test_other_configurations_are_another_result(tmp_path):
    Tuned(tmp_path, {"a": 3.0, "b": 1.0}).function(X)
    more = Tuned(tmp_path, {"a": 3.0, "b": 1.0, "c": 0.5})
    assert more.function.best(X) == "c"


def test_a_kernel_that_has_changed_is_tuned_again(tmp_path):
    class Changed(Tuned):
        def factor(self, config):
            return 4.0 / 2.0 * jnp.sqrt(1.0)

    times = {"a": 3.0, "b": 1.0}
    Tuned(tmp_path, times).function(X)
    changed = Changed(tmp_path, {"a": 0.5, "b": 1.0})
    assert changed.function.best(X) == "a"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"format": 1}',
        '{"format": 99, "identity": {}}',
        "\0\xff",
    ],
)
def test_a_damaged_file_is_reported_set_aside_and_rebuilt(tmp_path, text):
    tuned = Tuned(tmp_path, {"a": 3.0, "b": 1.0})
    tuned.function(X)
    (file,) = tmp_path.glob("*.json")
    whole = json.loads(file.read_text())
    file.write_text(text, encoding="latin-1")
    again = tuned.again(tmp_path)
    with pytest.warns(errors.TuningWarning, match="is damaged"):
        assert again.function.best(X) == "b"
    (aside,) = tmp_path.glob("*.damaged-*")
    assert aside.read_text(encoding="latin-1") == text
    assert json.loads(file.read_text())["kernel"] == whole["kernel"]


def test_a_damaged_report_is_not_trusted(tmp_path):
    tuned = Tuned(tmp_path, {"a": 3.0, "b": 1.0})
    tuned.function(X)
    (file,) = tmp_path.glob("*.json")
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, "report": {"rows": 3}}))
    with pytest.warns(errors.TuningWarning, match="is damaged"):
        assert tuned.again(tmp_path).function.best(X) == "b"


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    tuned = Tuned(blocked / "inner", {"a": 3.0, "b": 1.0})
    with pytest.warns(errors.TuningWarning, match="not stored"):
        assert tuned.function.best(X) == "b"


def test_the_folder_is_that_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("PALLAS_GPU_TUNING_DIR", str(tmp_path / "named"))
    Tuned(tmp_path, {"a": 3.0, "b": 1.0}, cache_dir=None).function(X)
    assert len(list((tmp_path / "named").glob("*.json"))) == 1
    monkeypatch.delenv("PALLAS_GPU_TUNING_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    Tuned(tmp_path, {"a": 3.0, "b": 1.0}, cache_dir=None).function(X)
    assert len(list((tmp_path / "caches/pallas_gpu/tuning").glob("*.json"))) == 1


def test_under_jit_random_inputs_are_measured_while_tracing(tmp_path):
    tuned = Tuned(tmp_path, {"a": 3.0, "b": 1.0})
    y = jax.jit(lambda x: tuned.function(x) + 1)(X)
    np.testing.assert_array_equal(y, 2 * X + 1)
    assert tuned.function.best(X) == "b"
    assert len(tuned.function.reports) == 1


@pytest.mark.parametrize("transform", ["vmap", "scan", "grad"])
def test_under_other_transformations_too(tmp_path, transform):
    tuned = Tuned(tmp_path, {"a": 3.0, "b": 1.0})
    match transform:
        case "vmap":
            y = jax.vmap(lambda x: x * tuned.function(jnp.ones(4))[0])(X)
        case "scan":
            _, y = jax.lax.scan(lambda c, x: (c, tuned.function(x[None])[0]), 0, X)
        case "grad":
            f = lambda x: jnp.sum(x * jax.lax.stop_gradient(tuned.function(X)))  # noqa: E731
            y = jax.grad(f)(X)
    np.testing.assert_array_equal(y, 2 * X)


def test_inputs_of_the_users_are_used_under_jit(tmp_path):
    seen = []

    def inputs(x):
        seen.append((x.shape, x.dtype))
        return (jnp.full(x.shape, 7.0, x.dtype),), {}

    given = []
    tuned = Tuned(tmp_path, {"a": 3.0, "b": 1.0}, inputs=inputs)
    launch = tuned.device.launch

    def noting(name, milliseconds, x):
        given.append(np.array(x))
        return launch(name, milliseconds, x)

    tuned.device.launch = noting
    jax.jit(tuned.function)(X)
    assert seen == [((8,), jnp.float32)]
    assert all((x == 7).all() for x in given[:-1])


@pytest.mark.parametrize("made", [3, (X, X, X), ((X[:4],), {}), ((X,), 3)])
def test_inputs_that_do_not_fit_are_refused(tmp_path, made):
    tuned = Tuned(tmp_path, {"a": 3.0, "b": 1.0}, inputs=lambda x: made)
    with pytest.raises(errors.KernelError, match="inputs returned"):
        jax.jit(tuned.function)(X)


def test_a_key_of_names_leaves_the_other_arguments_out(tmp_path):
    device, times = FakeDevice(), {"a": 1.0}

    @plgpu.autotune(configs=list(times), key="n", timer=device, cache_dir=tmp_path)
    def f(x, n, scale=1.0, *, config):
        return x

    f(X, 3)
    f(X[:4], 3, scale=2.0)
    assert list(f.reports) == ["n=3"]


def test_a_key_can_be_a_function(tmp_path):
    tuned = Tuned(tmp_path, {"a": 1.0, "b": 2.0}, key=lambda x: x.shape[0] // 4)
    tuned.function(X)
    tuned.function(X[:5])
    tuned.function(X[:4])
    assert list(tuned.function.reports) == ["2", "1"]


def test_the_default_key_has_types_and_other_arguments(tmp_path):
    @plgpu.autotune(configs=["a"], timer=FakeDevice(), cache_dir=tmp_path)
    def f(tree, scale=1.0, *, config):
        return tree["x"]

    f({"x": X}, scale=2.0)
    (key,) = f.reports
    assert "float32[8]" in key
    assert "scale=2.0" in key


def test_the_configurations_can_depend_on_the_arguments(tmp_path):
    times = {n: float(n) for n in range(1, 9)}
    tuned = Tuned(tmp_path, times, configs=lambda x: [x.shape[0], x.shape[0] // 2])
    assert tuned.function.best(X) == 4
    assert tuned.function.best(X[:4]) == 2


def test_without_a_gpu_the_cost_model_chooses_and_that_is_said(tmp_path):
    tuned = Tuned(tmp_path, {"a": 3.0, "b": 1.0}, timer=None)
    with pytest.warns(errors.TuningWarning, match="no GPU to measure on"):
        tuned.function(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuned.function(X[:4])
    assert tuned.measured == {"a"}
    assert list(tmp_path.iterdir()) == []


def test_the_l2_is_flushed_on_request(tmp_path):
    # The flush is no kernel of the fake device: the results are the same.
    tuned = Tuned(tmp_path, {"a": 3.0, "b": 1.0}, flush_l2=True)
    assert tuned.function.best(X) == "b"


def test_only_the_best_by_the_cost_model_are_measured(tmp_path):
    def rows(x, *, config):
        def body(x_ref, o_ref):
            part = plgpu.ds(jax.lax.axis_index("i") * config, config)
            o_ref[part] = x_ref[part] + 1

        return everywhere.kernel(body, X2, grid={"i": 64 // config})()(x)

    options = {"timer": one_kernel, "flush_l2": False, "cache_dir": tmp_path}
    tune = plgpu.autotune(configs=[64, 1, 32], top=2, processes=0, **options)
    report = tune(rows).tune(np.ones((64, 128), np.float32))
    outcomes = {row.config: row.outcome for row in report.rows}
    assert sorted(outcomes.values()) == ["left out", "measured", "measured"]
    (out,) = [row for row in report.rows if row.outcome == "left out"]
    assert out.estimate == max(row.estimate for row in report.rows)


@pytest.mark.parametrize("shown", [True, False])
def test_the_progress_is_shown_if_tqdm_is_there(tmp_path, monkeypatch, shown):
    steps = []

    def bar(total, desc, leave):
        steps.append(desc)
        return mock.Mock()

    tqdm = types.SimpleNamespace(tqdm=bar)
    monkeypatch.setitem(sys.modules, "tqdm", tqdm)
    Tuned(tmp_path, {"a": 3.0, "b": 1.0}, progress=shown).function(X)
    assert steps == (["trace", "compile", "check", "measure"] if shown else [])


def test_without_tqdm_there_is_no_bar(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    tuned = Tuned(tmp_path, {"a": 3.0, "b": 1.0}, progress=True)
    assert tuned.function.best(X) == "b"


def test_one_configuration_needs_no_tuning(tmp_path):
    tuned = Tuned(tmp_path, {"a": 3.0})
    assert tuned.function.best(X) == "a"
    assert tuned.traces == []


@refused
def test_a_function_without_config_is_refused():
    plgpu.autotune(configs=[1])(lambda x: x)


@refused
def test_arguments_that_do_not_fit_are_refused(tmp_path):
    Tuned(tmp_path, {"a": 3.0, "b": 1.0}).function(X, X)


@pytest.mark.parametrize("configs", [[], "abc", 3], ids=repr)
@refused
def test_configs_are_a_list(configs):
    plgpu.autotune(configs=configs)


def test_a_report_is_a_table(tmp_path):
    tuned = WrongAt(tmp_path, {"a": 3.0, "b": 1.0, "c": 9.0})
    text = str(tuned.function.tune(X))
    assert "double(x=float32[8]) on" in text
    assert "| 3 |  | measured | 'a' |  |" in text
    assert "| 9 |  | slower | 'c' | 3.00 times the best after 2 rounds |" in text


def test_a_method_can_be_tuned(tmp_path):
    class Layer:
        @plgpu.autotune(configs=["a"], timer=FakeDevice(), cache_dir=tmp_path)
        def apply(self, x, *, config):
            return x

    np.testing.assert_array_equal(Layer().apply(X), X)


EFFECTS = {
    "autotune.processes": "tests/testing/test_tuning_processes.py::"
    "test_without_processes_nothing_is_compiled_offline",
    "autotune.key": "test_a_key_of_names_leaves_the_other_arguments_out",
    "autotune.reference": "test_a_reference_finds_the_first_configuration_wrong",
    **dict.fromkeys(
        ("autotune.rtol", "autotune.atol", "autotune.check"),
        "test_tolerances_or_a_check_of_the_users_say_what_is_wrong",
    ),
    "autotune.inputs": "test_inputs_of_the_users_are_used_under_jit",
    "autotune.seconds": "test_without_time_the_first_configuration_is_measured_once",
    "autotune.top": "test_only_the_best_by_the_cost_model_are_measured",
    "autotune.flush_l2": "test_the_l2_is_flushed_on_request",
    "autotune.cache_dir": "test_a_result_is_read_from_disk",
    "autotune.progress": "test_the_progress_is_shown_if_tqdm_is_there",
    "autotune.timer": "test_without_a_gpu_the_cost_model_chooses_and_that_is_said",
}

# SPDX-License-Identifier: Apache-2.0
"""A kernel is traced again when a Python value that its body captures has changed."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu.entry.caching import captured
from tests.support.entry_kernels import f32, make, numbers

FACTOR = 2.0
TABLE = [1.0, 2.0]
settings = types.SimpleNamespace(factor=2.0)
module = types.ModuleType("settings_of_the_test")
module.FACTOR = 2.0  # type: ignore[attr-defined]


class Config:
    factor = 2.0


def helper(x):
    return x * FACTOR


def by_global(x, o):
    o[...] = x[...] * FACTOR


def by_helper(x, o):
    o[...] = helper(x[...])


def by_nested_function(x, o):
    @plgpu.when(x[0, 0] < 1)
    def _():
        o[...] = x[...] * FACTOR


def by_list(x, o):
    o[...] = x[...] * TABLE[1]


def by_object(x, o):
    o[...] = x[...] * settings.factor


def by_module(x, o):
    o[...] = x[...] * module.FACTOR


def by_class(x, o):
    o[...] = x[...] * Config.factor


def change(monkeypatch, value):
    monkeypatch.setitem(globals(), "FACTOR", value)
    monkeypatch.setattr(sys.modules[__name__], "TABLE", [1.0, value])
    monkeypatch.setattr(settings, "factor", value)
    monkeypatch.setattr(module, "FACTOR", value)
    monkeypatch.setattr(Config, "factor", value)


def check(k, factor):
    np.testing.assert_array_equal(k(numbers()), numbers() * factor)


BODIES = [
    by_global, by_helper, by_nested_function, by_list, by_object, by_module, by_class
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_a_changed_global_is_seen_by_the_next_call(body, monkeypatch):
    kernels = make(body), plgpu.pallas_call(body, f32())
    for k in kernels:
        check(k, 2)
    change(monkeypatch, 3.0)
    for k in kernels:
        check(k, 3)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_what_a_key_was_read_from_holds_until_it_changes(body, monkeypatch):
    watched = captured.Watched()
    before = captured.captured((body,), watched)
    # A list changes in place: its elements are compared each time.
    assert watched.holds() == (body is not by_list)
    change(monkeypatch, 3.0)
    assert not watched.holds()
    assert captured.captured((body,)) != before


def test_a_name_that_is_bound_later_is_watched():
    def body(options, x, o):
        o[...] = x[...] * options.get("factor", later)

    options: dict[str, float] = {}
    kept = captured.Watched(), captured.Watched()
    captured.captured((functools.partial(body, options),), kept[0])
    later = 2.0
    assert not kept[0].holds()
    captured.captured((functools.partial(body, options),), kept[1])
    assert kept[1].holds()
    options["factor"] = 3.0
    assert not kept[1].holds()


def test_changed_variables_of_an_enclosing_function_are_seen():
    factor = 2.0
    start = 0

    def body(x, o):
        o[...] = x[...] * factor

    def index(i):
        return (start, 0)

    k = make(body)
    spec = plgpu.BlockSpec((32, 128), index)
    first = plgpu.pallas_call(body, f32(32, 128), grid=1, in_specs=[spec])
    check(k, 2)
    np.testing.assert_array_equal(first(numbers()), numbers()[:32] * 2)
    factor, start = 3.0, 1
    check(k, 3)
    np.testing.assert_array_equal(first(numbers()), numbers()[32:] * 3)


def test_partial_functions_methods_and_callable_objects_are_looked_into():
    @dataclasses.dataclass
    class Scaled:
        factor: float

        def __call__(self, x, o):
            o[...] = x[...] * self.factor

    scaled = Scaled(2.0)
    options = {"factor": 2.0}

    def body(options, x, o):
        o[...] = x[...] * options["factor"]

    kernels = make(scaled.__call__), make(functools.partial(body, options))
    for k in kernels:
        check(k, 2)
    scaled.factor = options["factor"] = 3.0
    for k in kernels:
        check(k, 3)


def test_a_body_is_traced_once_while_nothing_changes():
    traces = itertools.count()

    def body(x, o):
        next(traces)
        o[...] = helper(x[...]) * settings.factor * TABLE[0] * Config.factor

    k = make(body)
    for _ in range(3):
        k(numbers())
    assert next(traces) == 1


@pytest.mark.parametrize(("first", "second"), [(1, 1.0), (0.0, -0.0), (1, True)])
def test_equal_values_of_another_meaning_are_different(first, second):
    value, seen = first, []

    def body(o):
        note(value)
        o[...] = jnp.zeros((64, 128))

    def note(x, record=seen.append):
        record(repr(x))

    k = make(body)
    k()
    value = second
    k()
    assert seen == [repr(first), repr(second)]


def test_options_of_jax_are_part_of_what_is_kept():
    types_seen = []

    def note(x):
        types_seen.append(x.dtype)

    k = make(lambda x, o: note(jnp.arange(3)) or o.set(x[...]))
    k(numbers())
    with jax.enable_x64(True):
        k(numbers())
    assert [t.name for t in types_seen] == ["int32", "int64"]


SCALE_OF_WRAPPER = 1.0


def test_a_wrapper_is_looked_into_as_what_it_wraps(monkeypatch):
    def wrapped(x, o):
        o[...] = x[...]

    @functools.wraps(wrapped)
    def wrapper(x, o):
        o[...] = x[...] * SCALE_OF_WRAPPER

    kernel = make(wrapper)
    check(kernel, 1)
    monkeypatch.setitem(globals(), "SCALE_OF_WRAPPER", 3.0)
    check(kernel, 3)


def test_an_object_may_refer_to_its_own_methods():
    class Doubling:
        def __init__(self):
            self.step = self.body

        def body(self, x, o, again=True):
            if again:
                self.step(x, o, again=False)
            else:
                o[...] = x[...] * 2

    check(make(Doubling().body), 2)

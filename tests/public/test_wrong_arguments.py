# SPDX-License-Identifier: Apache-2.0
"""Every public callable with wrong arguments: it works, or one of our errors says why.

Each parameter in turn gets each wrong value, starting from a good call. The names are
found by walking the package: a new one needs a good call, in the table GOOD
of its test file or in tests/support/public_calls.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import warnings
from collections.abc import Callable
from typing import Any

import jax
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors, expect
from pallas_gpu.entry import scope
from tests.support import beside
from tests.support import public_calls as calls
from tests.support import public_names as names

CALLABLES = names.public_callables()
GOOD = calls.good()
INSIDE = sorted(n for n, good in GOOD.items() if good.inside)
TOP = sorted(n for n, good in GOOD.items() if not good.inside)
BLACKWELL = {n for n, good in GOOD.items() if good.blackwell}
# The files whose lines make the calls.
CALLERS = [__file__, calls.__file__, names.__file__]
CALLERS += [module.__file__ for module, _ in beside.declared("GOOD")]


class TracedEnough(Exception):  # noqa: N818 - it ends a trace, it is not an error
    """Ends the trace of a body."""


def leak(call: Callable[[], Any]) -> str | None:
    """What is wrong with how a call ends; None if it succeeds or raises our error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except errors.InternalError as error:
        return f"InternalError: {error}"
    except errors.PallasGpuError as error:
        if not any(os.path.basename(file) in str(error.where) for file in CALLERS):
            return f"no line of the caller: {error}"
    except TracedEnough:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def changed(good: calls.Good, name: str, parameter: str, value: Any, env: Any) -> Any:
    """A call with one argument replaced."""
    kind = names.parameters(CALLABLES[name])[parameter].kind
    if kind is kind.VAR_POSITIONAL:
        value = (value,)
    elif kind is kind.VAR_KEYWORD:
        value = {"extra": value}

    def call() -> None:
        arguments = {**good.arguments(env), parameter: value}
        good.then(names.call(CALLABLES[name], arguments), env)

    return call


def parameters_of(name: str) -> list[str]:
    return [p for p in names.parameters(CALLABLES[name]) if p != "self"]


def test_every_public_callable_has_a_good_call():
    assert set(CALLABLES) == set(GOOD)


def test_every_method_of_references_is_called():
    assert names.reference_methods() <= set(calls.METHODS)


def test_every_parameter_has_a_rule():
    without = [
        name
        for name, fn in CALLABLES.items()
        if parameters_of(name)
        and not hasattr(fn, "__expected__")
        # Memory spaces are callable objects.
        and not hasattr(type(fn).__call__, "__expected__")
    ]
    assert without == []


@pytest.mark.parametrize("name", TOP)
def test_the_good_call_is_good(name):
    good = GOOD[name]
    # These need the CUDA wheels, a GPU, or torch.
    if name not in ("offline.compile", "testing.kernel_times", "as_torch_kernel"):
        good.then(names.call(CALLABLES[name], good.arguments(None)), None)


def test_the_good_calls_inside_a_body_are_good():
    for name in INSIDE:
        if name == "emit_pipeline_warp_specialized":
            continue

        def body(env, name=name):
            good = GOOD[name]
            good.then(names.call(CALLABLES[name], good.arguments(env)), env)

        jax.eval_shape(kernel_for(name, body), calls.OUT)


def kernel_for(name: str, body):
    """A kernel in which a good call of the name is one."""
    return calls.kernel(body, blackwell=name in BLACKWELL)


@pytest.mark.parametrize("name", TOP)
def test_wrong_arguments_at_top_level(name):
    found = {}
    for parameter in parameters_of(name):
        for value in calls.plain():
            problem = leak(changed(GOOD[name], name, parameter, value, None))
            if problem is not None:
                found[parameter, expect.shown(value)] = problem
    assert found == {}


def wrong_calls(name: str, env: calls.Env):
    """Each wrong call of a name inside a body, with its label."""
    values = [*calls.plain(), *calls.traced(env)]
    if name in calls.METHODS:
        for parameter, call in calls.METHODS[name].items():
            for i, value in enumerate(values):
                yield (
                    (parameter, i, expect.shown(value)),
                    lambda c=call, v=value: c(env, v),
                )
        return
    for parameter in parameters_of(name):
        for i, value in enumerate(values):
            call = changed(GOOD[name], name, parameter, value, env)
            yield (parameter, i, expect.shown(value)), call


@pytest.mark.parametrize("name", [*INSIDE, *sorted(calls.METHODS)])
def test_wrong_arguments_inside_a_body(name):
    found = {}

    def body(env):
        for label, call in wrong_calls(name, env):
            # As the author's function, which gives errors their line.
            problem = leak(functools.partial(scope.call, name, call))
            if problem is not None:
                found[label] = problem
        raise TracedEnough

    with pytest.raises(TracedEnough):
        jax.eval_shape(kernel_for(name, body), calls.OUT)
    assert found == {}


def accepted_calls(name: str) -> list[tuple[int, object]]:
    """The wrong calls of a name that succeed, by their position and label."""
    accepted = []

    def body(env):
        for i, (label, call) in enumerate(wrong_calls(name, env)):
            with contextlib.suppress(errors.PallasGpuError):
                call()
                accepted.append((i, label))
        raise TracedEnough

    with pytest.raises(TracedEnough):
        jax.eval_shape(kernel_for(name, body), calls.OUT)
    return accepted


@pytest.mark.parametrize("name", [*INSIDE, *sorted(calls.METHODS)])
def test_what_a_body_accepts_lowers_or_is_refused_with_a_line(name):
    found = {}
    for i, label in accepted_calls(name):

        def body(env, i=i):
            _, call = next(itertools.islice(wrong_calls(name, env), i, None))
            call()

        kernel = kernel_for(name, body)
        target = "sm_100a" if name in BLACKWELL else "sm_90a"
        problem = leak(
            lambda k=kernel, t=target: plgpu.offline.lower(k, calls.OUT, target=t)
        )
        if problem is not None:
            found[label] = problem
    assert found == {}

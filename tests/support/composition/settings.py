# SPDX-License-Identifier: Apache-2.0
"""JAX's settings, values that change between calls, and errors of a run."""

from __future__ import annotations

import contextlib
import io

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.composition.row import VECTOR, Refused, Row, Way, X

FACTOR = 2.0


class StaleError(Exception):
    """A program saw an old value."""


def nans(way: Way) -> None:
    """A NaN in a result is found, and no other result is one."""
    with jax.debug_nans(True):
        way.check(way.make(), X, expected=2 * X)
        try:
            way.run(way.make(lambda x, o: o.set(jnp.log(x[...] - 1))), X)
        except FloatingPointError as error:
            assert "nan" in str(error)
            return
    raise AssertionError("not found")


def infinities(way: Way) -> None:
    with jax.debug_infs(True):
        try:
            way.run(way.make(lambda x, o: o.set(1 / x[...])), X)
        except FloatingPointError as error:
            assert "inf" in str(error)
            return
    raise AssertionError("not found")


def x64(way: Way) -> None:
    with jax.enable_x64(True):
        out = jax.ShapeDtypeStruct(X.shape, jnp.float64)

        def body(x, o):
            @plgpu.loop(0, 2)
            def _(i):
                rows = plgpu.ds(64 * i, 64)
                o[rows] = x[rows] * 2

        x = X.astype(np.float64) + 2.0**-40
        way.check(way.make(body, out), x, expected=2 * x)


def x64_between_calls(way: Way) -> None:
    k = way.make()
    way.check(k, X, expected=2 * X)
    with jax.enable_x64(True):
        way.check(k, X, expected=2 * X)


def checks(way: Way) -> None:
    with jax.enable_checks(True):
        way.check(way.make(), X, expected=2 * X)


def no_jit(way: Way) -> None:
    with jax.disable_jit():
        way.check(way.make(), X, expected=2 * X)


def a_global(way: Way) -> None:
    global FACTOR

    def body(x, o):
        o[...] = x[...] * FACTOR

    k = way.make(body)
    f = jax.jit(k) if way.jit else k
    try:
        np.testing.assert_array_equal(f(X), 2 * X)
        FACTOR = 3.0
        if not np.array_equal(f(X), 3 * X):
            raise StaleError("the program computes with the value of its first trace")
    finally:
        FACTOR = 2.0


def a_printed_line(way: Way) -> None:
    """A kernel prints, also where none of its results is used."""

    def body(x, o):
        plgpu.debug_print("x[1] = {:.0f}", x[1])
        o[...] = x[...] * 2

    k, printed = way.make(body), io.StringIO()
    with contextlib.redirect_stdout(printed):
        way.check(lambda x: (k(x), x + 1)[1], X, expected=X + 1)
        jax.effects_barrier()
    assert printed.getvalue() == "x[1] = 1\n"


def a_race(way: Way) -> None:
    ref = plgpu.BlockSpec(memory_space=plgpu.GMEM)

    def body(x, o):
        o[...] = x[...] + lax.axis_index("i").astype(jnp.float32)

    if way.entry == "kernel":
        k = plgpu.kernel(body, VECTOR, grid=(2,), grid_names=("i",))
    else:
        k = plgpu.pallas_call(
            lambda x, o: o.set(x[...] + plgpu.program_id(0).astype(jnp.float32)),
            VECTOR, grid=2, in_specs=[ref], out_specs=ref,
        )  # fmt: skip
    try:
        way.run(k, X)
    except errors.RaceError as error:
        assert "at: " in str(error)
        return
    raise AssertionError("not found")


ROWS = (
    Row("`jax_debug_nans` finds a NaN that a kernel stores", nans),
    Row("`jax_debug_infs`", infinities),
    Row("`jax_enable_x64`", x64),
    Row("`jax_enable_x64` changed between calls", x64_between_calls),
    Row("`jax_enable_checks`", checks),
    Row("`jax_disable_jit`", no_jit),
    Row(
        "a Python global that the body names, changed between calls",
        a_global,
        {
            "jit": Refused(
                StaleError,
                "the program computes with the value of its first trace",
                "`jax.jit` keeps its first trace and does not call the function again",
            )
        },
    ),
    Row("`debug_print` in a kernel whose results are not used", a_printed_line),
    Row(
        "`except plgpu.errors.RaceError`",
        a_race,
        {
            "jit": Refused(
                jax.errors.JaxRuntimeError,
                "RaceError: ",
                "JAX's runtime raises an error of its own for an exception in a "
                "callback; its text is the whole report, with the kernel's line",
            )
        },
    ),
)

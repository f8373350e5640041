# SPDX-License-Identifier: Apache-2.0
"""Printing from kernels: in the emulator, as emitted code, under both semantics."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.lockstep import kernels as in_lockstep
from tests.support.refusal import refused
from tests.support.semantics import BOTH

X = np.arange(128, dtype=np.float32)


def kernel(body, x=X, **options):
    return plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), **options
    )


def lines(capsys):
    return sorted(capsys.readouterr().out.splitlines())


def show(x_ref, o_ref):
    i = lax.axis_index("i")
    plgpu.debug_print("{{100%}} of {}: {}, {}", i, x_ref[3] / 2, x_ref[3] > i)
    o_ref[plgpu.ds(i * 64, 64)] = x_ref[plgpu.ds(i * 64, 64)]


EXPECTED = ["{100%} of 0: 1.5, 1", "{100%} of 1: 1.5, 1"]


def test_the_emulator_prints_one_line_for_each_warpgroup(capsys):
    kernel(show, grid=(2,), grid_names=("i",))(X)
    assert lines(capsys) == [line.replace("1.5, 1", "1.5, True") for line in EXPECTED]


@pytest.mark.parametrize("semantics", BOTH)
def test_the_emitted_code_prints_one_line_for_each_warpgroup(semantics, capsys):
    in_lockstep.run(kernel(show, grid=(2,), grid_names=("i",)), [X], semantics)
    assert lines(capsys) == EXPECTED


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("int8", -7),
        ("uint8", 249),
        ("int16", -300),
        ("uint32", 4_000_000_000),
        ("int32", -2_000_000_000),
        ("float16", 0.5),
        ("bfloat16", -2.5),
        ("bool", True),
    ],
)
def test_scalars_of_any_type_are_printed(dtype, value, capsys):
    def body(x_ref, o_ref):
        plgpu.debug_print("{}", x_ref[0])
        o_ref[...] = x_ref[...]

    x = np.full(16, value, jnp.dtype(dtype))
    kernel(body, x)(x)
    assert lines(capsys) == [str(value)]
    in_lockstep.run(kernel(body, x), [x])
    assert lines(capsys) == [str(int(value) if dtype == "bool" else value)]


def test_a_format_may_name_the_positions_of_the_values(capsys):
    def body(x_ref, o_ref):
        plgpu.debug_print("{{{1}}} {0} {1}", x_ref[2], x_ref[7])
        o_ref[...] = x_ref[...]

    kernel(body)(X)
    assert lines(capsys) == ["{7.0} 2.0 7.0"]
    in_lockstep.run(kernel(body), [X])
    assert lines(capsys) == ["{7} 2 7"]


def test_braces_without_a_value_are_refused():
    def body(x_ref, o_ref):
        plgpu.debug_print("{")

    with pytest.raises(errors.ArgumentError, match="does not match the values"):
        kernel(body)(X)


@pytest.mark.offline
def test_it_compiles_to_a_call_of_vprintf():
    (report,) = plgpu.offline.compile(kernel(show, grid=(2,), grid_names=("i",)), X)
    assert "vprintf" in report.ptx


@pytest.mark.parametrize(
    "fmt", ["{}", "{} {} {}", "{a} {}", "{:3} {}", "{!r} {}", "{", "{0}", "{0} {2}"]
)
def test_placeholders_that_do_not_match_the_values_are_refused(fmt):
    def body(x_ref, o_ref):
        plgpu.debug_print(fmt, x_ref[0], 1)  # HERE

    with refused(
        errors.ArgumentError, "debug_print: the format does not match the values"
    ):
        kernel(body)(X)


def test_an_array_is_refused():
    def body(x_ref, o_ref):
        plgpu.debug_print("{}", x_ref[...])  # HERE

    with refused(errors.ShapeError, "debug_print: a value is not a scalar"):
        kernel(body)(X)

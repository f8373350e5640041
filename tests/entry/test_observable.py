# SPDX-License-Identifier: Apache-2.0
"""Kernels that print or check are called although none of their results is used."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.entry_kernels import f32

X = np.arange(8, dtype=np.float32)


@plgpu.kernel(out_type=())
def shows(x):
    plgpu.debug_print("x = {:.0f}", x[0])


@plgpu.kernel(out_type=f32(8))
def doubles_and_shows(x, o):
    jax.debug.print("x = {}", x[0].astype(np.int32))
    o[...] = 2 * x[...]


@plgpu.kernel(out_type=f32(8))
def doubles(x, o):
    o[...] = 2 * x[...]


def unused(kernel):
    """A function of an array that calls a kernel and uses none of its results."""

    def f(x):
        kernel(x)
        return x + 1

    return f


def with_a_rule(kernel):
    f = jax.custom_vjp(unused(kernel))
    f.defvjp(lambda x: (unused(kernel)(x), None), lambda _, g: (unused(kernel)(g),))
    return f


def rows(kernel):
    """A function that scans over rows."""
    return lambda x: lax.scan(lambda c, row: (c, unused(kernel)(row)), 0, x)[1]


def chosen(kernel):
    """A function that calls a kernel if the first element is not zero."""
    return lambda x: lax.cond(x[0] != 0, unused(kernel), lambda x: x, x)


TWO_ROWS = np.stack([X + 1, X + 2])
# Programs by name: a function of a kernel, its argument, and what the kernel prints.
PROGRAMS = {
    "jit": (unused, X + 1, [1]),
    "vmap": (lambda k: jax.vmap(unused(k)), TWO_ROWS, [1, 2]),
    "scan": (rows, TWO_ROWS, [1, 2]),
    "vmap of scan": (lambda k: jax.vmap(rows(k)), TWO_ROWS[None], [1, 2]),
    "cond, taken": (chosen, X + 1, [1]),
    "cond, not taken": (chosen, X, []),
    "custom_vjp": (with_a_rule, X + 1, [1]),
    "grad of custom_vjp": (
        lambda k: jax.grad(lambda x: 3 * with_a_rule(k)(x).sum()),
        X + 1,
        [1, 3],
    ),
    "checkpoint": (lambda k: jax.checkpoint(unused(k)), X + 1, [1]),
}


@pytest.mark.parametrize("kernel", [shows, doubles_and_shows])
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_a_kernel_prints_appears(program, kernel, capfd):
    make, x, expected = PROGRAMS[program]
    jax.block_until_ready(jax.jit(make(kernel))(x))
    jax.effects_barrier()
    printed = sorted(capfd.readouterr().out.split())
    assert printed == sorted(f"x={n}" for n in expected) or printed == sorted(
        word for n in expected for word in ("x", "=", str(n))
    )


def exported(f, x):
    """The kernels in a function that is exported for CUDA."""
    text = jax.export.export(jax.jit(f), platforms=["cuda"])(x).mlir_module()
    return text.count("@mosaic_gpu_v2")


@pytest.mark.parametrize("kernel", [shows, doubles_and_shows])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_kernel_that_prints_stays_in_what_is_compiled(program, kernel):
    make, x, _ = PROGRAMS[program]
    assert exported(make(kernel), x)


def test_a_kernel_that_only_computes_is_dropped():
    assert not exported(unused(doubles), X)


def test_an_exported_kernel_is_marked_as_one_with_a_side_effect():
    export = jax.export.export(jax.jit(unused(shows)), platforms=["cuda"])(X)
    text = export.mlir_module()
    (call,) = (line for line in text.splitlines() if "@mosaic_gpu_v2" in line)
    assert "has_side_effect = true" in call
    again = jax.export.deserialize(export.serialize())
    assert len(again.unordered_effects) == 1


def test_a_check_that_fails_ends_a_program_that_uses_no_result():
    @plgpu.kernel(out_type=())
    def checks(x):
        plgpu.debug_check(x[0] > 0, "x[0] is not positive")

    f = jax.jit(unused(checks))
    jax.block_until_ready(f(X + 1))
    with pytest.raises(jax.errors.JaxRuntimeError, match="x\\[0\\] is not positive"):
        jax.block_until_ready(f(X))
        jax.effects_barrier()


def test_a_kernel_without_results_has_an_empty_derivative(capfd):
    f = lambda x: (shows(x), (x * x).sum())[1]  # noqa: E731
    np.testing.assert_array_equal(jax.jit(jax.grad(f))(X + 1), 2 * (X + 1))
    jax.effects_barrier()
    assert capfd.readouterr().out == "x = 1\n"


def test_a_derivative_is_refused_where_a_kernel_has_results():
    with pytest.raises(errors.DifferentiationError):
        jax.grad(lambda x: doubles_and_shows(x).sum())(X)


def test_the_effect_is_that_of_kernels_that_print_alone():
    x = jnp.asarray(X)
    assert jax.make_jaxpr(unused(shows))(x).effects
    assert not jax.make_jaxpr(unused(doubles))(x).effects

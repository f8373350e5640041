# SPDX-License-Identifier: Apache-2.0
"""when, loop, program_id, JAX's loops and branches: what they refuse."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.entry.integers import cdiv
from tests.support.entry_kernels import TILE, f32, make, numbers, run
from tests.support.refusal import refused, refused_by


def when(condition):
    return lambda x, o: plgpu.when(condition(x))(lambda: 1)  # HERE


MISTAKES = {
    "a result of a static when": when(lambda x: True),
    "a result of a dynamic when": when(lambda x: x[0, 0] == 0),
    "a result of a loop": lambda x, o: plgpu.loop(0, 4)(lambda i: i),  # HERE
    "a step of 0": lambda x, o: plgpu.loop(0, 4, step=0)(lambda i: None),  # HERE
    "a step of -1": lambda x, o: plgpu.loop(0, 4, step=-1)(lambda i: None),  # HERE
}


@pytest.mark.parametrize("body", MISTAKES.values(), ids=MISTAKES)
@refused
def test_loops_count_up_and_bodies_have_no_result(body):
    run(body)


@settings(max_examples=10)
@given(st.integers(-3, 8), st.integers(-3, 8), st.integers(1, 4), st.booleans())
def test_loop_visits_a_range(lower, upper, step, dynamic):
    def body(bounds, o):
        low, high = (bounds[0], bounds[1]) if dynamic else (lower, upper)

        @plgpu.loop(low, high, step=step, init_carry=jnp.float32(0))
        def total(i, carry):
            return carry + (i + 10).astype(jnp.float32) ** 2

        o[0] = total

    visited = [(i + 10) ** 2 for i in range(lower, upper, step)]
    result = make(body, out=f32(1))(np.array([lower, upper], np.int32))
    assert float(result[0]) == sum(visited)


@pytest.mark.parametrize("function", [plgpu.program_id, plgpu.num_programs])
@refused
def test_positions_are_those_of_a_kernel(function):
    function(0)  # HERE


@pytest.mark.parametrize("function", [plgpu.program_id, plgpu.num_programs])
@pytest.mark.parametrize("axis", [1, -1, "i"])
@refused_by(run, grid=(2,), grid_names=("i",))
def test_positions_are_those_of_a_grid_axis(x, o, *, function, axis):
    function(axis)  # HERE


def test_a_scan_that_only_carries_is_a_loop_in_either_direction():
    def body(x, o):
        total, _ = lax.scan(
            lambda c, _: (c * 2 + 1, None), jnp.float32(0), length=4, reverse=True
        )
        o[0] = total

    assert float(run(body, out=f32(1))[0]) == 15


@pytest.mark.parametrize("flow", ["fori", "while"])
@refused_by(run, scratch_types=[TILE, TILE])
def test_a_loop_carries_the_same_reference_all_the_way(x, o, a, b, *, flow):
    def swap(c):
        return (c[0] + 1, c[2], c[1])

    if flow == "fori":
        lax.fori_loop(0, 3, lambda _, c: swap(c), (0, a, b))
    else:
        lax.while_loop(lambda c: c[0] < 3, swap, (0, a, b))


def test_a_loop_reads_what_its_body_wrote():
    def body(x, o, tile):
        tile[...] = x[...]
        lax.fori_loop(0, 3, lambda i, _: tile.set(tile[...] + 1), None)
        o[...] = tile[...]

    np.testing.assert_array_equal(run(body, scratch_types=[TILE]), numbers() + 3)


@pytest.mark.parametrize(
    ("dtype", "a", "b", "expected"),
    [
        (jnp.uint32, 5, 2, 3),
        (jnp.uint32, 4, 2, 2),
        (jnp.uint8, 200, 4, 50),
        (jnp.int32, -(2**31), 4, -(2**29)),
        (jnp.int32, -7, 2, -3),
        (jnp.int32, 7, 2, 4),
    ],
)
def test_cdiv_rounds_up_for_every_type(dtype, a, b, expected):
    assert cdiv(a, b) == expected

    def body(x, o):
        o[0] = plgpu.cdiv(x[0], jnp.asarray(b, dtype))

    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((1,), dtype))
    assert kernel(np.array([a], dtype))[0] == expected


def test_sizes_are_rounded_up_under_strict_promotion():
    @plgpu.kernel(out_type=jax.ShapeDtypeStruct((2,), np.int32))
    def kernel(x, o):
        o[0] = plgpu.cdiv(x[0], 4)
        o[1] = plgpu.align_to(x[0], 4)

    with jax.numpy_dtype_promotion("strict"):
        assert kernel(np.array([9], np.int32)).tolist() == [3, 12]


def test_an_error_of_the_body_that_names_a_carry_is_the_bodys_own():
    def body(x, o):
        def step(i, carry):
            return carry

        @plgpu.loop(0, 4, init_carry=jnp.float32(0))
        def _(i, carry):
            return step(i)

    kernel = make(body, f32(128))
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        kernel(numbers(128))

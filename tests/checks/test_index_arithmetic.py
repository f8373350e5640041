# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of indices that wraps: an error of the trace, or of the emulator."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.program import indices
from pallas_gpu.program.build import region_of
from tests.support import everywhere
from tests.support.refusal import refused, refused_by
from tests.support.semantics import BOTH


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int8)


def nothing(x_ref, o_ref):  # HERE
    pass


BIG = ints(2**13, 2**20)  # 2**33 elements


def trace(body, shape=BIG, grid=(2**23,), names=("i",)):
    made = plgpu.kernel(body, out_type=shape, grid=grid, grid_names=names)
    return jax.eval_shape(made, shape)


# --- when a kernel is traced ----------------------------------------------------------


@refused_by(trace)
def test_a_flat_index_of_a_large_array_is_refused(x_ref, o_ref):
    start = lax.axis_index("i") * 1024  # HERE
    row, column = start // 2**20, start % 2**20
    o_ref[row, plgpu.ds(column, 1024)] = x_ref[row, plgpu.ds(column, 1024)]


@refused_by(trace, grid=(2**16, 2), names=("i", "j"))
def test_sums_over_several_axes_are_considered_together(x_ref, o_ref):
    i, j = lax.axis_index("i"), lax.axis_index("j")
    row = (i * 2**15 - j * -(2**15)) // 2**20  # HERE
    o_ref[row, 0:1024] = x_ref[row, 0:1024]


@refused
def test_blocks_beyond_what_indices_can_address_are_refused():
    spec, x = plgpu.BlockSpec((1024,), lambda i: (i,)), ints(2**30)
    specs = {"in_specs": [spec], "out_specs": spec}
    jax.eval_shape(plgpu.pallas_call(nothing, x, grid=(2**22,), **specs), x)


@refused
def test_the_counter_of_a_loop_is_a_position():
    def body(x_ref, o_ref):
        i = lax.axis_index("i")

        @plgpu.loop(0, 2**10)
        def _(step):
            flat = i * 2**21 + step * 2**11  # HERE
            o_ref[flat // 2**20, 0:1024] = jnp.zeros((1024,), jnp.int8)

    trace(body, grid=(2**10,))
    trace(body, grid=(2**10 + 1,))


def test_a_carry_that_starts_at_zero_need_not_count():
    def body(x_ref, o_ref):
        i = lax.axis_index("i")

        @plgpu.loop(0, 2**10, init_carry=jnp.int32(0))
        def _(step, slot):
            o_ref[(i + slot) * 2**21 // 2**20, 0:1024] = jnp.zeros((1024,), jnp.int8)
            return 1 - slot

    trace(body, grid=(2**10 - 1,))


@pytest.mark.parametrize("size", [2**33, 2**31 - 1])
@refused
def test_a_dimension_beyond_int32_is_refused_with_room_for_a_block(size):
    trace(nothing, ints(2**31 - 2**18))
    trace(nothing, ints(size))  # HERE


@pytest.mark.parametrize("semantics", BOTH)
def test_each_dimension_by_itself_fits(semantics):
    def body(x_ref, o_ref):
        i, j = lax.axis_index("i"), lax.axis_index("j")
        part = (i, plgpu.ds(j * 1024, 1024))
        o_ref[part] = x_ref[part]

    params = plgpu.CompilerParams(lowering_semantics=semantics)
    grid = {"i": 2**13, "j": 2**10}
    made = everywhere.kernel(body, BIG, grid=grid, compiler_params=params)(None)
    (report,) = plgpu.offline.lower(made, BIG)
    assert "i64" in report.mlir


def test_what_is_no_index_may_wrap():
    def body(x_ref, o_ref):
        i = lax.axis_index("i")
        noise = i * 1103515245 + 12345
        row = (noise >> 16) & 1023
        o_ref[row, 0:1024] = jnp.full((1024,), noise.astype(jnp.int8))

    trace(body)


def test_branches_may_exclude_what_would_wrap():
    def body(x_ref, o_ref):
        i = lax.axis_index("i")

        @plgpu.when(i < 1024)
        def _():
            o_ref[i * 1024 // 2**20, 0:1024] = jnp.zeros((1024,), jnp.int8)

    trace(body)


# --- in the emulator ------------------------------------------------------------------

X = np.arange(256, dtype=np.int32)


def run(body, x=X, **options):
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return plgpu.kernel(body, out_type=out, **options)(x)


@refused_by(run)
def test_a_wrapped_index_is_reported_where_it_is_computed(x_ref, o_ref):
    o_ref[...] = x_ref[...]
    flat = (x_ref[255] + 1) * 2**24  # HERE
    o_ref[flat // 2**24] = 0


@refused_by(run)
def test_an_index_that_a_loop_carries_is_watched(x_ref, o_ref):
    o_ref[...] = x_ref[...]

    @plgpu.loop(0, 4, init_carry=jnp.int32(1))
    def flat(i, carry):
        return carry * x_ref[255]  # HERE

    o_ref[flat // 2**25] = 0


@refused_by(run)
def test_an_index_of_a_nested_body_is_watched(x_ref, o_ref):
    o_ref[...] = x_ref[...]
    flat = x_ref[255] * 2**24  # HERE

    @plgpu.when(x_ref[3] > 0)
    def _():
        plgpu.loop(0, 2)(lambda i: o_ref.at[flat // 2**25 + i].set(0))


def test_arithmetic_that_is_no_index_wraps_in_the_emulator():
    def body(x_ref, o_ref):
        hashed = x_ref[255] * 2**24 + 77
        o_ref[...] = x_ref[...] + hashed
        o_ref[hashed & 15] = 0

    expected = X + np.int32((255 * 2**24 + 77) - 2**32)
    expected[(255 * 2**24 + 77) & 15] = 0
    np.testing.assert_array_equal(run(body), expected)


def test_an_index_at_the_end_of_int32_is_no_overflow():
    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        last = x_ref[127] * 2**24 + (2**24 - 1)
        o_ref[last // 2**24] = 0

    expected = X.copy()
    expected[127] = 0
    np.testing.assert_array_equal(run(body), expected)


def test_only_what_indices_depend_on_is_marked():
    def body(x_ref, o_ref):
        i = lax.axis_index("i")
        o_ref[i * 64 // 64] = x_ref[i] * 3

    region = region_of(_body_of(body))
    indices.mark(region)
    marked = [op.name for op in region.ops if any(map(indices.is_index, op.results))]
    assert [x for x in marked if x != "convert_element_type"] == [
        *("axis_index", "mul"),
        *("div", "sub", "select_n"),  # of the floor division
    ]


def _body_of(body):
    made = everywhere.kernel(body, X, grid={"i": 4})(None)
    (eqn,) = jax.make_jaxpr(made)(X).eqns
    return eqn.params["jaxpr"]

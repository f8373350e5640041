# SPDX-License-Identifier: Apache-2.0
"""Layouts that inference chooses for values, through every operation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.layouts import Layout
from pallas_gpu.layouts.registers.placement import place
from tests.support.inferred import SQUARE, array, infer

F16, F8 = jnp.float16, jnp.float8_e4m3fn
STRIDED = Layout.WG_STRIDED(SQUARE, 4)
IN_ROWS, WGMMA = place(STRIDED, SQUARE), place(Layout.WGMMA, SQUARE)
TILE, ACC = plgpu.SMEM(SQUARE, F16), plgpu.ACC(SQUARE)
TWO = [array(), array()]


def load(ref, layout):
    return plgpu.load(ref, layout=layout, optimized=False)


# --- without constraints --------------------------------------------------------------


def test_arrays_that_nothing_constrains_are_strided():
    def body(x, o):
        o[...] = jnp.exp(x[...])

    found = infer(body)
    assert found.layout("load") == found.layout("exp") == IN_ROWS
    assert found.operand("store") == IN_ROWS


@pytest.mark.parametrize(
    ("dtype", "vec_size"), [("float16", 4), ("float32", 4), ("float64", 2), ("int8", 4)]
)
def test_the_default_layout_depends_on_the_width_as_it_does_in_memory(dtype, vec_size):
    def body(x, o):
        o[...] = x[...]

    with jax.enable_x64(True):
        found = infer(body, [array(dtype=dtype)], array(dtype=dtype))
    assert found.layout("load") == place(Layout.WG_STRIDED(SQUARE, vec_size), SQUARE)


def test_splats_iotas_and_what_is_made_of_them_have_no_layout():
    def body(x, o):
        splat = jnp.full(SQUARE, x[0, 0])
        row = lax.broadcast_in_dim(lax.iota(jnp.float32, 64), SQUARE, (1,))
        made = lax.broadcasted_iota(jnp.float32, SQUARE, 1) + row
        reshaped = splat.reshape(4096).reshape(SQUARE)
        o[...] = made - splat * x[0, 1] - reshaped

    found = infer(body)
    for words in ("iota", "broadcast", "add", "mul", "reshape", "sub"):
        assert set(found.layouts(words)) == {None}
    assert found.operand("store") == IN_ROWS


def test_a_deferred_array_is_made_in_the_layout_that_its_user_wants():
    def body(x, o):
        o[...] = x[...] * jnp.full(SQUARE, x[0, 0])

    found = infer(body)
    assert found.operand("mul") == IN_ROWS
    assert found.layouts("broadcast") == [None]


def test_a_transposed_view_is_read_along_its_columns():
    def body(x, o, a, b):
        b[...] = plgpu.transpose_ref(a, (1, 0))[...]

    scratch = [plgpu.SMEM(SQUARE, jnp.float32)] * 2
    found = infer(body, [array()], array(), *scratch)
    assert found.layout("load") == place(Layout.WGMMA_TRANSPOSED, SQUARE)


def test_a_reduction_of_all_axes_gives_no_layout():
    def body(x, o):
        o[0, 0] = jnp.sum(x[...])

    found = infer(body)
    assert found.layouts("reduction") == []
    assert found.operand("reduction") == IN_ROWS


# --- the tensor core ------------------------------------------------------------------


def test_products_and_what_follows_them_lie_as_the_tensor_core_wants():
    def body(x, o, a, b, acc):
        plgpu.wgmma(acc, a, b)
        o[...] = jnp.exp(acc[...])

    found = infer(body, [array()], array(), TILE, TILE, ACC)
    assert found.layout("load") == found.layout("exp") == WGMMA
    assert found.operand("store") == WGMMA


def test_a_softmax_of_a_product_needs_no_relayout():
    def body(x, o, a, b, acc, out):
        plgpu.wgmma(acc, a, b)
        s = acc[...]
        weights = jnp.exp(s - jnp.max(s, axis=1, keepdims=True))
        plgpu.wgmma(out, weights.astype(F16), b)
        o[...] = out[...]

    scratch = [plgpu.SMEM((128, 64), F16), TILE, *[plgpu.ACC((128, 64))] * 2]
    found = infer(body, [array()], array(128, 64), *scratch)
    assert found.moves == []
    assert found.layout("reduction") == place(Layout.WGMMA_ROW, (128,))


@pytest.mark.parametrize(
    ("dtype", "layout"), [(F16, Layout.WGMMA), (F8, Layout.WGMMA_8BIT)]
)
def test_a_left_operand_in_registers_lies_as_its_width_asks(dtype, layout):
    def body(x, o, b, acc):
        plgpu.wgmma(acc, -x[...], b.T)
        o[...] = acc[...]

    found = infer(body, [array(dtype=dtype)], array(), plgpu.SMEM(SQUARE, dtype), ACC)
    assert found.operand("wgmma") == found.layout("neg") == place(layout, SQUARE)


def test_an_array_for_two_products_of_different_layouts_moves_once():
    def body(x, o, b, narrow_b, acc):
        value = x[...]
        plgpu.wgmma(acc, -value, b)
        plgpu.wgmma(acc, -value.astype(F8), narrow_b.T)
        o[...] = acc[...]

    scratch = [TILE, plgpu.SMEM(SQUARE, F8), ACC]
    assert len(infer(body, [array(dtype=F16)], array(), *scratch).moves) == 1


def test_accumulators_and_parts_of_them_are_read_as_they_are():
    def body(x, o, a, b, acc):
        plgpu.wgmma(acc.at[:, 64:], a, b)
        o[...] = layout_cast(acc[:, 64:], STRIDED) + layout_cast(acc[:, :64], STRIDED)

    layout_cast = plgpu.layout_cast
    found = infer(body, [array()], array(), TILE, TILE, plgpu.ACC((64, 128)))
    assert found.layouts("load") == [WGMMA] * 2
    assert found.moves == ["layout_cast"] * 2


# --- the author's wishes --------------------------------------------------------------


@pytest.mark.parametrize("layout", [Layout.WGMMA, Layout.WGMMA_TRANSPOSED, STRIDED])
def test_a_layout_cast_is_obeyed(layout):
    def body(x, o, p):
        o[...] = plgpu.layout_cast(x[...], layout)
        p[...] = plgpu.layout_cast(jnp.full(SQUARE, x[0, 0]), layout)

    found = infer(body, [array()], TWO)
    wanted = place(layout, SQUARE)
    assert found.layouts("layout_cast") == [wanted] * 2
    assert found.operand("layout_cast") == wanted


def test_two_casts_meet_in_one_relayout():
    def body(x, o):
        y = jnp.log(jnp.exp(load(x, Layout.WGMMA)))
        o[...] = plgpu.layout_cast(y, STRIDED)

    assert len(infer(body).moves) == 1


def test_of_two_operands_the_result_moves_not_both():
    def body(x, y, o):
        total = load(x, STRIDED) + load(y, STRIDED)
        o[...] = plgpu.layout_cast(total, Layout.WGMMA)

    assert infer(body, TWO).moves == ["layout_cast"]


def test_an_array_moves_while_it_is_narrow():
    def body(x, o):
        wide = load(x, STRIDED).astype(jnp.float32)
        o[...] = plgpu.layout_cast(wide, Layout.WGMMA)

    assert infer(body, [array(dtype=F16)]).moves == ["convert_element_type"]


# --- shapes ---------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "dims"), [((64,), (1,)), ((1, 64), (0, 1))])
def test_a_broadcast_wants_its_operand_where_the_result_lies(shape, dims):
    def body(row, x, o):
        repeated = lax.broadcast_in_dim(row[...], SQUARE, dims)
        o[...] = load(x, Layout.WGMMA) + repeated

    found = infer(body, [array(*shape), array()])
    column = place(Layout.WGMMA_COL, (64,))
    assert found.layout("add") == WGMMA
    # Of row and x, whichever is loaded first.
    wanted = column if len(shape) == 1 else column.insert_axes(0)
    assert wanted in found.layouts("load")
    assert found.moves == []


def test_layouts_pass_reshapes_transposes_and_slices():
    def body(x, o):
        stacked = load(x, Layout.WGMMA).reshape(2, 64, 64)
        part = lax.slice(stacked, (1, 0, 0), (2, 64, 64)).reshape(SQUARE)
        o[...] = part.T

    found = infer(body, [array(128, 64)])
    assert found.moves == []
    assert found.layout("reshape", 1) == WGMMA
    assert found.layout("transpose") == WGMMA.transpose([1, 0])


def test_layouts_travel_against_the_flow_of_values():
    def body(x, o):
        half = lax.slice(x[...], (0, 64), (64, 128))
        y = half.reshape(1, 64, 64).reshape(SQUARE)
        o[...] = plgpu.layout_cast(y, Layout.WGMMA)

    found = infer(body, [array(64, 128)])
    assert found.layout("slice") == WGMMA
    assert found.layout("load") == place(Layout.WGMMA, (64, 128))


def test_a_slice_inside_of_a_tile_moves_its_operand_first():
    def body(x, o, a, b, acc):
        plgpu.wgmma(acc, a, b)
        o[...] = acc[...][:32]

    assert "slice" in infer(body, [array()], array(32, 64), TILE, TILE, ACC).moves


def test_arrays_of_rank_three_keep_untiled_leading_axes():
    def body(x, o):
        o[...] = jnp.sum(load(x, Layout.WGMMA), axis=0)

    found = infer(body, [array(3, 64, 64)])
    assert found.layout("load") == place(Layout.WGMMA, (3, 64, 64))
    assert found.layout("reduction") == WGMMA


def test_a_strided_array_without_linear_form_passes_elementwise_work():
    def body(x, o):
        o[...] = jnp.exp(x[...]).reshape(1920)

    found = infer(body, [array(48, 40)], array(1920))
    assert found.moves == []
    assert found.layout("exp") == place(Layout.WG_STRIDED((48, 40), 1), (48, 40))


def test_an_odd_shape_is_spread_over_the_threads():
    def body(x, o):
        o[...] = jnp.exp(x[...])

    found = infer(body, [array(4, 3)], array(4, 3))
    assert found.layout("load") is not None
    assert found.moves == []


def test_a_reduction_that_would_cross_warps_stays_inside_of_one():
    def body(x, o):
        o[...] = jnp.sum(x[...], axis=1)

    found = infer(body, [array(16, 512)], array(16), scratch_bytes=0)
    layout = found.layout("load")
    assert not any(column[1] for column in layout.thread_columns[5:])


@pytest.mark.parametrize("chosen", [8192, 2048])
def test_a_relayout_takes_rounds_only_where_there_is_no_more_scratch(chosen):
    def body(x, o):
        o[...] = plgpu.layout_cast(load(x, Layout.WGMMA), Layout.WG_STRIDED(shape, 4))

    shape = (64, 24)  # 6144 bytes
    found = infer(body, [array(*shape)], array(*shape), scratch_bytes=chosen)
    assert found.assignment.scratch_bytes == chosen


# --- loops and branches ---------------------------------------------------------------


def test_a_carry_has_one_layout_and_takes_a_splat_as_it_is():
    def body(x, o):
        def step(_, y):
            return y + load(x, Layout.WGMMA)

        o[...] = lax.fori_loop(0, 16, step, jnp.zeros(SQUARE))

    found = infer(body)
    assert found.layout("loop") == WGMMA
    assert found.taken("loop") == [WGMMA] * 2  # before the loop, and of each step
    assert found.layouts("broadcast") == [None]
    assert found.moves == []


def repeated(trips, ref, step, init):
    """A loop; None is a number of trips that nobody knows."""
    return lax.fori_loop(
        0, ref[0, 0].astype(int) if trips is None else trips, step, init
    )


@pytest.mark.parametrize(("trips", "words"), [(8, "loop"), (None, "while loop")])
def test_a_carry_is_converted_before_the_loop_not_inside(trips, words):
    def body(x, o):
        def step(_, value):
            return plgpu.layout_cast(jnp.exp(value), Layout.WGMMA)

        y = repeated(trips, x, step, load(x, STRIDED))
        o[...] = plgpu.layout_cast(y, STRIDED)

    found = infer(body)
    assert found.moves == [words, "layout_cast"]
    assert found.layout(words) == WGMMA
    assert found.taken(words) == [WGMMA] * 2


def test_what_follows_a_loop_weighs_no_more_than_what_precedes_it():
    def body(x, o):
        o[...] = lax.fori_loop(0, 4, lambda _, y: jnp.exp(y), x[...])

    first, *inside, last = infer(body).network.variables
    assert first.weight == last.weight == 1
    assert 4 in [variable.weight for variable in inside]


def test_a_loop_that_runs_once_weighs_no_more_than_what_is_around_it():
    """Two relayouts around the loop lose against one inside, which runs once."""

    def body(x, y, o, p):
        def step(_, carry):
            v, w = carry
            return jnp.exp(v), w + -v

        init = load(x, STRIDED), load(y, Layout.WGMMA)
        # A number of trips that is one, of a loop that is not unrolled.
        v, w = lax.fori_loop(0, 1, step, init, unroll=False)
        o[...] = plgpu.layout_cast(v, STRIDED)
        p[...] = plgpu.layout_cast(w, Layout.WGMMA)

    (moved,) = infer(body, TWO, TWO).moves
    assert moved in ("neg", "add", "exp")


def test_a_value_from_outside_moves_outside_of_the_loop_if_it_is_carried():
    def body(x, y, o):
        outer = jnp.exp(load(x, STRIDED))

        def step(_, v):
            return plgpu.layout_cast(v + outer, Layout.WGMMA)

        o[...] = lax.fori_loop(0, 16, step, load(y, Layout.WGMMA))

    found = infer(body, TWO)
    assert found.layout("exp") == WGMMA
    assert found.moves == ["exp"]


def test_both_sides_of_a_branch_give_one_layout():
    def body(x, o):
        value = load(x, Layout.WGMMA)
        splat = jnp.zeros(SQUARE)
        y = lax.cond(x[0, 0] > 0, lambda: jnp.exp(value), lambda: splat)
        o[...] = plgpu.layout_cast(y, Layout.WGMMA)

    found = infer(body)
    assert found.layout("branch") == WGMMA
    assert found.taken("branch") == [WGMMA] * 2
    assert found.moves == []

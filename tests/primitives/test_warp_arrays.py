# SPDX-License-Identifier: Apache-2.0
"""Arrays of a single warp: each of the four warps computes on one of its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.entry_kernels import numbers
from tests.support.refusal import refused_by

F32 = jnp.float32
TABLE = np.arange(128, dtype=np.int32)


def by_each_warp(function, x, *, tolerance=0.0, in_smem=False):
    """Each warp applies a function to its part of `x`, as JAX does."""
    expected = np.stack([np.asarray(function(jnp.asarray(part))) for part in x])

    def in_gmem(x_ref, o):
        @plgpu.warp_map
        def _(warp_id):
            o[warp_id] = function(x_ref[warp_id])

    def by_smem(x_ref, o, tile, result):
        @plgpu.warp_map
        def _(warp_id):
            tile[warp_id] = x_ref[warp_id]
            result[warp_id] = function(tile[warp_id])
            o[warp_id] = result[warp_id]

    if not in_smem:
        everywhere.run(in_gmem, [x], expected, atol=tolerance, rtol=tolerance)
        return
    scratch = [plgpu.SMEM(a.shape, a.dtype) for a in (x, expected)]
    everywhere.run(
        by_smem, [x], expected, atol=tolerance, rtol=tolerance, scratch_types=scratch
    )


def ints(*shape):
    return numbers(*shape, dtype=np.int32) % 97


# --- what a warp computes -------------------------------------------------------------

FUNCTIONS = {
    "whole vectors": ((256,), lambda x: x * 2 + 1),
    "an odd shape": ((7, 13), lambda x: x * 2 + 1),
    "fewer than lanes": ((3,), lambda x: x - 1),
    "one element": ((1, 1), lambda x: x - 1),
    "48 columns": ((2, 48), lambda x: x * x),
    "select": ((3, 40), lambda x: jnp.where(x > 40, x, -x)),
    "iota": ((8, 40), lambda x: x + lax.broadcasted_iota(jnp.int32, x.shape, 1)),
    "arange": ((40,), lambda x: jnp.arange(40) - x),
    "a table of a function": ((2, 128), jax.jit(lambda x: x * jnp.asarray(TABLE))),
    "random numbers": (
        (40,),
        lambda x: x + jax.random.randint(jax.random.key(3), (40,), 0, 97),
    ),
    # Reductions
    "all": ((8, 64), lambda x: x.sum()[None]),
    "rows": ((8, 64), lambda x: x.max(1)),
    "columns": ((8, 64), lambda x: x.min(0)),
    "odd rows": ((5, 77), lambda x: x.sum(1)),
    "odd columns": ((5, 77), lambda x: x.max(0)),
    "position": ((8, 24), lambda x: jnp.argmax(x, axis=1)),
    "any": ((8, 24), lambda x: (x > 90).any(1).astype(jnp.int32)),
    "prefix": ((64,), jnp.cumsum),
    "prefix of odd rows": ((5, 24), lambda x: jnp.cumsum(x, axis=1)),
    # Moves between lanes
    "transpose": ((16, 32), lambda x: x.T),
    "odd transpose": ((5, 9), lambda x: x.T),
    "reshape": ((16, 32), lambda x: x.reshape(64, 8)),
    "odd reshape": ((7, 15), lambda x: x.reshape(21, 5)),
    "slice": ((7, 32), lambda x: x[2:5, 3:20]),
    "join": ((3, 32), lambda x: jnp.concatenate([x, x + 1])),
    "reversal": ((3, 32), lambda x: jnp.flip(x, 1)),
    "padding": ((5, 8), lambda x: jnp.pad(x, ((1, 2), (0, 3)))),
    "outer product": ((24,), lambda x: x[:, None] * x[None, :]),
    "dynamic slice": ((64,), lambda x: lax.dynamic_slice(x, (x[0] % 30,), (16,))),
    # Positions that are values
    "sort": ((64,), jnp.sort),
    "gather": ((64,), lambda x: x[(x + 3) % 64]),
    "updates": ((64,), lambda x: jnp.zeros(64, jnp.int32).at[x % 16].add(x)),
    # Loops and branches
    "for": ((50,), lambda x: lax.fori_loop(0, 5, lambda i, c: c * 2 + x, x)),
    "while": (
        (50,),
        lambda x: lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (jnp.int32(0), x)
        )[1],
    ),
    "cond": ((50,), lambda x: lax.cond(x[0] > 40, lambda y: y + 1, lambda y: -y, x)),
    "trips of each warp": (
        (50,),
        lambda x: lax.fori_loop(0, x[0] % 4, lambda i, c: c + x, x),
    ),
    "scan": (
        (50,),
        lambda x: lax.scan(lambda c, y: (c + y, c * y), jnp.int32(0), x)[1],
    ),
}
IN_SMEM = list(FUNCTIONS)[:8]


@pytest.mark.parametrize(
    ("name", "in_smem"),
    [(name, False) for name in FUNCTIONS] + [(name, True) for name in IN_SMEM],
)
def test_functions_of_arrays(name, in_smem):
    shape, function = FUNCTIONS[name]
    by_each_warp(function, ints(4, *shape), in_smem=in_smem)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.int8, jnp.float32])
def test_types_of_elements(dtype):
    x = (ints(4, 6, 40) % 16).astype(dtype)
    by_each_warp(lambda x: (x + x).T, x, in_smem=True)


def test_a_softmax_of_rows():
    def softmax(x):
        e = jnp.exp(x - x.max(1, keepdims=True))
        return e / e.sum(1, keepdims=True)

    by_each_warp(softmax, numbers(4, 6, 48) % 7, tolerance=1e-5)


@everywhere.gives(
    [ints(6, 40)], lambda x: np.stack([x.sum(0, dtype=np.int32), x[0, ::-1]])
)
def test_warps_take_different_branches(x, o):
    @plgpu.warp_map
    def _(warp_id):
        @plgpu.when(warp_id == 1)
        def _():
            o[0] = jnp.broadcast_to(x[...].sum(0), (40,))

        @plgpu.when(warp_id == 3)
        def _():
            o[1] = jnp.flip(x[0], 0)


@everywhere.gives(
    [ints(8, 9, 21)],
    lambda x: np.concatenate([x, np.flip(x[:2], 2)]).transpose(0, 2, 1),
    threads={"wg": 2},
)
def test_the_warps_of_all_warpgroups_have_scratch_of_their_own(x, o):
    """A transpose by way of scratch, at the same time in eight warps."""

    first = 4 * lax.axis_index("wg")

    @plgpu.warp_map
    def _(warp_id):
        o[first + warp_id] = x[first + warp_id].T

    i = lax.axis_index("wg")
    o[8 + i] = jnp.flip(x[i], 1).T


@everywhere.gives(
    [(ints(64, 64) % 32).astype(np.float16)],
    lambda x: np.concatenate([x * 2, x[::16] + x[:, 5]]),
    plgpu.SMEM(
        (64, 64),
        jnp.float16,
        transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)),
    ),
    plgpu.Barrier(),
)
def test_a_warp_loads_tiled_smem(x, o, tile, full):
    plgpu.copy_gmem_to_smem(x, tile, full)
    plgpu.barrier_wait(full)

    @plgpu.warp_map
    def _(warp_id):
        rows = plgpu.ds(16 * warp_id, 16)
        o[rows] = tile[rows] * 2
        column = plgpu.load(tile.at[:, 5], optimized=False)
        o[64 + warp_id] = tile[16 * warp_id] + column


def test_a_layout_that_each_warp_has_as_a_whole():
    """The rows of a matrix over the lanes, four columns in a register."""
    of_warp = plgpu.TiledLayout(
        plgpu.Tiling(((32, 4),)),
        warp_dims=(plgpu.Replicated(4),),
        lane_dims=(-2,),
        vector_dim=-1,
    )

    def function(x):
        return plgpu.layout_cast(plgpu.layout_cast(x, of_warp) + 1, of_warp).sum(1)

    def body(x, o):
        @plgpu.warp_map
        def _(warp_id):
            loaded = plgpu.load(x.at[warp_id], layout=of_warp, optimized=False)
            o[warp_id] = plgpu.layout_cast(loaded + 1, of_warp).sum(1)

    x = ints(4, 32, 8)
    everywhere.run(body, [x], (x + 1).sum(2, dtype=np.int32))


def test_masks_indices_and_atomic_operations_of_a_warp():
    def body(x, o, counts):
        o[...] = jnp.zeros((5, 16), jnp.int32)
        counts[...] = jnp.zeros(16, jnp.int32)

        @plgpu.warp_map
        def _(warp_id):
            plgpu.atomic_add(counts.at[x[warp_id] % 16], jnp.ones(40, jnp.int32))
            picked = x[warp_id, (jnp.arange(40) + warp_id) % 40]
            plgpu.store(o.at[1 + warp_id], ..., picked[:16], mask=jnp.arange(16) < 9)

        o[0] = counts[...]

    x = ints(4, 40)
    expected = np.zeros((5, 16), np.int32)
    expected[0] = np.bincount(x.reshape(-1) % 16, minlength=16)
    for warp in range(4):
        expected[1 + warp, :9] = np.roll(x[warp], -warp)[:9]

    scratch = [plgpu.SMEM((16,), jnp.int32)]
    everywhere.run(body, [x], expected, scratch_types=scratch)


@everywhere.gives(
    [ints(1)],
    np.tile(np.arange(24, dtype=np.int32), (4, 1)),
    plgpu.SMEM((4,), jnp.int32),
)
def test_what_an_atomic_operation_of_a_warp_returns(x, o, counts):
    """Each warp has a counter: the old values of one warp are a permutation."""

    counts[...] = jnp.zeros(4, jnp.int32)

    @plgpu.warp_map
    def _(warp_id):
        index = jnp.full((24,), warp_id, jnp.int32)
        old = plgpu.atomic_add(counts.at[index], jnp.ones(24, jnp.int32))
        o[warp_id] = jnp.sort(old)


# --- arrays from outside --------------------------------------------------------------


def test_each_warp_takes_rows_of_an_array_of_the_warpgroup():
    x = ints(8, 64)

    def body(x_ref, o):
        doubled, other = 2 * x_ref[...], x_ref[...] - 1

        @plgpu.warp_map
        def _(warp_id):
            rows = lax.dynamic_slice_in_dim(doubled, 2 * warp_id, 2)
            o[plgpu.ds(2 * warp_id, 2)] = rows + other[warp_id] + other[7, 32:33]

    rows = np.repeat(x[:4] - 1, 2, axis=0)
    everywhere.run(body, [x], (2 * x + rows + x[7, 32] - 1).astype(np.int32))


@everywhere.gives([ints(4, 64)], lambda x: x[[0, 2, 3, 3]] + 1)
def test_a_start_beyond_the_array_is_clamped_as_in_jax(x_ref, o):
    values = x_ref[...] + 1

    @plgpu.warp_map
    def _(warp_id):
        o[warp_id] = lax.dynamic_slice_in_dim(values, 2 * warp_id, 1)[0]


def test_warps_use_a_whole_array_in_branches_and_loops():
    x = ints(4, 64)

    def body(x_ref, o):
        sums, weight = jnp.sum(x_ref[...], axis=0), x_ref[1, 2]

        @plgpu.warp_map
        def _(warp_id):
            @plgpu.when(warp_id != 2)
            def _():
                o[warp_id] = sums * weight

            @plgpu.when(warp_id == 2)
            def _():
                o[2] = lax.fori_loop(0, 3, lambda i, a: a + sums, sums)

    sums = x.sum(0, dtype=np.int32)
    expected = np.stack([sums * x[1, 2]] * 4)
    expected[2] = 4 * sums
    everywhere.run(body, [x], expected)


@everywhere.gives([ints(4, 4)], ints(4, 4) + np.arange(1, 5, dtype=np.int32))
def test_a_literal_is_an_array_from_outside(x, o):
    @plgpu.warp_map
    def _(warp_id):
        o[warp_id] = x[warp_id] + jnp.array([1, 2, 3, 4])


@everywhere.gives([ints(4, 64)], lambda x: 3 * x + 3)
def test_a_region_in_a_loop_sees_the_values_of_its_iteration(x, o):
    o[...] = jnp.zeros((4, 64), jnp.int32)

    def step(i, values):
        @plgpu.warp_map
        def _(warp_id):
            o[warp_id] = o[warp_id] + values[warp_id]

        return values + 1

    lax.fori_loop(0, 3, step, x[...])


@everywhere.gives([ints(4, 64)], ints(4, 64))
def test_an_empty_array_from_outside(x, o):
    nothing = jnp.zeros((0, 64), jnp.int32) + x[0, 0]

    @plgpu.warp_map
    def _(warp_id):
        o[warp_id] = x[warp_id] + nothing.sum(0)


THREE = {"num_threads": 3, "thread_name": "wg"}


def test_each_of_several_warpgroups_has_arrays_of_its_own():
    def body(x, o, _):
        first = 4 * lax.axis_index("wg")
        rows = x[plgpu.ds(first, 4)] * (first + 1)

        @plgpu.warp_map
        def _(warp_id):
            o[first + warp_id] = rows[warp_id] + rows[3 - warp_id]

    x = ints(12, 64)
    rows = [x[i : i + 4] * (i + 1) for i in (0, 4, 8)]
    expected = np.concatenate([r + r[::-1] for r in rows])
    everywhere.run(body, [x], expected, scratch_types=[plgpu.SMEM((5,), F32)], **THREE)


def test_one_of_several_warpgroups_shares_its_arrays_in_a_loop():
    """The others do not enter the scope, and none waits for them."""

    def body(x, o):
        wg = lax.axis_index("wg")
        rows = x[plgpu.ds(4 * wg, 4)]

        @plgpu.when(wg != 1)
        def _():
            o[plgpu.ds(4 * wg, 4)] = rows

        @plgpu.when(wg == 1)
        def _():
            o[4:8] = jnp.zeros((4, 64), jnp.int32)

            def step(i, values):
                @plgpu.warp_map
                def _(warp_id):
                    mine = plgpu.run_scoped(
                        lambda own: doubled(own, values[3 - warp_id]),
                        plgpu.SMEM((64,), jnp.int32),
                    )
                    o[4 + warp_id] = o[4 + warp_id] + mine + jnp.sum(values[0])

                return values + 1

            lax.fori_loop(0, 3, step, rows)

    def doubled(own, value):
        own[...] = value
        return 2 * own[...]

    x = ints(12, 64)
    expected = x.copy()
    expected[4:8] = sum(
        2 * (x[7:3:-1] + i) + (x[4] + i).sum(dtype=np.int32) for i in range(3)
    )
    everywhere.run(body, [x], expected, **THREE)


def large(body):
    """Runs a kernel on an array that is larger than SMEM."""
    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((4, 64), F32))
    kernel(np.zeros((256, 256), np.float32))


@refused_by(large)
def test_what_does_not_fit_in_smem_is_refused(x, o):
    values = x[...]

    @plgpu.warp_map
    def _(warp_id):
        o[warp_id, :64] = values[warp_id, :64]


def test_the_hint_for_a_matrix_product_works():
    by_each_warp(lambda a: (a[:, :, None] * a).sum(1), ints(4, 8, 8))

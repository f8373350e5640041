# SPDX-License-Identifier: Apache-2.0
"""Correct kernels whose order is not obvious: no alarm, the same result in each run.

Each is a function that returns a kernel's body, its options, arguments and results.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support.mutations.correct import (
    BARRIER,
    F32,
    OUT,
    SHAPE,
    SMEM,
    Cases,
    X,
    in_warpgroup,
    load,
    options,
)

CASES = Cases()
case = CASES.add


# --- who waits for a copy -------------------------------------------------------------


@case
def a_warpgroup_waits_for_the_one_that_waited_for_the_copy():
    def body(x, o, tile, full, ready):
        @in_warpgroup(0)
        def _():
            load(x, tile, full)
            plgpu.barrier_arrive(ready)

        @in_warpgroup(1)
        def _():
            plgpu.barrier_wait(ready)
            o[...] = tile[...]

    return body, options(SMEM, BARRIER, BARRIER, warpgroups=2), [X], [X]


@case
def both_branches_start_the_copy_that_is_awaited_after_them():
    def body(x, o, tile, full):
        def copy():
            plgpu.copy_gmem_to_smem(x, tile, full)

        lax.cond(x[0, 0] > 100.0, copy, copy)
        plgpu.barrier_wait(full)
        o[...] = tile[...]

    return body, options(SMEM, BARRIER), [X], [X]


@case
def two_barriers_take_turns():
    def body(x, o, tile, first, second):
        @plgpu.loop(0, 4)
        def _(i):
            load(x, tile, first)
            load(x, tile, second)

        o[...] = tile[...]

    return body, options(SMEM, BARRIER, BARRIER), [X], [X]


@case
def the_number_of_steps_is_data():
    def body(x, n, o, tile, full, empty):
        @in_warpgroup(0)
        def _():
            @plgpu.loop(0, n[1])
            def _(i):
                plgpu.when(i > 0)(lambda: plgpu.barrier_wait(empty))
                plgpu.copy_gmem_to_smem(x, tile, full)

        @in_warpgroup(1)
        def _():
            @plgpu.loop(0, n[1], init_carry=jnp.zeros(SHAPE, F32))
            def total(i, carry):
                plgpu.barrier_wait(full)
                carry = carry + tile[...]
                plgpu.barrier_arrive(empty)
                return carry

            o[...] = total

    counts = np.array([3, 5], np.int32)
    scratch = options(SMEM, BARRIER, BARRIER, warpgroups=2)
    return body, scratch, [X, counts], [X * 5]


# --- copies out -----------------------------------------------------------------------


@case
def memory_is_handed_over_when_the_copy_out_has_read_it():
    def body(x, o, p, tile, ready):
        def store(value, to):
            tile[...] = value
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, to)

        @in_warpgroup(0)
        def _():
            store(x[...], o)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(ready)

        @in_warpgroup(1)
        def _():
            plgpu.barrier_wait(ready)
            store(x[...] + 1, p)
            plgpu.wait_smem_to_gmem(0)

    return body, options(SMEM, BARRIER, out=(OUT, OUT), warpgroups=2), [X], [X, X + 1]


@case
def the_end_of_the_kernel_waits_for_the_writes_of_copies_out():
    def body(x, o, tile):
        tile[...] = x[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, o)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return body, options(SMEM), [X], [X]


@case
def four_copies_out_in_one_group():
    def body(x, o, tile):
        tile[...] = x[...]
        plgpu.commit_smem()
        for i in range(4):
            rows = plgpu.ds(2 * i, 2)
            plgpu.copy_smem_to_gmem(tile.at[rows], o.at[rows], commit_group=False)
        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        tile[...] = jnp.zeros(SHAPE, F32)
        plgpu.wait_smem_to_gmem(0)

    return body, options(SMEM), [X], [X]


@case
def each_writer_fences_and_one_copies():
    def body(x, o, tile, ready):
        half = plgpu.ds(lax.axis_index("wg") * 4, 4)
        tile[half] = x[half] * 2
        plgpu.commit_smem()
        plgpu.barrier_arrive(ready)

        @in_warpgroup(0)
        def _():
            plgpu.barrier_wait(ready)
            plgpu.copy_smem_to_gmem(tile, o)
            plgpu.wait_smem_to_gmem(0)

    ready = plgpu.Barrier(num_arrivals=2)
    return body, options(SMEM, ready, warpgroups=2), [X], [X * 2]


@case
def the_reader_fences_for_the_writer():
    def body(x, o, tile, ready):
        @in_warpgroup(0)
        def _():
            tile[...] = x[...]
            plgpu.barrier_arrive(ready)

        @in_warpgroup(1)
        def _():
            plgpu.barrier_wait(ready)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, o)
            plgpu.wait_smem_to_gmem(0)

    return body, options(SMEM, BARRIER, warpgroups=2), [X], [X]


# --- products -------------------------------------------------------------------------


@case
def one_product_is_read_while_the_other_runs():
    tiles = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def body(a, b, o, a_tile, b_tile, acc, full):
        plgpu.copy_gmem_to_smem(a, a_tile, full)
        plgpu.copy_gmem_to_smem(b, b_tile, full)
        plgpu.barrier_wait(full)
        left, right = (plgpu.ds(n, 64) for n in (0, 64))
        plgpu.wgmma(acc.at[:, left], a_tile, b_tile.at[:, left])
        plgpu.wgmma(acc.at[:, right], a_tile, b_tile.at[:, right])
        o[:, left] = plgpu.wgmma_accumulator_load(acc.at[:, left], wait_n=1)
        o[:, right] = acc.at[:, right][...]

    rng = np.random.default_rng(1)
    a, b = (rng.integers(-4, 5, (64, n)).astype(np.float16) for n in (64, 128))
    scratch = options(
        plgpu.SMEM((64, 64), jnp.float16, transforms=tiles),
        plgpu.SMEM((64, 128), jnp.float16, transforms=tiles),
        plgpu.ACC((64, 128)),
        plgpu.Barrier(num_arrivals=2),
        out=jax.ShapeDtypeStruct((64, 128), F32),
    )
    return body, scratch, [a, b], [(a @ b).astype(np.float32)]


# --- scopes ---------------------------------------------------------------------------


def read_in_scope(source):
    def scope(tile, full):
        load(source, tile, full)
        return tile[...]

    return plgpu.run_scoped(scope, SMEM, BARRIER)


@case
def a_function_with_a_scope_is_called_twice():
    def body(x, y, o):
        o[...] = jax.jit(lambda v: v * 2)(read_in_scope(x)) + read_in_scope(y)

    return body, options(), [X, X + 1], [X * 2 + (X + 1)]


@case
def a_jitted_scope_is_entered_three_times():
    def body(x, o, p):
        read = jax.jit(lambda: read_in_scope(x))
        o[...] = read()
        p[...] = read() + read()

    return body, options(out=(OUT, OUT)), [X], [X, 2 * X]


@case
def a_scope_in_a_loop():
    def body(x, o):
        @plgpu.loop(0, 5, init_carry=jnp.zeros(SHAPE, F32))
        def total(i, carry):
            return carry + read_in_scope(x)

        o[...] = total

    return body, options(), [X], [X * 5]


# --- threads --------------------------------------------------------------------------


@case
def a_result_is_read_back():
    def body(x, o):
        o[...] = x[...]

        @plgpu.loop(0, 3)
        def _(i):
            o[...] = o[...] * 2

        o[...] += x[...]

    return body, options(), [X], [X * 9]


@case
def a_scalar_goes_through_smem():
    def body(x, o, flag, ready):
        @in_warpgroup(0)
        def _():
            flag[0] = x[0, 0]
            plgpu.barrier_arrive(ready)

        @in_warpgroup(1)
        def _():
            plgpu.barrier_wait(ready)
            o[...] = x[...] * flag[0]

    scratch = options(plgpu.SMEM((4,), F32), BARRIER, warpgroups=2)
    return body, scratch, [X], [X * X[0, 0]]


@case
def memory_is_swapped():
    def body(x, o, tile):
        tile[...] = x[...]
        old = tile[...]
        tile[...] = old * 2
        o[...] = old + tile[...]

    return body, options(SMEM), [X], [X * 3]


@case
def warpgroups_store_the_same_values():
    def body(x, o):
        o[...] = x[...]
        o[...] = x[...]

    return body, options(warpgroups=2), [X], [X]


@case
def ctas_store_the_same_values_and_read_them():
    def body(x, o, p):
        o[...] = x[...]
        at = lax.axis_index("i")
        p[at] = o[at]

    grid = options(out=(OUT, OUT)) | {"grid": (8,), "grid_names": ("i",)}
    return body, grid, [X], [X, X]


@case
def warps_write_a_part_each():
    def body(x, o, row):
        @plgpu.warp_map
        def _(warp):
            @plgpu.loop(0, 2)
            def _(j):
                row[warp * 2 + j] = x[0, warp * 2 + j]

        o[...] = row[...]

    scratch = options(plgpu.SMEM((8,), F32), out=jax.ShapeDtypeStruct((8,), F32))
    return body, scratch, [X], [X[0, :8]]


# --- barriers that nobody waits for ---------------------------------------------------


@case
def a_phase_that_nobody_waits_for():
    def body(x, o, barrier):
        plgpu.barrier_arrive(barrier)
        o[...] = x[...]

    return body, options(BARRIER), [X], [X]


@case
def an_arrival_that_is_left_over():
    def body(x, o, barrier):
        plgpu.barrier_arrive(barrier)
        o[...] = x[...]

    return body, options(plgpu.Barrier(num_arrivals=2)), [X], [X]


# --- clusters -------------------------------------------------------------------------

READY = plgpu.ClusterBarrier(collective_axes="cta")


@case
def ctas_exchange_gmem():
    def body(x, mid, o, ready):
        at = lax.axis_index("cta")
        mid[at] = x[at] * 2
        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)
        o[at] = mid[1 - at]

    out = jax.ShapeDtypeStruct((2, 4, 128), F32)
    x = X.reshape(2, 4, 128)
    return body, options(READY, out=(out, out), ctas=2), [x], [x * 2, x[::-1] * 2]


@case
def a_cta_overwrites_what_another_stored():
    def body(x, o, ready):
        at = lax.axis_index("cta")

        @plgpu.when(at == 0)
        def _():
            o[...] = x[...]

        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)

        @plgpu.when(at == 1)
        def _():
            o[...] = x[...] + 1

    return body, options(READY, ctas=2), [X], [X + 1]


@pytest.mark.parametrize("name", CASES)
def test_a_correct_kernel_gives_no_alarm_and_one_result(name):
    CASES.check(name)

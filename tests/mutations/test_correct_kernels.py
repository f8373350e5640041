# SPDX-License-Identifier: Apache-2.0
"""Correct kernels whose order is not obvious: no alarm, the same result in each run."""

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
    SHAPE,
    SMEM,
    Cases,
    X,
    in_warpgroup,
    load,
)

CASES = Cases()
case = CASES.add


# --- who waits for a copy -------------------------------------------------------------


@case([X], [X], SMEM, BARRIER, BARRIER, threads={"wg": 2})
def a_warpgroup_waits_for_the_one_that_waited_for_the_copy(x, o, tile, full, ready):
    @in_warpgroup(0)
    def _():
        load(x, tile, full)
        plgpu.barrier_arrive(ready)

    @in_warpgroup(1)
    def _():
        plgpu.barrier_wait(ready)
        o[...] = tile[...]


@case([X], [X], SMEM, BARRIER)
def both_branches_start_the_copy_that_is_awaited_after_them(x, o, tile, full):
    def copy():
        plgpu.copy_gmem_to_smem(x, tile, full)

    lax.cond(x[0, 0] > 100.0, copy, copy)
    plgpu.barrier_wait(full)
    o[...] = tile[...]


@case([X], [X], SMEM, BARRIER, BARRIER)
def two_barriers_take_turns(x, o, tile, first, second):
    @plgpu.loop(0, 4)
    def _(i):
        load(x, tile, first)
        load(x, tile, second)

    o[...] = tile[...]


@case(
    [X, np.array([3, 5], np.int32)], [X * 5], SMEM, BARRIER, BARRIER, threads={"wg": 2}
)
def the_number_of_steps_is_data(x, n, o, tile, full, empty):
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


# --- copies out -----------------------------------------------------------------------


@case([X], [X, X + 1], SMEM, BARRIER, threads={"wg": 2})
def memory_is_handed_over_when_the_copy_out_has_read_it(x, o, p, tile, ready):
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


@case([X], [X], SMEM)
def the_end_of_the_kernel_waits_for_the_writes_of_copies_out(x, o, tile):
    tile[...] = x[...]
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, o)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


@case([X], [X], SMEM)
def four_copies_out_in_one_group(x, o, tile):
    tile[...] = x[...]
    plgpu.commit_smem()
    for i in range(4):
        rows = plgpu.ds(2 * i, 2)
        plgpu.copy_smem_to_gmem(tile.at[rows], o.at[rows], commit_group=False)
    plgpu.commit_smem_to_gmem_group()
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    tile[...] = jnp.zeros(SHAPE, F32)
    plgpu.wait_smem_to_gmem(0)


@case([X], [X * 2], SMEM, plgpu.Barrier(num_arrivals=2), threads={"wg": 2})
def each_writer_fences_and_one_copies(x, o, tile, ready):
    half = plgpu.ds(lax.axis_index("wg") * 4, 4)
    tile[half] = x[half] * 2
    plgpu.commit_smem()
    plgpu.barrier_arrive(ready)

    @in_warpgroup(0)
    def _():
        plgpu.barrier_wait(ready)
        plgpu.copy_smem_to_gmem(tile, o)
        plgpu.wait_smem_to_gmem(0)


@case([X], [X], SMEM, BARRIER, threads={"wg": 2})
def the_reader_fences_for_the_writer(x, o, tile, ready):
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


# --- products -------------------------------------------------------------------------


TILES = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
RNG = np.random.default_rng(1)
A, B = (RNG.integers(-4, 5, (64, n)).astype(np.float16) for n in (64, 128))


@case(
    [A, B],
    [(A @ B).astype(np.float32)],
    plgpu.SMEM((64, 64), jnp.float16, transforms=TILES),
    plgpu.SMEM((64, 128), jnp.float16, transforms=TILES),
    plgpu.ACC((64, 128)),
    plgpu.Barrier(num_arrivals=2),
)
def one_product_is_read_while_the_other_runs(a, b, o, a_tile, b_tile, acc, full):
    plgpu.copy_gmem_to_smem(a, a_tile, full)
    plgpu.copy_gmem_to_smem(b, b_tile, full)
    plgpu.barrier_wait(full)
    left, right = (plgpu.ds(n, 64) for n in (0, 64))
    plgpu.wgmma(acc.at[:, left], a_tile, b_tile.at[:, left])
    plgpu.wgmma(acc.at[:, right], a_tile, b_tile.at[:, right])
    o[:, left] = plgpu.wgmma_accumulator_load(acc.at[:, left], wait_n=1)
    o[:, right] = acc.at[:, right][...]


# --- scopes ---------------------------------------------------------------------------


def read_in_scope(source):
    def scope(tile, full):
        load(source, tile, full)
        return tile[...]

    return plgpu.run_scoped(scope, SMEM, BARRIER)


@case([X, X + 1], [X * 2 + (X + 1)])
def a_function_with_a_scope_is_called_twice(x, y, o):
    o[...] = jax.jit(lambda v: v * 2)(read_in_scope(x)) + read_in_scope(y)


@case([X], [X, 2 * X])
def a_jitted_scope_is_entered_three_times(x, o, p):
    read = jax.jit(lambda: read_in_scope(x))
    o[...] = read()
    p[...] = read() + read()


@case([X], [X * 5])
def a_scope_in_a_loop(x, o):
    @plgpu.loop(0, 5, init_carry=jnp.zeros(SHAPE, F32))
    def total(i, carry):
        return carry + read_in_scope(x)

    o[...] = total


# --- threads --------------------------------------------------------------------------


@case([X], [X * 9])
def a_result_is_read_back(x, o):
    o[...] = x[...]

    @plgpu.loop(0, 3)
    def _(i):
        o[...] = o[...] * 2

    o[...] += x[...]


@case([X], [X * X[0, 0]], plgpu.SMEM((4,), F32), BARRIER, threads={"wg": 2})
def a_scalar_goes_through_smem(x, o, flag, ready):
    @in_warpgroup(0)
    def _():
        flag[0] = x[0, 0]
        plgpu.barrier_arrive(ready)

    @in_warpgroup(1)
    def _():
        plgpu.barrier_wait(ready)
        o[...] = x[...] * flag[0]


@case([X], [X * 3], SMEM)
def memory_is_swapped(x, o, tile):
    tile[...] = x[...]
    old = tile[...]
    tile[...] = old * 2
    o[...] = old + tile[...]


@case([X], [X], threads={"wg": 2})
def warpgroups_store_the_same_values(x, o):
    o[...] = x[...]
    o[...] = x[...]


@case([X], [X, X], grid={"i": 8})
def ctas_store_the_same_values_and_read_them(x, o, p):
    o[...] = x[...]
    at = lax.axis_index("i")
    p[at] = o[at]


@case([X], [X[0, :8]], plgpu.SMEM((8,), F32))
def warps_write_a_part_each(x, o, row):
    @plgpu.warp_map
    def _(warp):
        @plgpu.loop(0, 2)
        def _(j):
            row[warp * 2 + j] = x[0, warp * 2 + j]

    o[...] = row[...]


# --- barriers that nobody waits for ---------------------------------------------------


@case([X], [X], BARRIER)
def a_phase_that_nobody_waits_for(x, o, barrier):
    plgpu.barrier_arrive(barrier)
    o[...] = x[...]


@case([X], [X], plgpu.Barrier(num_arrivals=2))
def an_arrival_that_is_left_over(x, o, barrier):
    plgpu.barrier_arrive(barrier)
    o[...] = x[...]


# --- clusters -------------------------------------------------------------------------

READY = plgpu.ClusterBarrier(collective_axes="cta")


HALVES = X.reshape(2, 4, 128)


@case([HALVES], [HALVES * 2, HALVES[::-1] * 2], READY, cluster={"cta": 2})
def ctas_exchange_gmem(x, mid, o, ready):
    at = lax.axis_index("cta")
    mid[at] = x[at] * 2
    plgpu.barrier_arrive(ready)
    plgpu.barrier_wait(ready)
    o[at] = mid[1 - at]


@case([X], [X + 1], READY, cluster={"cta": 2})
def a_cta_overwrites_what_another_stored(x, o, ready):
    at = lax.axis_index("cta")

    @plgpu.when(at == 0)
    def _():
        o[...] = x[...]

    plgpu.barrier_arrive(ready)
    plgpu.barrier_wait(ready)

    @plgpu.when(at == 1)
    def _():
        o[...] = x[...] + 1


@pytest.mark.parametrize("name", CASES)
def test_a_correct_kernel_gives_no_alarm_and_one_result(name):
    CASES.check(name)

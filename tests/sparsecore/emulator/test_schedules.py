# SPDX-License-Identifier: Apache-2.0
"""Correct kernels: the same results in 20 schedules, and nothing reported."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_gpu import sparsecore as plsc
from tests.support.sparsecore.kernels import check, lanes, part

check = functools.partial(check, schedules=20)
RNG = np.random.default_rng(0)
ROW = plsc.VMEM((128,), jnp.float32)
MATRIX, INDICES = plsc.VMEM((16, 128), jnp.float32), plsc.VMEM((16,), jnp.int32)
SEM, SIGNAL = plsc.SemaphoreType.DMA, plsc.SemaphoreType.REGULAR
SHARED = plsc.VMEM_SHARED((32, 128), jnp.float32)
X = RNG.integers(-8, 8, (256, 128)).astype(np.float32)


def number():
    """The number of the subcore among those of all cores."""
    return lax.axis_index("c") * lax.axis_size("s") + lax.axis_index("s")


def test_rows_are_gathered_by_all_cores():
    rows = RNG.integers(0, 256, 512).astype(np.int32)

    def body(x, r, o, i, v, sem):
        own = plsc.ds(number() * 16, 16)
        plsc.sync_copy(r.at[own], i)
        plsc.async_copy(x.at[i], v, sem).wait()
        plsc.sync_copy(v, o.at[own])

    check(body, [X, rows], X[rows], INDICES, MATRIX, SEM, cores=2)


def test_rows_with_the_ignored_index_stay_as_they_are():
    rows = np.where(np.arange(16) % 3 == 0, -1, np.arange(16)).astype(np.int32)
    expected = np.where(rows[:, None] == -1, 7, X[rows])

    def body(x, r, o, i, v):
        plsc.sync_copy(r, i)

        @plsc.loop(0, 16)
        def _(j):
            @plsc.parallel_loop(0, 128, step=lanes())
            def _(k):
                v[j, part(k)] = jnp.full(lanes(), 7, jnp.float32)

        plsc.sync_copy(x.at[plsc.Indices(i, ignored_value=-1)], v)
        plsc.sync_copy(v, o)

    check(body, [X, rows], expected.astype(np.float32), INDICES, MATRIX, subcores=1)


def test_rows_are_scattered_with_equal_values_for_a_row_that_is_named_twice():
    rows = np.minimum(np.arange(16), 14).astype(np.int32)
    values = X[:16].copy()
    values[15] = values[14]
    expected = np.zeros((16, 128), np.float32)
    expected[:15] = values[:15]

    def body(x, r, z, o, i, v):
        plsc.sync_copy(z, v)
        plsc.sync_copy(v, o)
        plsc.sync_copy(r, i)
        plsc.sync_copy(x, v)
        plsc.sync_copy(v, o.at[i])

    zeros = np.zeros((16, 128), np.float32)
    check(body, [values, rows, zeros], expected, INDICES, MATRIX, subcores=1)


def test_all_subcores_of_all_cores_may_store_the_same_values():
    def body(x, o, v):
        plsc.sync_copy(x.at[plsc.ds(0, 16)], v)
        plsc.sync_copy(v, o)

    check(body, [X], X[:16], MATRIX, cores=2)


def test_subcores_may_scatter_equal_rows_to_one_place():
    rows = np.arange(16, dtype=np.int32)[::-1].copy()

    def body(x, r, o, i, v, sem):
        plsc.sync_copy(r, i)
        plsc.sync_copy(x.at[plsc.ds(0, 16)], v)
        plsc.async_copy(v, o.at[i], sem).wait()

    check(body, [X, rows], X[:16][::-1], INDICES, MATRIX, SEM, subcores=3)


def test_streams_of_all_subcores_add_to_shared_memory():
    rows = RNG.integers(0, 32, 256).astype(np.int32)
    expected = np.zeros((32, 128), np.float32)
    np.add.at(expected, rows, X)

    def body(x, r, z, o, i, v, shared):
        s = lax.axis_index("s")
        own, given = plsc.ds(s * 2, 2), plsc.ds(s * 16, 16)
        plsc.sync_copy(z.at[own], shared.at[own])
        plsc.sync_copy(r.at[given], i)
        plsc.sync_copy(x.at[given], v)
        plsc.subcore_barrier()
        plsc.sync_copy(v, shared.at[i], add=True)
        plsc.subcore_barrier()
        plsc.sync_copy(shared.at[own], o.at[own])

    zeros = np.zeros((32, 128), np.float32)
    check(body, [X, rows, zeros], expected, INDICES, MATRIX, SHARED)


def test_a_gather_adds_to_vmem():
    rows = RNG.integers(0, 256, 16).astype(np.int32)

    def body(x, r, o, i, v):
        plsc.sync_copy(r, i)
        plsc.sync_copy(x.at[plsc.ds(0, 16)], v)
        plsc.sync_copy(x.at[i], v, add=True)
        plsc.sync_copy(v, o)

    check(body, [X, rows], X[:16] + X[rows], INDICES, MATRIX, subcores=1)


def test_copies_overlap_with_the_work_on_another_buffer():
    def body(x, o, v, arrived, left):
        first = number() * 16

        def load(j, slot):
            return plsc.make_async_copy(x.at[first + j], v.at[slot], arrived.at[slot])

        def store(j, slot):
            return plsc.make_async_copy(v.at[slot], o.at[first + j], left.at[slot])

        load(0, 0).start()

        @plsc.loop(0, 16)
        def _(j):
            slot = j % 2

            @plsc.when(j + 1 < 16)
            def _():
                @plsc.when(j > 0)
                def _():
                    store(j - 1, 1 - slot).wait()

                load(j + 1, 1 - slot).start()

            load(j, slot).wait()

            @plsc.parallel_loop(0, 128, step=lanes())
            def _(k):
                v[slot, part(k)] = v[slot, part(k)] * 2

            store(j, slot).start()

        store(14, 0).wait()
        store(15, 1).wait()

    buffers = plsc.VMEM((2, 128), jnp.float32)
    x = X[:64]
    check(body, [x], x * 2, buffers, SEM((2,)), SEM((2,)), subcores=4)


@pytest.mark.parametrize("at_once", [False, True])
def test_copies_on_one_semaphore_are_complete_after_waits_for_all_of_them(at_once):
    def body(x, o, v, sem):
        for i in range(16):
            plsc.async_copy(x.at[i], v.at[i], sem)
        if at_once:
            plsc.make_async_copy(x.at[plsc.ds(0, 16)], v, sem).wait()
        else:
            for i in range(16):
                plsc.make_async_copy(x.at[i], v.at[i], sem).wait()
        v[0, part(0)] = v[15, part(0)]
        plsc.sync_copy(v, o)

    expected = X[:16].copy()
    expected[0, : lanes()] = X[15, : lanes()]
    check(body, [X], expected, MATRIX, SEM, subcores=1, chips=["tpu7x"])


def test_subcores_of_two_cores_pass_a_row_along_by_signals():
    def body(x, o, v, sem):
        @plsc.when(number() == 0)
        def _():
            plsc.sync_copy(x.at[0], v)

        @plsc.when(number() > 0)
        def _():
            plsc.semaphore_wait(sem)
            plsc.sync_copy(o.at[number() - 1], v)

        v[part(0)] = v[part(0)] + 1
        plsc.sync_copy(v, o.at[number()])

        @plsc.when(number() < 7)
        def _():
            after = number() + 1
            plsc.semaphore_signal(sem, core_index=after // 4, subcore_id=after % 4)

    expected = np.tile(X[0], (8, 1))
    expected[:, : lanes()] += np.arange(1, 9)[:, None]
    check(body, [X], expected, ROW, SIGNAL, cores=2, subcores=4)


def test_subcores_take_work_from_a_counter():
    counter = plsc.SMEM((1,), jnp.int32)

    def body(x, o, v, counter):
        counter[0] = 0
        plsc.subcore_barrier()

        def take():
            return plsc.fetch_and_add(counter.at[0], 1, subcore_id=0)

        def step(j):
            plsc.sync_copy(x.at[j], v)
            plsc.sync_copy(v, o.at[j])
            return take()

        lax.while_loop(lambda j: j < 64, step, take())

    check(body, [X[:64]], X[:64], ROW, counter, subcores=4)


def test_positions_in_one_histogram_are_added_lane_by_lane():
    keys = RNG.integers(0, 64, 2048).astype(np.int32)

    def body(k, o, v, count):
        plsc.sync_copy(k, v)

        @plsc.loop(0, 64, step=lanes())
        def _(j):
            count[part(j)] = jnp.zeros(lanes(), jnp.int32)

        @plsc.loop(0, 2048, step=lanes())
        def _(j):
            ones = jnp.ones(lanes(), jnp.int32)
            plsc.addupdate_scatter(count, [v[part(j)]], ones)

        plsc.sync_copy(count, o)

    expected = np.bincount(keys, minlength=64).astype(np.int32)
    scratch = plsc.VMEM((2048,), jnp.int32), plsc.VMEM((64,), jnp.int32)
    check(body, [keys], expected, *scratch, subcores=1)


def test_parallel_loops_that_follow_each_other_use_the_same_memory():
    def body(x, o, v, total):
        plsc.sync_copy(x.at[0], v)

        @plsc.loop(0, 3)
        def _(_):
            @plsc.parallel_loop(0, 128, step=lanes())
            def _(j):
                v[part(j)] = v[part(j)] + 1

            @plsc.parallel_loop(0, 128, step=lanes(), carry=jnp.float32(0))
            def last(j, carry):
                return jnp.maximum(carry, jnp.max(v[part(j)]))

            total[...] = jnp.full(lanes(), last)

        plsc.sync_copy(v, o)

    def scratch():
        return plsc.VMEM((lanes(),), jnp.float32)

    check(body, [X], X[0] + 3, ROW, scratch(), subcores=1, chips=["tpu7x"])


def test_scalar_subcores_copy_between_hbm_and_shared_memory():
    def body(x, o, shared, words):
        c = lax.axis_index("c")
        own = plsc.ds(c * 32, 32)
        plsc.sync_copy(x.at[own], shared)
        plsc.sync_copy(shared, o.at[own])

    check(body, [X[:64]], X[:64], SHARED, plsc.SMEM((16,), jnp.int32),
          scalar=True, cores=2)  # fmt: skip


def test_a_scalar_subcore_sums_up_what_is_in_smem():
    numbers = np.arange(64, dtype=np.int32)

    def body(x, o, words):
        plsc.sync_copy(x, words)

        @plsc.loop(1, 64)
        def _(j):
            words[j] = words[j] + words[j - 1]

        plsc.sync_copy(words, o)

    words = plsc.SMEM((64,), jnp.int32)
    expected = np.cumsum(numbers).astype(np.int32)
    check(body, [numbers], expected, words, scalar=True)

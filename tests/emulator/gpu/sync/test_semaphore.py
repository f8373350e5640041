# SPDX-License-Identifier: Apache-2.0
"""Semaphores in the emulator: order, deadlocks, residency, what is left at the end.

What a missing signal, wait or fence is reported as is in
tests/support/mutations/grid_handover.py.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import everywhere
from tests.support.grid_barrier import GridBarrier
from tests.support.refusal import in_each, refused_by

F32 = jnp.float32
REGULAR = plgpu.SemaphoreType.REGULAR
CTAS = 4
# No two such CTAs fit on an SM.
WHOLE_SM = plgpu.SMEM((200 * 1024,), jnp.int8)
SMS = 132
SEEDS = range(4)


def run(body, *scratch, ctas=CTAS, **params):
    """Runs a kernel whose CTAs have a row each."""
    x = np.arange(ctas * 128, dtype=np.float32).reshape(ctas, 128)
    return x, everywhere.emulate(body, [x], x, *scratch, grid={"i": ctas}, **params)


def shared():
    """An array of a row for each CTA, with contents."""
    return plgpu.get_global(plgpu.GMEM((CTAS, 128), F32, init=0))


# --- CTAs that are resident at once ---------------------------------------------------


def test_as_many_ctas_as_fit_wait_for_each_other():
    def body(x, o, _):
        i = lax.axis_index("i")
        GridBarrier.of(SMS).meet(i)
        o[i] = x[i]

    x, result = run(body, WHOLE_SM, ctas=SMS)
    np.testing.assert_array_equal(result, x)


@refused_by(run, WHOLE_SM, ctas=SMS + 1)
def test_one_more_than_fits_is_a_deadlock_that_says_so(x, o, _):
    i = lax.axis_index("i")
    arrived = plgpu.get_global(REGULAR)
    plgpu.semaphore_signal(arrived)
    plgpu.semaphore_wait(arrived, SMS + 1, decrement=False)  # the line
    o[i] = x[i]


@refused_by(run, WHOLE_SM, ctas=SMS + 1, max_steps=5000)
def test_ctas_that_poll_for_one_that_does_not_fit_are_a_livelock_that_says_so(x, o, _):
    i = lax.axis_index("i")
    arrived = plgpu.get_global(REGULAR)
    plgpu.semaphore_signal(arrived)
    lax.while_loop(
        lambda count: count < SMS + 1,
        lambda count: plgpu.semaphore_read(arrived),
        jnp.int32(0),
    )
    o[i] = x[i]


def test_a_later_cta_may_let_an_earlier_one_go():
    """They start in order, and the first waits for the last one."""

    def body(x, o):
        i = lax.axis_index("i")
        last = plgpu.get_global(REGULAR)
        plgpu.when(i == 0)(lambda: plgpu.semaphore_wait(last))
        plgpu.when(i == CTAS - 1)(lambda: plgpu.semaphore_signal(last))
        o[i] = x[i]

    for seed in SEEDS:
        x, result = run(body, seed=seed)
        np.testing.assert_array_equal(result, x)


# --- deadlocks and what is left -------------------------------------------------------


@refused_by(run)
def test_a_missing_signal_is_a_deadlock(x, o):
    i = lax.axis_index("i")
    ready = plgpu.get_global(REGULAR((2,)))
    plgpu.when(i > 0)(lambda: plgpu.semaphore_signal(ready.at[1]))
    plgpu.when(i == 0)(lambda: plgpu.semaphore_wait(ready.at[1], CTAS))
    o[i] = x[i]


@refused_by(run, REGULAR)
def test_who_waits_for_other_ctas_at_its_own_semaphore_is_told_of_a_shared_one(
    x, o, mine
):
    i = lax.axis_index("i")
    plgpu.semaphore_signal(mine)
    plgpu.when(i == 0)(lambda: plgpu.semaphore_wait(mine, CTAS))
    o[i] = x[i]


@refused_by(run, REGULAR)
def test_a_semaphore_of_a_cta_is_signalled_by_no_other(x, o, mine):
    i = lax.axis_index("i")
    plgpu.when(i == 0)(lambda: plgpu.semaphore_signal(mine, CTAS))
    plgpu.semaphore_wait(mine)
    o[i] = x[i]


@refused_by(run, REGULAR((1,)))
def test_a_semaphore_is_zero_at_the_end(x, o, mine):
    plgpu.semaphore_signal(mine.at[0], 3)
    plgpu.semaphore_wait(mine.at[0], 2)
    i = lax.axis_index("i")
    o[i] = x[i]


@refused_by(run)
def test_a_wait_without_decrement_leaves_it(x, o):
    i = lax.axis_index("i")
    arrived = plgpu.get_global(REGULAR)
    plgpu.semaphore_signal(arrived)
    plgpu.semaphore_wait(arrived, decrement=False)
    o[i] = x[i]


@refused_by(lambda body: run(body, REGULAR((2,))))
def test_an_index_out_of_bounds_is_reported(x, o, s):
    plgpu.semaphore_signal(s.at[lax.axis_index("i")])


@refused_by(run, REGULAR, plgpu.SMEM((1,), jnp.int32))
def test_an_increment_without_a_value_is_reported(x, o, s, n):
    plgpu.semaphore_signal(s, n[0])


# --- order ----------------------------------------------------------------------------


@refused_by(in_each(run, seed=SEEDS))
def test_what_is_stored_after_the_signal_is_a_race(x, o):
    i = lax.axis_index("i")
    rows, ready = shared(), plgpu.get_global(REGULAR((CTAS,)))
    plgpu.semaphore_signal(ready.at[i])
    rows[i] = x[i]
    plgpu.semaphore_wait(ready.at[(i + 1) % CTAS])
    o[i] = rows[(i + 1) % CTAS]


def test_a_signal_passes_on_what_its_thread_has_waited_for():
    """The last CTA has not waited for the first, but for those that have."""

    def body(x, o):
        i = lax.axis_index("i")
        rows, turn = shared(), plgpu.get_global(REGULAR((CTAS,)))
        plgpu.when(i > 0)(lambda: plgpu.semaphore_wait(turn.at[i]))
        rows[i] = x[i]
        plgpu.when(i < CTAS - 1)(lambda: plgpu.semaphore_signal(turn.at[i + 1]))
        o[i] = jnp.where(i == CTAS - 1, rows[0], x[i])

    x, result = run(lambda x, o: body(x, o))
    np.testing.assert_array_equal(result[-1], x[0])


def test_reads_of_a_semaphore_acquire():
    def body(x, o):
        i = lax.axis_index("i")
        rows, ready = shared(), plgpu.get_global(REGULAR((CTAS,)))
        rows[i] = x[i]
        plgpu.semaphore_signal(ready.at[i])
        other = (i + 1) % CTAS
        lax.while_loop(
            lambda seen: seen == 0,
            lambda _: plgpu.semaphore_read(ready.at[other]),
            jnp.int32(0),
        )
        o[i] = rows[other]
        plgpu.semaphore_wait(ready.at[other])

    for seed in SEEDS:
        x, result = run(body, seed=seed)
        np.testing.assert_array_equal(result, np.roll(x, -1, 0))


POLLS = {
    "loads": (
        lambda flag: flag.set(1),
        lambda flag: flag[...],
        "semaphore_signal",
    ),
    "atomics": (
        lambda flag: plgpu.atomic_add(flag, 1),
        lambda flag: plgpu.atomic_add(flag, 0),
        "relaxed atomic operations order no other accesses",
    ),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("store", "read", "hint"), POLLS.values(), ids=POLLS)
def test_neither_loads_nor_atomic_operations_order_accesses(store, read, hint, seed):
    def body(x, o):
        i = lax.axis_index("i")
        rows = shared()
        flags = plgpu.get_global(plgpu.GMEM((CTAS,), jnp.int32, init=0))
        rows[i] = x[i]
        store(flags.at[i])
        other = flags.at[(i + 1) % CTAS]
        lax.while_loop(lambda seen: seen == 0, lambda _: read(other), jnp.int32(0))
        o[i] = rows[(i + 1) % CTAS]

    with pytest.raises(errors.RaceError) as info:
        run(body, seed=seed)
    assert hint in str(info.value.hint)

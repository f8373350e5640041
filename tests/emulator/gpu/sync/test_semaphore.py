# SPDX-License-Identifier: Apache-2.0
"""Semaphores in the emulator: order, deadlocks, residency, what is left at the end."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import everywhere
from tests.support.grid_barrier import GridBarrier
from tests.support.refusal import refused_by

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


@pytest.mark.parametrize(("signalled", "left"), [(3, 1), (2, 0)])
def test_a_semaphore_is_zero_at_the_end(signalled, left):
    def body(x, o, mine):
        i = lax.axis_index("i")
        plgpu.semaphore_signal(mine.at[0], signalled)
        plgpu.semaphore_wait(mine.at[0], 2)
        o[i] = x[i]

    if not left:
        run(body, REGULAR((1,)))
        return
    with pytest.raises(errors.SemaphoreError) as info:
        run(body, REGULAR((1,)))
    assert (
        info.value.what
        == "semaphore mine[0] of CTA (i=0) is not zero when the kernel ends"
    )
    assert info.value.got == left
    assert "semaphore_signal(mine.at[0], signalled)" in str(info.value)


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


def exchange(signal=True, wait=True):
    """Each CTA stores a row, and reads the next one's."""

    def body(x, o):
        i = lax.axis_index("i")
        rows = shared()
        ready = plgpu.get_global(REGULAR((CTAS,)))
        rows[i] = x[i]
        other = (i + 1) % CTAS
        if signal:
            plgpu.semaphore_signal(ready.at[i])
        if wait:
            plgpu.semaphore_wait(ready.at[other])
        o[i] = rows[other]
        if signal and not wait:
            plgpu.semaphore_wait(ready.at[other])

    return body


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("left_out", ["signal", "wait"])
def test_without_one_of_them_it_is_a_race(left_out, seed):
    parts = {"signal": True, "wait": True, left_out: False}
    if left_out == "signal":
        parts["wait"] = False
    with pytest.raises(errors.RaceError, match="by one CTA") as info:
        run(exchange(**parts), seed=seed)
    assert "semaphore_signal after the first access" in str(info.value.hint)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_stored_after_the_signal_is_a_race(seed):
    def body(x, o):
        i = lax.axis_index("i")
        rows, ready = shared(), plgpu.get_global(REGULAR((CTAS,)))
        plgpu.semaphore_signal(ready.at[i])
        rows[i] = x[i]
        plgpu.semaphore_wait(ready.at[(i + 1) % CTAS])
        o[i] = rows[(i + 1) % CTAS]

    with pytest.raises(errors.RaceError, match="by one CTA"):
        run(body, seed=seed)


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


def test_a_poll_of_plain_loads_is_a_race():
    def body(x, o):
        i = lax.axis_index("i")
        flags = plgpu.get_global(plgpu.GMEM((CTAS,), jnp.int32, init=0))
        flags[i] = 1
        lax.while_loop(
            lambda seen: seen == 0, lambda _: flags[(i + 1) % CTAS], jnp.int32(0)
        )
        o[i] = x[i]

    for seed in SEEDS:
        with pytest.raises(errors.RaceError) as info:
            run(body, seed=seed)
        assert "semaphore_signal" in str(info.value.hint)


def test_atomic_operations_order_nothing_else():
    def body(x, o):
        i = lax.axis_index("i")
        rows = shared()
        flags = plgpu.get_global(plgpu.GMEM((CTAS,), jnp.int32, init=0))
        rows[i] = x[i]
        plgpu.atomic_add(flags.at[i], 1)
        lax.while_loop(
            lambda seen: seen == 0,
            lambda _: plgpu.atomic_add(flags.at[(i + 1) % CTAS], 0),
            jnp.int32(0),
        )
        o[i] = rows[(i + 1) % CTAS]

    for seed in SEEDS:
        with pytest.raises(errors.RaceError) as info:
            run(body, seed=seed)
        assert "relaxed atomic operations order no other accesses" in str(
            info.value.hint
        )


# --- copies ---------------------------------------------------------------------------


def copied(complete=True, fence=True, threads=False):
    """Each CTA stores a row, by TMA or by threads, and the next one copies it."""

    def body(x, o, tile, barrier):
        i = lax.axis_index("i")
        rows, ready = shared(), plgpu.get_global(REGULAR((CTAS,)))
        if threads:
            rows[i] = x[i]
            if fence:
                plgpu.commit_gmem()
        else:
            tile[...] = x[i]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, rows.at[i])
            plgpu.wait_smem_to_gmem(0, wait_read_only=not complete)
        plgpu.semaphore_signal(ready.at[i])
        other = (i + 1) % CTAS
        plgpu.semaphore_wait(ready.at[other])
        plgpu.copy_gmem_to_smem(rows.at[other], tile, barrier)
        plgpu.barrier_wait(barrier)
        o[i] = tile[...]

    return body


COPY = plgpu.SMEM((128,), F32), plgpu.Barrier()


@pytest.mark.parametrize("asynchrony", ["eager", "late", "random"])
def test_a_signal_before_a_copy_is_complete_is_a_race(asynchrony):
    for seed in SEEDS:
        with pytest.raises(errors.RaceError):
            run(copied(complete=False), *COPY, seed=seed, asynchrony=asynchrony)


def test_a_copy_of_what_threads_store_needs_a_fence():
    for seed in SEEDS:
        with pytest.raises(errors.RaceError, match="not fenced"):
            run(copied(threads=True, fence=False), *COPY, seed=seed)


def test_schedules_give_one_result():
    x, result = run(exchange(), schedules=4)
    np.testing.assert_array_equal(result, np.roll(x, -1, 0))

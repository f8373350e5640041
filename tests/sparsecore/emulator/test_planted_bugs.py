# SPDX-License-Identifier: Apache-2.0
"""Kernels with one mistake each, and the report of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_gpu import errors
from pallas_gpu import sparsecore as plsc
from tests.support.refusal import refused_by
from tests.support.sparsecore.kernels import emulate

X = np.arange(128 * 16, dtype=np.float32)
TABLE = np.arange(64 * 128, dtype=np.float32).reshape(64, 128)
ROWS = np.arange(16, dtype=np.int32)
VECTOR, MATRIX = plsc.VMEM((128,), jnp.float32), plsc.VMEM((16, 128), jnp.float32)
INDICES, SEM = plsc.VMEM((16,), jnp.int32), plsc.SemaphoreType.DMA
SIGNAL = plsc.SemaphoreType.REGULAR
SHARED = plsc.VMEM_SHARED((16, 128), jnp.float32)
one = functools.partial(emulate, subcores=1)
SCHEDULES = [
    {"seed": seed, "asynchrony": mode}
    for seed in range(2)
    for mode in ("random", "late", "eager")
]
BUGS: dict[str, Callable[..., Any]] = {}


def planted(launch: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """`refused_by`, for one schedule; the others are those of the last test."""

    def decorate(body: Callable[..., None]) -> Any:
        BUGS[body.__name__] = functools.partial(launch, body, *args, **options)
        return refused_by(launch, *args, **options)(body)

    return decorate


@planted(one, [X], X[:128], VECTOR)
def test_memory_that_nobody_has_written_is_read(x, o, v):
    plsc.sync_copy(v, o)  # HERE


@planted(one, [X], X[:128], VECTOR)
def test_a_branch_depends_on_memory_that_nobody_has_written(x, o, v):
    @plsc.when(jnp.max(v[plsc.ds(0, 16)]) > 0)  # HERE
    def _():
        v[plsc.ds(0, 16)] = jnp.zeros(16, jnp.float32)


@planted(one, [X], X[:128], VECTOR, SEM)
def test_a_subcore_reads_before_the_copy_has_been_waited_for(x, o, v, sem):
    copy = plsc.async_copy(x.at[plsc.ds(0, 128)], v, sem)
    v[plsc.ds(0, 16)] = v[plsc.ds(0, 16)] + 1  # HERE
    copy.wait()
    plsc.sync_copy(v, o)


@planted(one, [X], X[:128], VECTOR, SEM)
def test_a_subcore_overwrites_the_source_of_a_copy_in_flight(x, o, v, sem):
    plsc.sync_copy(x.at[plsc.ds(0, 128)], v)
    copy = plsc.async_copy(v, o, sem)
    v[plsc.ds(16, 16)] = jnp.zeros(16, jnp.float32)  # HERE
    copy.wait()


@planted(one, [X], X[:128], VECTOR, SEM((2,)))
def test_two_copies_write_the_same_elements(x, o, v, sem):
    first = plsc.async_copy(x.at[plsc.ds(0, 128)], v, sem.at[0])
    second = plsc.async_copy(x.at[plsc.ds(128, 128)], v, sem.at[1])  # HERE
    first.wait()
    second.wait()
    plsc.sync_copy(v, o)


@planted(one, [X], X[:256], plsc.VMEM((2, 128), jnp.float32), SEM)
def test_one_of_two_copies_on_a_semaphore_has_been_waited_for(x, o, v, sem):
    first = plsc.async_copy(x.at[plsc.ds(0, 128)], v.at[0], sem)
    second = plsc.async_copy(x.at[plsc.ds(128, 128)], v.at[1], sem)
    first.wait()
    v[0, plsc.ds(0, 16)] = v[0, plsc.ds(0, 16)] + 1  # HERE
    second.wait()


@planted(emulate, [X], X, VECTOR, SHARED)
def test_a_subcore_reads_what_another_one_writes_in_shared_memory(x, o, v, shared):
    s = lax.axis_index("s")
    plsc.sync_copy(x.at[plsc.ds(s * 128, 128)], v)
    plsc.sync_copy(v, shared.at[s])
    plsc.subcore_barrier()
    plsc.sync_copy(v, shared.at[s])
    plsc.sync_copy(shared.at[(s + 1) % 16], v)  # HERE
    plsc.sync_copy(v, o.at[plsc.ds(s * 128, 128)])


@planted(emulate, [X], X[:128], VECTOR, cores=2, subcores=1)
def test_two_cores_write_the_same_elements_of_a_result(x, o, v):
    plsc.sync_copy(x.at[plsc.ds(lax.axis_index("c") * 128, 128)], v)
    plsc.sync_copy(v, o)  # HERE


@planted(one, [TABLE, ROWS], TABLE[:16], INDICES, MATRIX, SEM)
def test_indices_are_overwritten_while_a_copy_may_read_them(t, r, o, i, v, sem):
    plsc.sync_copy(r, i)
    copy = plsc.async_copy(t.at[i], v, sem)
    i[...] = jnp.zeros(16, jnp.int32)  # HERE
    copy.wait()
    plsc.sync_copy(v, o)


@planted(one, [TABLE[:16], ROWS // 2], TABLE[:16], INDICES, MATRIX)
def test_a_plain_scatter_names_a_row_twice(t, r, o, i, v):
    plsc.sync_copy(r, i)
    plsc.sync_copy(t, v)
    plsc.sync_copy(v, o.at[i])  # HERE


@planted(one, [X], X[:128], VECTOR, SEM)
def test_nobody_waits_for_a_copy(x, o, v, sem):
    plsc.sync_copy(x.at[plsc.ds(0, 128)], v)
    plsc.async_copy(v, o, sem)  # HERE


@planted(one, [X], X[:128], VECTOR, SIGNAL)
def test_a_semaphore_is_not_zero_at_the_end(x, o, v, sem):
    plsc.sync_copy(x.at[plsc.ds(0, 128)], v)
    plsc.semaphore_signal(sem, 2)  # HERE
    plsc.semaphore_wait(sem, 1)
    plsc.sync_copy(v, o)


@planted(one, [X], X[:128], VECTOR, SEM)
def test_a_wait_is_for_less_than_what_was_copied(x, o, v, sem):
    plsc.async_copy(x.at[plsc.ds(0, 128)], v, sem)  # HERE
    plsc.make_async_copy(x.at[plsc.ds(0, 64)], v.at[plsc.ds(0, 64)], sem).wait()


@planted(one, [X], X[:128], VECTOR, SEM)
def test_a_wait_has_no_copy(x, o, v, sem):
    plsc.make_async_copy(x.at[plsc.ds(0, 128)], v, sem).wait()  # HERE


@planted(emulate, [X], X[:128], VECTOR, subcores=4)
def test_a_barrier_that_not_all_subcores_reach(x, o, v):
    @plsc.when(lax.axis_index("s") > 0)
    def _():
        plsc.subcore_barrier()  # HERE


@planted(emulate, [X], X[:128], SIGNAL, subcores=2)
def test_subcores_wait_for_signals_of_each_other(x, o, sem):
    plsc.semaphore_wait(sem)  # HERE
    plsc.semaphore_signal(sem, subcore_id=1 - lax.axis_index("s"))


@planted(one, [TABLE, ROWS + 60], TABLE[:16], INDICES, MATRIX)
def test_an_index_of_a_copy_is_outside(t, r, o, i, v):
    plsc.sync_copy(r, i)
    plsc.sync_copy(t.at[i], v)  # HERE


@planted(one, [X], X[:128], VECTOR, INDICES)
def test_an_index_of_a_gather_is_outside(x, o, v, i):
    plsc.sync_copy(x.at[plsc.ds(0, 128)], v)
    v[plsc.ds(0, 16)] = plsc.load_gather(v, [jnp.arange(16) * 9])  # HERE


@planted(emulate, [X], X[:128], VECTOR, subcores=2)
def test_a_position_in_hbm_is_not_a_multiple_of_32_bytes(x, o, v):
    plsc.sync_copy(x.at[plsc.ds(lax.axis_index("s") * 4, 128)], v)  # HERE


@planted(emulate, [X], X[:128], VECTOR, subcores=2)
def test_a_load_exceeds_its_array(x, o, v):
    s = lax.axis_index("s")
    plsc.sync_copy(x.at[plsc.ds(s * 128, 128)], v)
    v[plsc.ds(0, 16)] = v[plsc.ds(s * 120, 16)]  # HERE


@planted(one, [X], X[:128], VECTOR)
def test_iterations_of_a_parallel_loop_conflict(x, o, v):
    plsc.sync_copy(x.at[plsc.ds(0, 128)], v)

    @plsc.parallel_loop(0, 112, step=16)
    def _(i):
        v[plsc.ds(i + 16, 16)] = v[plsc.ds(i, 16)]  # HERE


@planted(one, [X], X[:128], VECTOR)
def test_a_step_of_a_parallel_loop_is_not_positive(x, o, v):
    plsc.sync_copy(x.at[plsc.ds(0, 128)], v)

    @plsc.parallel_loop(0, 64, step=lax.axis_index("s"))  # HERE
    def _(i):
        v[plsc.ds(i, 16)] = jnp.zeros(16, jnp.float32)


@planted(one, [X], X[:128], VECTOR)
def test_loops_in_iterations_of_a_parallel_loop_conflict(x, o, v):
    plsc.sync_copy(x.at[plsc.ds(0, 128)], v)

    @plsc.parallel_loop(0, 2)
    def _(i):
        @plsc.parallel_loop(0, 128, step=16)
        def _(j):
            v[plsc.ds(j, 16)] = v[plsc.ds(j, 16)] + 1  # HERE


@planted(one, [X], X[:128], VECTOR, plsc.VMEM((2, 128), jnp.float32), SEM((2,)))
def test_a_copy_of_one_iteration_reads_what_the_next_one_writes(x, o, v, w, sem):
    plsc.sync_copy(x.at[plsc.ds(0, 128)], v)

    @plsc.parallel_loop(0, 2)
    def _(i):
        v[plsc.ds(0, 16)] = jnp.full(16, i * 1.0)  # HERE
        plsc.async_copy(v, o, sem.at[i]).wait()


@planted(one, [X], X[:128], VECTOR)
def test_lanes_of_two_iterations_are_scattered_to_one_place(x, o, v):
    plsc.sync_copy(x.at[plsc.ds(0, 128)], v)

    @plsc.parallel_loop(0, 2)
    def _(i):
        value = jnp.full(16, i * 1.0)
        plsc.store_scatter(v, [jnp.arange(16) * 2 + i * 30], value)  # HERE


@planted(one, [X], X[:128], VECTOR, plsc.VMEM((128,), jnp.float32))
def test_memories_that_no_copy_connects(x, o, v, w):
    plsc.sync_copy(x.at[plsc.ds(0, 128)], v)
    plsc.sync_copy(v, w)  # HERE


@planted(one, [X], X)
def test_a_result_with_elements_that_nobody_has_stored(x, o):
    plsc.run_scoped(lambda v: plsc.sync_copy(x.at[plsc.ds(0, 128)], v), VECTOR)  # HERE


@planted(emulate, [X], X[:32], VECTOR, plsc.SMEM((1,), jnp.int32), subcores=2)
def test_a_word_is_read_while_another_subcore_adds_to_it(x, o, v, counter):
    counter[0] = 0
    plsc.subcore_barrier()

    @plsc.when(lax.axis_index("s") == 0)
    def _():
        v[plsc.ds(0, 16)] = jnp.full(16, counter[0] * 1.0)  # HERE

    @plsc.when(lax.axis_index("s") == 1)
    def _():
        plsc.fetch_and_add(counter.at[0], 1, subcore_id=0)  # HERE


@planted(emulate, [X], X[:128], SHARED, scalar=True, cores=2)
def test_scalar_subcores_of_two_cores_write_the_same_elements(x, o, shared):
    plsc.sync_copy(x.at[plsc.ds(lax.axis_index("c") * 128, 128)], shared.at[0])
    plsc.sync_copy(shared.at[0], o)  # HERE


@planted(one, [X], X[:128], SEM)
def test_memory_is_freed_while_a_copy_reads_it(x, o, sem):
    def body(v):
        plsc.sync_copy(x.at[plsc.ds(0, 128)], v)
        plsc.async_copy(v, o, sem)  # HERE

    plsc.run_scoped(body, VECTOR)
    plsc.make_async_copy(x.at[plsc.ds(0, 128)], o, sem).wait()


@planted(one, [TABLE, ROWS], TABLE[:16], INDICES, MATRIX, SHARED)
def test_rows_are_added_to_memory_that_nobody_has_written(t, r, o, i, v, shared):
    plsc.sync_copy(r, i)
    plsc.sync_copy(t.at[plsc.ds(0, 16)], v)
    plsc.sync_copy(v, shared.at[i], add=True)  # HERE


@planted(emulate, [X], X[:128], SIGNAL, subcores=2)
def test_a_signal_is_for_a_subcore_that_does_not_exist(x, o, sem):
    plsc.semaphore_signal(sem, subcore_id=lax.axis_index("s") + 1)  # HERE
    plsc.semaphore_wait(sem)


def mistake(bug: str, **schedule: Any) -> str:
    """The kind of what a schedule reports."""
    try:
        BUGS[bug](**schedule)
    except errors.PallasGpuError as error:
        return error.finding.rule.id
    return "nothing"


FIRST = functools.cache(mistake)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_every_mistake_is_found_in_every_schedule(schedule):
    assert {bug: mistake(bug, **schedule) for bug in BUGS} == {
        bug: FIRST(bug) for bug in BUGS
    }

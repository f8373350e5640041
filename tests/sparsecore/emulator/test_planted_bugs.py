# SPDX-License-Identifier: Apache-2.0
"""Kernels with one mistake each, and the report of it."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax

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


@refused_by(one, [X], X[:128], VECTOR)
def test_memory_that_nobody_has_written_is_read(x, o, v):
    plsc.sync_copy(v, o)  # HERE


@refused_by(one, [X], X[:128], VECTOR)
def test_a_branch_depends_on_memory_that_nobody_has_written(x, o, v):
    @plsc.when(jnp.max(v[plsc.ds(0, 16)]) > 0)  # HERE
    def _():
        v[plsc.ds(0, 16)] = jnp.zeros(16, jnp.float32)


@refused_by(one, [X], X[:128], VECTOR, SEM)
def test_a_subcore_reads_before_the_copy_has_been_waited_for(x, o, v, sem):
    copy = plsc.async_copy(x.at[plsc.ds(0, 128)], v, sem)
    v[plsc.ds(0, 16)] = v[plsc.ds(0, 16)] + 1  # HERE
    copy.wait()
    plsc.sync_copy(v, o)


@refused_by(one, [X], X[:128], VECTOR, SEM)
def test_a_subcore_overwrites_the_source_of_a_copy_in_flight(x, o, v, sem):
    plsc.sync_copy(x.at[plsc.ds(0, 128)], v)
    copy = plsc.async_copy(v, o, sem)
    v[plsc.ds(16, 16)] = jnp.zeros(16, jnp.float32)  # HERE
    copy.wait()


@refused_by(one, [X], X[:128], VECTOR, SEM((2,)))
def test_two_copies_write_the_same_elements(x, o, v, sem):
    first = plsc.async_copy(x.at[plsc.ds(0, 128)], v, sem.at[0])
    second = plsc.async_copy(x.at[plsc.ds(128, 128)], v, sem.at[1])  # HERE
    first.wait()
    second.wait()
    plsc.sync_copy(v, o)


@refused_by(one, [X], X[:256], plsc.VMEM((2, 128), jnp.float32), SEM)
def test_one_of_two_copies_on_a_semaphore_has_been_waited_for(x, o, v, sem):
    first = plsc.async_copy(x.at[plsc.ds(0, 128)], v.at[0], sem)
    second = plsc.async_copy(x.at[plsc.ds(128, 128)], v.at[1], sem)
    first.wait()
    v[0, plsc.ds(0, 16)] = v[0, plsc.ds(0, 16)] + 1  # HERE
    second.wait()


@refused_by(emulate, [X], X, VECTOR, SHARED)
def test_a_subcore_reads_what_another_one_writes_in_shared_memory(x, o, v, shared):
    s = lax.axis_index("s")
    plsc.sync_copy(x.at[plsc.ds(s * 128, 128)], v)
    plsc.sync_copy(v, shared.at[s])
    plsc.sync_copy(shared.at[(s + 1) % 16], v)  # HERE
    plsc.sync_copy(v, o.at[plsc.ds(s * 128, 128)])


@refused_by(emulate, [X], X[:128], VECTOR, cores=2, subcores=1)
def test_two_cores_write_the_same_elements_of_a_result(x, o, v):
    plsc.sync_copy(x.at[plsc.ds(lax.axis_index("c") * 128, 128)], v)
    plsc.sync_copy(v, o)  # HERE


@refused_by(one, [TABLE, ROWS], TABLE[:16], INDICES, MATRIX, SEM)
def test_indices_are_overwritten_while_a_copy_may_read_them(t, r, o, i, v, sem):
    plsc.sync_copy(r, i)
    copy = plsc.async_copy(t.at[i], v, sem)
    i[...] = jnp.zeros(16, jnp.int32)  # HERE
    copy.wait()
    plsc.sync_copy(v, o)


@refused_by(one, [TABLE[:16], ROWS // 2], TABLE[:16], INDICES, MATRIX)
def test_a_plain_scatter_names_a_row_twice(t, r, o, i, v):
    plsc.sync_copy(r, i)
    plsc.sync_copy(t, v)
    plsc.sync_copy(v, o.at[i])  # HERE


@refused_by(one, [X], X[:128], VECTOR, SEM)
def test_nobody_waits_for_a_copy(x, o, v, sem):
    plsc.sync_copy(x.at[plsc.ds(0, 128)], v)
    plsc.async_copy(v, o, sem)  # HERE


@refused_by(one, [X], X[:128], VECTOR, SIGNAL)
def test_a_semaphore_is_not_zero_at_the_end(x, o, v, sem):
    plsc.sync_copy(x.at[plsc.ds(0, 128)], v)
    plsc.semaphore_signal(sem, 2)  # HERE
    plsc.semaphore_wait(sem, 1)
    plsc.sync_copy(v, o)


@refused_by(one, [X], X[:128], VECTOR, SEM)
def test_a_wait_is_for_less_than_what_was_copied(x, o, v, sem):
    plsc.async_copy(x.at[plsc.ds(0, 128)], v, sem)  # HERE
    plsc.make_async_copy(x.at[plsc.ds(0, 64)], v.at[plsc.ds(0, 64)], sem).wait()


@refused_by(one, [X], X[:128], VECTOR, SEM)
def test_a_wait_has_no_copy(x, o, v, sem):
    plsc.make_async_copy(x.at[plsc.ds(0, 128)], v, sem).wait()  # HERE


@refused_by(emulate, [X], X[:128], VECTOR, subcores=4)
def test_a_barrier_that_not_all_subcores_reach(x, o, v):
    @plsc.when(lax.axis_index("s") > 0)
    def _():
        plsc.subcore_barrier()  # HERE


@refused_by(emulate, [X], X[:128], SIGNAL, subcores=2)
def test_subcores_wait_for_signals_of_each_other(x, o, sem):
    plsc.semaphore_wait(sem)  # HERE
    plsc.semaphore_signal(sem, subcore_id=1 - lax.axis_index("s"))


@refused_by(one, [TABLE, ROWS + 60], TABLE[:16], INDICES, MATRIX)
def test_an_index_of_a_copy_is_outside(t, r, o, i, v):
    plsc.sync_copy(r, i)
    plsc.sync_copy(t.at[i], v)  # HERE


@refused_by(one, [X], X[:128], VECTOR, INDICES)
def test_an_index_of_a_gather_is_outside(x, o, v, i):
    plsc.sync_copy(x.at[plsc.ds(0, 128)], v)
    v[plsc.ds(0, 16)] = plsc.load_gather(v, [jnp.arange(16) * 9])  # HERE


@refused_by(emulate, [X], X[:128], VECTOR, subcores=2)
def test_a_position_in_hbm_is_not_a_multiple_of_32_bytes(x, o, v):
    plsc.sync_copy(x.at[plsc.ds(lax.axis_index("s") * 4, 128)], v)  # HERE


@refused_by(emulate, [X], X[:128], VECTOR, subcores=2)
def test_a_load_exceeds_its_array(x, o, v):
    s = lax.axis_index("s")
    plsc.sync_copy(x.at[plsc.ds(s * 128, 128)], v)
    v[plsc.ds(0, 16)] = v[plsc.ds(s * 120, 16)]  # HERE


@refused_by(one, [X], X[:128], VECTOR)
def test_iterations_of_a_parallel_loop_conflict(x, o, v):
    plsc.sync_copy(x.at[plsc.ds(0, 128)], v)

    @plsc.parallel_loop(0, 112, step=16)
    def _(i):
        v[plsc.ds(i + 16, 16)] = v[plsc.ds(i, 16)]  # HERE


@refused_by(one, [X], X[:128], VECTOR, plsc.VMEM((128,), jnp.float32))
def test_memories_that_no_copy_connects(x, o, v, w):
    plsc.sync_copy(x.at[plsc.ds(0, 128)], v)
    plsc.sync_copy(v, w)  # HERE


@refused_by(one, [X], X)
def test_a_result_with_elements_that_nobody_has_stored(x, o):
    plsc.run_scoped(lambda v: plsc.sync_copy(x.at[plsc.ds(0, 128)], v), VECTOR)  # HERE

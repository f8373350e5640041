# SPDX-License-Identifier: Apache-2.0
"""Checks of kernels for SparseCores: several schedules, and all orders."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import sparsecore as plsc
from tests.support.sparsecore.kernels import kernel

X = np.arange(256, dtype=np.float32).reshape(2, 128)
ROW, SIGNAL = plsc.VMEM((128,), jnp.float32), plsc.SemaphoreType.REGULAR


def exchange(x, o, v, sem):
    s = lax.axis_index("s")
    plsc.sync_copy(x.at[s], v)
    plsc.sync_copy(v, o.at[s])
    plsc.semaphore_signal(sem, subcore_id=1 - s)
    plsc.semaphore_wait(sem)


def meet(x, o, v, shared):
    s = lax.axis_index("s")
    plsc.sync_copy(x.at[s], shared.at[s])
    plsc.subcore_barrier()
    plsc.sync_copy(shared.at[1 - s], v)
    plsc.sync_copy(v, o.at[s])


def count(x, o, v, counter):
    counter[0] = 0
    plsc.subcore_barrier()
    row = plsc.fetch_and_add(counter.at[0], 1, subcore_id=0)
    plsc.sync_copy(x.at[row], v)
    plsc.sync_copy(v, o.at[row])


@pytest.mark.parametrize(
    ("body", "scratch", "orders"),
    [
        (exchange, SIGNAL, 1),
        (meet, plsc.VMEM_SHARED((2, 128), jnp.float32), 1),
        # Either of the two subcores is first.
        (count, plsc.SMEM((1,), jnp.int32), 2),
    ],
)
def test_all_orders_of_a_correct_kernel_are_clean(body, scratch, orders):
    run = kernel(body, X, ROW, scratch, subcores=2)
    verdict = plgpu.check(run, orders="all")(X)
    assert verdict.clean
    (coverage,) = verdict.coverage
    assert coverage.complete
    assert coverage.orders == orders
    assert coverage.executed == coverage.equations


def test_a_check_goes_on_after_a_mistake():
    def body(x, o, v, w):
        plsc.sync_copy(x.at[0], v)
        v[plsc.ds(0, 16)] = w[plsc.ds(0, 16)] + 1
        plsc.sync_copy(v, o.at[lax.axis_index("s") // 2])

    run = kernel(body, X, ROW, ROW, subcores=2)
    found = plgpu.check(run, orders=4)(X).findings
    assert {f.rule.id for f in found} == {
        "uninitialized-read",
        "race",
        "unwritten-result",
    }


def test_the_number_that_is_taken_from_a_counter_may_decide_a_result():
    def body(o, v, counter):
        counter[0] = 0
        plsc.subcore_barrier()
        number = plsc.fetch_and_add(counter.at[0], 1, subcore_id=0)
        v[...] = jnp.full(16, number, jnp.int32)
        plsc.sync_copy(v, o.at[plsc.ds(lax.axis_index("s") * 16, 16)])

    out, vector = np.zeros(32, np.int32), plsc.VMEM((16,), jnp.int32)
    run = kernel(body, out, vector, plsc.SMEM((1,), jnp.int32), subcores=2)
    found = plgpu.check(run, orders="all")().findings
    assert [f.rule.id for f in found] == ["schedule-dependent"]


def test_upstreams_way_accepts_what_is_left_at_the_end():
    def body(x, o, v, sem, copied):
        plsc.sync_copy(x.at[0], v)
        plsc.semaphore_signal(sem)
        plsc.async_copy(v, o.at[0], copied)

    scratch = ROW, SIGNAL, plsc.SemaphoreType.DMA
    run = kernel(body, X, *scratch, subcores=1, like_upstream=True)
    np.testing.assert_array_equal(run(X)[0], X[0])


def test_a_gather_outside_of_its_array_may_have_no_value():
    def body(x, o, v):
        plsc.sync_copy(x.at[0], v)
        at = jnp.arange(16) * 10
        value = plsc.load_gather(v, [at])
        v[plsc.ds(0, 16)] = jnp.where(at < 128, value, 0)
        plsc.sync_copy(v, o.at[0])
        plsc.sync_copy(v, o.at[1])

    run = kernel(body, X, ROW, subcores=1, out_of_bounds_reads="uninitialized")
    expected = [*range(0, 128, 10), 0, 0, 0]
    np.testing.assert_array_equal(run(X)[1, :16], expected)

# SPDX-License-Identifier: Apache-2.0
"""`check(f, orders="all")`: every order of a launch's synchronization."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import ops
from tests.support import rings

SHAPE = jax.ShapeDtypeStruct((8, 128), np.float32)


def test_a_ring_of_four_slots_has_one_order():
    verdict = plgpu.check(rings.shared_ring(None), orders="all")(SHAPE)
    assert verdict.clean, verdict
    (kernel,) = verdict.coverage
    assert kernel.complete and kernel.orders == 1
    assert "all 1 orders of this input" in str(verdict)
    assert verdict.to_dict()["coverage"][0]["complete"]


def test_an_overtaking_that_seeds_hardly_show_is_found():
    kernel = rings.shared_ring(None, slots=6, counts=True, early=7)
    assert plgpu.check(kernel, orders=20)(SHAPE).clean
    verdict = plgpu.check(kernel, orders="all")(SHAPE)
    assert {f.rule.id for f in verdict.findings} & {"race", "missing-wait"}, verdict
    assert verdict.findings[0].reproduce == 'orders="all"'
    assert not verdict.coverage[0].complete


def test_a_budget_ends_the_exploration():
    kernel = rings.shared_ring(None, slots=3, counts=True)
    verdict = plgpu.check(kernel, orders="all", seconds=1e-9)(SHAPE)
    (found,) = verdict.coverage
    assert not found.complete and found.orders < 10
    assert f"{found.orders} of the orders of this input" in str(verdict)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32])
def test_integers_that_depend_on_the_order_are_a_finding(dtype):
    def body(o, box, ready):
        wg = jax.lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def _():
            box[...] = jnp.zeros(1, dtype)

        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)
        old = plgpu.atomic_add(box, jnp.ones(1, dtype))

        @plgpu.when(wg == 1)
        def _():
            o[...] = old

    kernel = plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((1,), dtype), num_threads=2,
        thread_name="wg",
        scratch_types=[plgpu.SMEM((1,), dtype), plgpu.Barrier(num_arrivals=2)],
    )  # fmt: skip
    verdict = plgpu.check(kernel, orders="all")()
    rules = [f.rule.id for f in verdict.findings]
    assert rules == (["schedule-dependent"] if dtype == jnp.int32 else []), verdict


def test_a_barrier_of_a_cluster_is_one_of_its_orders():
    def body(x, o):
        c = jax.lax.axis_index("c")
        plgpu.cluster_sync()
        plgpu.cluster_sync()
        o[c] = x[c]

    kernel = plgpu.kernel(
        body, out_type=SHAPE, cluster=(2,), cluster_names=("c",),
        interpret=plgpu.InterpretParams(partial_results=True),
    )  # fmt: skip
    verdict = plgpu.check(kernel, orders="all")(SHAPE)
    assert verdict.clean and verdict.coverage[0].complete, verdict


def test_the_budget_ends_a_long_order_too():
    def body(o, barrier):
        @plgpu.when(True)
        def _():
            def step(i, c):
                plgpu.barrier_arrive(barrier)
                plgpu.barrier_wait(barrier)
                return c

            o[...] = jax.lax.fori_loop(0, 3000, step, jnp.zeros(128))

    kernel = plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((128,), np.float32),
        scratch_types=[plgpu.Barrier()],
    )  # fmt: skip
    (found,) = plgpu.check(kernel, orders="all", seconds=1)().coverage
    # One schedule has ended, and no order has.
    assert (found.schedules, found.orders, found.complete) == (1, 0, False)


def test_ready_kernels_are_clean_in_all_orders():
    shapes = [jax.ShapeDtypeStruct(s, np.float16) for s in ((512, 256), (256, 256))]
    verdict = plgpu.check(ops.matmul, orders="all")(*shapes)
    assert verdict.clean, verdict
    assert verdict.coverage[0].complete

# SPDX-License-Identifier: Apache-2.0
"""A pair of CTAs multiplies twice by tcgen05, what TMA loads and what threads store.

The first left operand comes by TMA, tracked by the leader's barrier; the second one is
stored by the threads of each CTA, which tell the leader. Both products have the same
accumulator, which each CTA reads in between.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.mutations.mutant import Launch, Subject, Switches, Wrong, rows
from tests.support.tensor_pairs import PAIR, PARTITIONED, PairProduct
from tests.support.tensor_products import BLACKWELL, F16

CASE = PairProduct(n=16, k=32, swizzle=64)


def make(m: Switches) -> Launch:
    def body(a, b, out, a_smem, b_smem, acc, loaded, ready, done):
        leads = lax.axis_index("c") == 0

        def multiply(barrier, **options):
            plgpu.tcgen05_mma(  # at: product
                acc, a_smem, b_smem.T, barrier, collective_axis="c", **options
            )

        for src, dst in ((a, a_smem), (b, b_smem)):
            plgpu.copy_gmem_to_smem(  # at: load
                src, dst, loaded, collective_axes="c", leader_tracked=PARTITIONED(0)
            )
        if not m("the leader does not wait for the loads"):
            plgpu.when(leads)(lambda: plgpu.barrier_wait(loaded))
        commits = not m("no commit")
        multiply(done if commits else None, accumulate=m("an accumulator of nothing"))
        if m("the leader alone waits for the product"):
            plgpu.when(leads)(lambda: plgpu.barrier_wait(done))
        elif m("the other alone waits for the product"):
            plgpu.when(~leads)(lambda: plgpu.barrier_wait(done))
        else:
            plgpu.barrier_wait(done)  # at: first wait
        first = plgpu.async_load_tmem(acc)  # at: read
        if m("the other does not wait for its read"):
            plgpu.when(leads)(plgpu.wait_load_tmem)
        else:
            plgpu.wait_load_tmem()
        a_smem[...] = jnp.full(a_smem.shape, 2, F16)  # at: store
        if m("the other has no fence"):
            plgpu.when(leads)(plgpu.commit_smem)
        else:
            plgpu.commit_smem()
        if m("the other does not arrive"):
            plgpu.when(leads)(lambda: plgpu.barrier_arrive(ready))
        else:
            plgpu.barrier_arrive(ready)
        if m("the leader does not wait for the other"):
            plgpu.when(~leads)(lambda: plgpu.barrier_wait(ready))
        elif m("the leader alone waits for the other"):
            plgpu.when(leads)(lambda: plgpu.barrier_wait(ready))
        else:
            plgpu.barrier_wait(ready)  # at: ready
        multiply(done, accumulate=not m("the product is not added"))
        if m("the other does not wait at the end"):
            plgpu.when(leads)(lambda: plgpu.barrier_wait(done))
        else:
            plgpu.barrier_wait(done)
        rows_ = plgpu.ds(lax.axis_index("c") * CASE.m, CASE.m)
        out[rows_] = first + acc[...]  # at: result

    orders = not m("the barrier does not order the tensor core")
    scratch = {
        **CASE.scratch(),
        "ready": plgpu.ClusterBarrier(collective_axes="c", orders_tensor_core=orders),
    }

    a, b = CASE.operands()
    expected = 2 * CASE.expected(a, b) + CASE.expected(np.full_like(a, 2), b)
    return Launch.of(
        body, [a, b], expected, scratch_types=scratch, compiler_params=BLACKWELL, **PAIR
    )


SUBJECT = Subject(
    make,
    (
        *rows(
            "waits",
            ("the leader does not wait for the loads", errors.RaceError, "load"),
            ("the leader alone waits for the product", errors.RaceError, "read"),
            ("the leader alone waits for the product", errors.RaceError, "store"),
            ("the other alone waits for the product", errors.RaceError, "read"),
            ("the other does not wait for its read", errors.RaceError, "read"),
            ("the leader does not wait for the other", errors.RaceError, "store"),
            ("the other does not wait at the end", errors.RaceError, "result"),
        ),
        *rows(
            "fences",
            ("the other has no fence", errors.RaceError, "store"),
            ("the barrier does not order the tensor core", errors.RaceError, "read"),
        ),
        *rows("arrivals", ("the other does not arrive", errors.DeadlockError, "ready")),
        *rows("commits", ("no commit", errors.DeadlockError, "first wait")),
        *rows(
            "initialisation",
            ("an accumulator of nothing", errors.UninitializedReadError, "product"),
            ("the product is not added", Wrong),
        ),
    ),
    variants=("the leader alone waits for the other",),
)

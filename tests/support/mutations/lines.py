# SPDX-License-Identifier: Apache-2.0
"""A row by a bulk copy, a row by cp.async on a barrier, a row that nobody announces."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.mutations.mutant import Launch, Subject, Switches, Wrong, rows

N = 128
F32 = jnp.float32
CP_ASYNC = plgpu.AsyncCopyImplementation.CP_ASYNC


def make(m: Switches) -> Launch:
    def body(x, o, bulk, threads, ready, bulk_full, threads_full):
        threads[...] = jnp.zeros((N,), F32)
        bulk[...] = jnp.zeros((N,), F32)
        if not m("no commit before the copy"):
            plgpu.commit_smem()
        plgpu.copy_gmem_to_smem(x.at[0], bulk, bulk_full)  # at: bulk
        plgpu.copy_gmem_to_smem(
            x.at[0 if m("one row twice") else 1], threads, threads_full,
            implementation=CP_ASYNC,
        )  # fmt: skip
        if m("bytes of nobody"):
            plgpu.barrier_expect(threads_full, 16)  # at: expect
        if not m("no test"):
            lax.while_loop(
                lambda done: ~done,
                lambda done: plgpu.barrier_test(bulk_full),  # at: test
                jnp.bool_(False),
            )
        total = bulk[...]  # at: read bulk
        if not m("no wait for the threads"):
            plgpu.barrier_wait(threads_full)  # at: wait threads
        total += threads[...]  # at: read threads
        plgpu.barrier_arrive(ready, num_arrivals=1 if m("one arrival") else 3)
        plgpu.barrier_wait(ready)  # at: wait ready
        bulk[...] = total
        if not m("no commit"):
            plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(bulk, o.at[0])  # at: store
        if m("the row is used again"):
            bulk[...] = total + 1  # at: spoil
        if not m("no wait for the store"):
            plgpu.wait_smem_to_gmem(0)

    x = np.arange(2 * N, dtype=np.float32).reshape(2, N)
    two = 2 if m("two copies expected") else 1
    return Launch.of(
        body,
        [x],
        x.sum(0, keepdims=True),
        plgpu.SMEM((N,), F32),
        plgpu.SMEM((N,), F32),
        plgpu.Barrier(num_arrivals=3),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=two),
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=m("no commit before the copy")
        ),
    )


RACE = errors.RaceError
SUBJECT = Subject(
    make,
    (
        *rows(
            "waits",
            ("no test", RACE, "bulk", "read bulk"),
            ("no wait for the threads", RACE, "read threads"),
            ("no wait for the store", errors.KernelError, "store"),
        ),
        *rows(
            "commits",
            ("no commit before the copy", RACE, "bulk"),
            ("no commit", RACE, "store"),
        ),
        *rows(
            "counts",
            ("two copies expected", errors.DeadlockError, "wait threads"),
            ("one arrival", errors.DeadlockError, "wait ready"),
            ("bytes of nobody", errors.BarrierError, "expect"),
            ("bytes of nobody", errors.DeadlockError, "wait threads"),
        ),
        *rows("offsets", ("one row twice", Wrong)),
        *rows("two writers", ("the row is used again", RACE, "spoil")),
    ),
)

# SPDX-License-Identifier: Apache-2.0
"""A product in a pipeline whose body releases the blocks of earlier steps."""

from __future__ import annotations

import functools

import numpy as np

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.mutations.mutant import Launch, Subject, Switches, rows

SIZE, DEPTH, STEPS, SLOTS = 64, 64, 6, 3
# Of the left operand the pipeline keeps a block for one step, of the right for two.
DELAYS = (1, 2)
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def make(m: Switches) -> Launch:
    def step(indices, a, b, *consumed_and_acc):
        (k,), (*consumed, acc) = indices, consumed_and_acc
        plgpu.wgmma(acc, a, b)  # at: wgmma
        plgpu.wgmma_wait(2 if m("wait leaves two products") else 1)
        for barrier, delay in zip(consumed, DELAYS, strict=True):
            release = k >= delay
            if m("arrival in the first step"):
                release = k >= 0
            if m("arrival a step too early"):
                release = k >= delay - 1
            if m("arrival missing"):
                release = release & (k != delay)
            plgpu.barrier_arrive(barrier, predicate=release)  # at: release
            if m("arrive twice"):
                plgpu.barrier_arrive(barrier, predicate=release)  # at: again

        return acc

    def body(a, b, o):
        def context(pipeline):
            def scope(acc):
                pipeline(acc)
                o[...] = acc[...]

            plgpu.run_scoped(scope, plgpu.ACC((SIZE, SIZE)))

        spec = functools.partial(plgpu.BlockSpec, transforms=TILED)
        left, right = DELAYS
        pipeline = plgpu.emit_pipeline_warp_specialized(
            step, grid=(STEPS,),
            in_specs=[
                spec((SIZE, DEPTH), lambda k: (0, k), delay_release=left),  # at: a
                spec((DEPTH, SIZE), lambda k: (k, 0), delay_release=right),
            ],
            max_concurrent_steps=SLOTS, manual_consumed_barriers=True,
            compute_context=context, num_compute_wgs=1, memory_registers=40,
            wg_axis="wg",
        )  # fmt: skip
        pipeline(a, b)

    rng = np.random.default_rng(0)
    a = rng.integers(-2, 3, (SIZE, STEPS * DEPTH)).astype(np.float16)
    b = rng.integers(-2, 3, (STEPS * DEPTH, SIZE)).astype(np.float16)
    expected = a.astype(np.float32) @ b.astype(np.float32)
    return Launch.of(body, [a, b], expected, threads={"wg": 2})


SUBJECT = Subject(
    make,
    rows(
        "arrivals",
        ("arrival in the first step", errors.OutOfBoundsError, "release"),
        ("arrival a step too early", errors.OutOfBoundsError, "release"),
        ("arrival missing", errors.DeadlockError),
        ("arrive twice", errors.BarrierError, "again"),
    )
    + rows("waits", ("wait leaves two products", errors.RaceError, "wgmma", "a")),
)

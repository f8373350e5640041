# SPDX-License-Identifier: Apache-2.0
"""Pipelines of products by tcgen05: the target follows from the body."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import everywhere
from tests.support.entry_kernels import f32

STEPS, K = 4, 64
TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
SCRATCH = (
    plgpu.TMEM((128, 128), jnp.float32),
    plgpu.Barrier(num_barriers=2, orders_tensor_core=True),
)


def operands():
    rng = np.random.default_rng(0)
    a, b = rng.integers(-4, 5, (2, 128, STEPS * K)).astype(np.float16)
    return a, np.ascontiguousarray(b.T)


def blocks(delay):
    spec = functools.partial(
        plgpu.BlockSpec, transforms=TRANSFORMS, delay_release=delay
    )
    return [spec((128, K), lambda k: (0, k)), spec((K, 128), lambda k: (k, 0))]


def check(make, **options):
    a, b = operands()
    expected = a.astype(np.float32) @ b.astype(np.float32)
    everywhere.check(make, [a, b], expected, on_gpu=False, **options)


def multiply(k, a_block, b_block, acc, done, consumed=()):
    """Starts the product of a step, and waits for that of the step before."""
    slot = done.at[lax.rem(k, 2)]
    plgpu.tcgen05_mma(acc, a_block, b_block, slot, accumulate=k > 0)

    @plgpu.when(k > 0)
    def _():
        plgpu.barrier_wait(done.at[lax.rem(k - 1, 2)])
        for barrier in consumed:
            plgpu.barrier_arrive(barrier)


def multiplied(delay):
    """A product of one warpgroup, of which one step is in flight."""

    def body(a, b, o, acc, done):
        def step(indices, a_block, b_block):
            (k,) = indices
            multiply(k, a_block, b_block, acc, done)

            @plgpu.when(k == STEPS - 1)
            def _():
                plgpu.barrier_wait(done.at[lax.rem(k, 2)])

        plgpu.emit_pipeline(
            step, grid=(STEPS,), in_specs=blocks(delay), max_concurrent_steps=2
        )(a, b)
        o[...] = plgpu.async_load_tmem(acc)

    return everywhere.kernel(body, f32(128, 128), *SCRATCH)


def test_a_delayed_pipeline_keeps_products_in_flight():
    check(multiplied(1))


def test_a_product_in_flight_needs_a_delayed_release():
    with pytest.raises(errors.RaceError):
        check(multiplied(0))


@pytest.mark.parametrize("manual", [False, True])
def test_a_warpgroup_multiplies_while_another_one_copies(manual):
    def body(a, b, o, acc, done):
        def step(indices, a_block, b_block, *consumed):
            multiply(*indices, a_block, b_block, acc, done, consumed)

        plgpu.emit_pipeline_warp_specialized(
            step, grid=(STEPS,), in_specs=blocks(1), max_concurrent_steps=2,
            manual_consumed_barriers=manual, num_compute_wgs=1, wg_axis="wg",
            memory_registers=40,
        )(a, b)  # fmt: skip

        @plgpu.when(lax.axis_index("wg") == 0)
        def _():
            plgpu.barrier_wait(done.at[(STEPS - 1) % 2])
            o[...] = plgpu.async_load_tmem(acc)

    check(everywhere.kernel(body, f32(128, 128), *SCRATCH, threads={"wg": 2}))


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_a_delayed_pipeline_without_products_runs_on_any_target(target):
    rows = functools.partial(plgpu.BlockSpec, (8, 128), lambda i: (i, 0))

    def double(_, x, o):
        o[...] = 2 * x[...]

    def body(x, o):
        plgpu.emit_pipeline(
            double, grid=(8,), in_specs=[rows(delay_release=1)], out_specs=[rows()],
            max_concurrent_steps=2,
        )(x, o)  # fmt: skip

    x = np.arange(64 * 128, dtype=np.float32).reshape(64, 128)
    everywhere.check(
        everywhere.kernel(body, x, target=target), [x], 2 * x, on_gpu=False
    )

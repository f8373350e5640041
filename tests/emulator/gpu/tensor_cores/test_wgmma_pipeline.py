# SPDX-License-Identifier: Apache-2.0
"""A matmul as it is written for Hopper: one warpgroup copies, two multiply."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support import host
from tests.support.refusal import refused

F16 = jnp.float16
M, N, K = 256, 128, 256
ROWS, DEPTH, SLOTS = 64, 64, 2
STEPS = K // DEPTH
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def produce(a, b, sa, sb, full, empty):
    rows = plgpu.ds(lax.axis_index("i") * 2 * ROWS, 2 * ROWS)

    def turn(k, _):
        slot = lax.rem(k, SLOTS)

        @plgpu.when(k >= SLOTS)
        def _():
            plgpu.barrier_wait(empty.at[slot])

        at = plgpu.ds(k * DEPTH, DEPTH)
        plgpu.copy_gmem_to_smem(a.at[rows, at], sa.at[slot], full.at[slot])
        plgpu.copy_gmem_to_smem(b.at[at], sb.at[slot], full.at[slot])

    lax.fori_loop(0, STEPS, turn, None)


def consume(o, sa, sb, full, empty, groups_left):
    """`groups_left` products may be under way when the slot before is given back."""
    mine = plgpu.ds(lax.axis_index("wg") * ROWS, ROWS)

    def scope(acc):
        def turn(k, _):
            slot = lax.rem(k, SLOTS)
            plgpu.barrier_wait(full.at[slot])
            plgpu.wgmma(acc, sa.at[slot, mine], sb.at[slot])
            plgpu.wgmma_wait(groups_left)

            @plgpu.when(k > 0)
            def _():
                plgpu.barrier_arrive(empty.at[lax.rem(k - 1, SLOTS)])

        lax.fori_loop(0, STEPS, turn, None)
        return acc[...]

    row = (2 * lax.axis_index("i") + lax.axis_index("wg")) * ROWS
    o[plgpu.ds(row, ROWS)] = plgpu.run_scoped(scope, plgpu.ACC((ROWS, N)))


def matmul(groups_left, **interpret):
    def body(a, b, o, sa, sb, full, empty):
        wg = lax.axis_index("wg")

        @plgpu.when(wg == 2)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            produce(a, b, sa, sb, full, empty)

        @plgpu.when(wg < 2)
        def _():
            plgpu.set_max_registers(232, action="increase")
            consume(o, sa, sb, full, empty, groups_left)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((M, N), jnp.float32),
        scratch_types=[
            plgpu.SMEM((SLOTS, 2 * ROWS, DEPTH), F16, transforms=TILED),
            plgpu.SMEM((SLOTS, DEPTH, N), F16, transforms=TILED),
            plgpu.Barrier(num_barriers=SLOTS, num_arrivals=2),
            plgpu.Barrier(num_barriers=SLOTS, num_arrivals=2),
        ],
        grid=(M // (2 * ROWS),),
        grid_names=("i",),
        num_threads=3,
        thread_name="wg",
        interpret=plgpu.InterpretParams(detect_races=True, **interpret),
    )


@pytest.fixture
def operands():
    rng = np.random.default_rng(0)
    return (
        host.array(rng.standard_normal((M, K)), F16),
        host.array(rng.standard_normal((K, N)), F16),
    )


@pytest.mark.parametrize("asynchrony", ["eager", "late", "random"])
@pytest.mark.parametrize("seed", range(2))
def test_one_product_may_stay_in_flight(operands, seed, asynchrony):
    a, b = operands
    got = matmul(1, seed=seed, asynchrony=asynchrony)(a, b)
    want = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    # Sums of 256 terms of size about 1 in float32.
    np.testing.assert_allclose(got, want, atol=5e-5)


@pytest.mark.parametrize("asynchrony", ["eager", "late", "random"])
@refused
def test_a_slot_given_back_before_its_product_is_done_is_a_race(operands, asynchrony):
    matmul(2, asynchrony=asynchrony)(*operands)

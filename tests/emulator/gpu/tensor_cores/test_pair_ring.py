# SPDX-License-Identifier: Apache-2.0
"""A pair of CTAs that reuses its buffers: only commits tell the other CTA's copies."""

from __future__ import annotations

import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.tensor_pairs import PARTITIONED, PairProduct

CASE = PairProduct()
ROUNDS = 4


def ring(waits, seed):
    """The sum of equal products; `waits` says who waits before it copies again."""

    def body(a, b, out, a_smem, b_smem, acc, loaded, ready, done, free):
        rank = lax.axis_index("c")

        pair = {"collective_axes": "c", "leader_tracked": PARTITIONED(0)}

        def load(i):
            plgpu.when((i > 0) & waits(rank))(lambda: plgpu.barrier_wait(free))
            plgpu.copy_gmem_to_smem(a, a_smem, loaded, **pair)
            plgpu.copy_gmem_to_smem(b, b_smem, loaded, **pair)

        def multiply(i):
            plgpu.barrier_wait(loaded)
            options = {"accumulate": i > 0, "collective_axis": "c"}
            plgpu.tcgen05_mma(acc, a_smem, b_smem.T, free, **options)

        @plgpu.warp_map
        def _(warp):
            plgpu.when(warp == 0)(lambda: plgpu.loop(0, ROUNDS)(load))

            @plgpu.when((warp == 1) & (rank == 0))
            def _():
                plgpu.loop(0, ROUNDS)(multiply)
                plgpu.tcgen05_commit_arrive(done, collective_axis="c")

        plgpu.barrier_wait(done)
        out[plgpu.ds(rank * CASE.m, CASE.m)] = acc[...]

    free = plgpu.Barrier(orders_tensor_core=True)
    kernel = CASE.make(plgpu.InterpretParams(seed=seed), body, free=free)
    return kernel(*CASE.operands())


@pytest.mark.parametrize("seed", range(6))
def test_the_leader_knows_what_the_other_cta_has_waited_for_by_its_copies(seed):
    expected = ROUNDS * CASE.expected(*CASE.operands())
    np.testing.assert_array_equal(ring(lambda rank: rank >= 0, seed), expected)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rank", [0, 1])
def test_a_cta_that_does_not_wait_is_reported(rank, seed):
    with pytest.raises(errors.PallasGpuError, match=r"a_smem|loaded|free"):
        ring(lambda mine: mine != rank, seed)

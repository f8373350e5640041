# SPDX-License-Identifier: Apache-2.0
"""Barriers that order tcgen05 operations: fences around the arrival and the wait."""

from __future__ import annotations

import functools
import re

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.refusal import refused
from tests.support.semantics import BOTH, under

X = np.arange(128, dtype=np.float32)
DOUBLED = np.stack([X * 2] * 2)
DECLARATIONS = {
    "barrier": plgpu.Barrier,
    "cluster": functools.partial(plgpu.ClusterBarrier, collective_axes="c"),
}


def handover(kind, orders=True, target="sm_100a"):
    """One warpgroup stores a row, another one, which has waited for it, reads it."""

    def body(x, o, row, barrier):
        @plgpu.when(lax.axis_index("wg") == 0)
        def _():
            row[...] = x[...] * 2
            plgpu.barrier_arrive(barrier)

        @plgpu.when(lax.axis_index("wg") == 1)
        def _():
            plgpu.barrier_wait(barrier)
            o[lax.axis_index("c")] = row[...]

    row = plgpu.SMEM((128,), jnp.float32)
    barrier = DECLARATIONS[kind](orders_tensor_core=orders)
    options = {"threads": {"wg": 2}, "cluster": {"c": 2}, "target": target}
    return everywhere.kernel(body, DOUBLED, row, barrier, **options)


def ptx(kind, orders, semantics):
    kernel = under(semantics, handover(kind, orders)(None))
    (report,) = plgpu.offline.compile(kernel, X, target="sm_100a")
    return report.ptx


@pytest.mark.parametrize("kind", DECLARATIONS)
def test_they_hand_over_values_as_others_do(kind):
    everywhere.check(handover(kind), [X], DOUBLED, on_gpu=False)


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize("kind", DECLARATIONS)
def test_all_threads_fence_and_meet_before_one_arrives(kind, semantics):
    text = ptx(kind, True, semantics)
    sequence = re.findall(
        r"tcgen05\.fence::\w+|bar(?:rier)?\.sync|mbarrier\.(?:arrive|try_wait)", text
    )
    before = sequence.index("tcgen05.fence::before_thread_sync")
    assert sequence[before + 1] in ("bar.sync", "barrier.sync")
    assert sequence[before + 2] == "mbarrier.arrive"
    after = sequence.index("tcgen05.fence::after_thread_sync")
    assert sequence[after - 1] == "mbarrier.try_wait"


@pytest.mark.offline
def test_an_arrival_in_another_cta_has_the_scope_of_the_cluster():
    """Its tensor core may read SMEM that threads of this one have written."""
    assert "mbarrier.arrive.release.cluster.shared::cluster" in ptx(
        "cluster", True, BOTH[0]
    )


@pytest.mark.offline
@pytest.mark.parametrize("kind", DECLARATIONS)
def test_other_barriers_have_no_fences(kind):
    assert "tcgen05" not in ptx(kind, False, BOTH[0])


@pytest.mark.parametrize("kind", DECLARATIONS)
@refused
def test_a_target_without_tcgen05_has_nothing_to_order(kind):
    handover(kind, target="sm_90a")(plgpu.InterpretParams())(X)

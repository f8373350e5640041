# SPDX-License-Identifier: Apache-2.0
"""Fences of the compiled kernel between threads' stores to GMEM and TMA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu.errors import PtxError
from tests.support import everywhere
from tests.support.lockstep import faults
from tests.support.semantics import BOTH, under

F32 = jnp.float32
TILE = (8, 32)
X = np.arange(256, dtype=np.float32).reshape(TILE)


def body(x, o, tile, full):
    """Threads store a result, TMA reads it back and adds nothing of its own."""
    o[...] = x[...] + 1
    plgpu.commit_gmem()
    plgpu.copy_gmem_to_smem(o, tile, full)
    plgpu.barrier_wait(full)
    o[...] = tile[...] * 2


make = everywhere.kernel(
    body, jax.ShapeDtypeStruct(TILE, F32), plgpu.SMEM(TILE, F32), plgpu.Barrier()
)


def test_commit_gmem_makes_stores_visible_to_tma():
    everywhere.check(make, [X], (X + 1) * 2)


@pytest.mark.parametrize("semantics", BOTH)
def test_without_its_fence_the_copy_would_read_what_it_does_not_see(semantics):
    function = under(semantics, make())
    with pytest.raises(PtxError, match=r"reads .* without fence\.proxy\.async"):
        faults.run(function, [X], faults.drop("nvvm.fence.proxy"))


@pytest.mark.parametrize("semantics", BOTH)
def test_commit_gmem_fences_global_memory_only(semantics):
    (report,) = plgpu.offline.lower(under(semantics, make()), X)
    fences = [line for line in report.mlir.splitlines() if "nvvm.fence.proxy" in line]
    assert len(fences) == 1
    assert "async.global" in fences[0]


def test_after_commit_gmem_all_threads_have_fenced():
    def body(o):
        o[...] = jnp.zeros(TILE, F32)
        plgpu.commit_gmem()

    kernel = everywhere.kernel(body, jax.ShapeDtypeStruct(TILE, F32))(None)
    (report,) = plgpu.offline.lower(kernel)
    _, after = report.mlir.split("nvvm.fence.proxy")
    assert "nvvm.barrier" in after.splitlines()[1]

# SPDX-License-Identifier: Apache-2.0
"""Hints to the L2 cache: results are the same, the instructions carry a policy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.refusal import refused_by
from tests.support.semantics import BOTH, under

F32 = jnp.float32
TILE = (16, 32)
X = np.random.default_rng(0).standard_normal(TILE, np.float32)
SCRATCH = plgpu.SMEM(TILE, F32), plgpu.Barrier()


def kernel(load=None, store=None, reduction=None):
    def body(x, o, tile, full):
        o[...] = jnp.zeros(TILE, F32)
        plgpu.commit_gmem()
        plgpu.copy_gmem_to_smem(x, tile, full, cache_hint=load)
        plgpu.barrier_wait(full)
        plgpu.copy_smem_to_gmem(tile, o, cache_hint=store, reduction_op=reduction)
        plgpu.wait_smem_to_gmem(0)

    return everywhere.kernel(body, X, *SCRATCH, target="sm_90a")


@pytest.mark.parametrize("reduction", [None, "add"])
@pytest.mark.parametrize("hint", ["evict_first", "evict_normal", "evict_last"])
def test_results_do_not_depend_on_hints(hint, reduction):
    everywhere.check(kernel(hint, hint, reduction), [X], X)


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize("reduction", [None, "add"])
def test_the_instructions_carry_policies(reduction, semantics):
    function = under(semantics, kernel("evict_first", "evict_last", reduction)(None))
    (report,) = plgpu.offline.compile(function, X)
    copies = [line for line in report.ptx.splitlines() if "async.bulk.tensor" in line]
    assert len(copies) == 2
    assert all(".L2::cache_hint" in line for line in copies)
    for hint in ("evict_first", "evict_last"):
        assert f"createpolicy.fractional.L2::{hint}.b64" in report.ptx


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
def test_without_a_hint_there_is_no_policy(semantics):
    (report,) = plgpu.offline.compile(under(semantics, kernel()(None)), X)
    assert "createpolicy" not in report.ptx
    assert "cache_hint" not in report.ptx


@pytest.mark.parametrize("load", [True, False])
@refused_by(everywhere.emulate, [X], X, *SCRATCH)
def test_a_hint_has_a_name(x, o, tile, full, *, load):
    if load:
        plgpu.copy_gmem_to_smem(x, tile, full, cache_hint="keep")
    else:
        plgpu.copy_smem_to_gmem(tile, o, cache_hint="keep")

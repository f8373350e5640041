# SPDX-License-Identifier: Apache-2.0
"""Kernels whose layouts the compiler chooses, run after their lowering."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu
from pallas_gpu.emitters import smem
from tests.support import everywhere
from tests.support.semantics import Warpgroup

check = functools.partial(everywhere.run, semantics=[Warpgroup])
RNG = np.random.default_rng(3)


def numbers(*shape: int, dtype=np.float32) -> np.ndarray:
    return RNG.integers(-4, 5, shape).astype(dtype)


ROW, X, HALVES = numbers(64), numbers(64, 64), numbers(16, 16, dtype=np.float16)
REPEATED = np.broadcast_to(ROW[:, None], (64, 64))


@everywhere.tests(check, [ROW, X], (REPEATED + X, REPEATED))
def test_a_repeated_array_is_made_where_its_operand_lies_and_then_moved(
    row_ref, x_ref, o_ref, moved_ref
):
    repeated = jnp.broadcast_to(row_ref[...][:, None], (64, 64))
    o_ref[...] = repeated + plgpu.load(x_ref, layout=plgpu.Layout.WGMMA)
    moved_ref[...] = plgpu.layout_cast(repeated, plgpu.Layout.WGMMA_TRANSPOSED)


@everywhere.tests(check, [HALVES], HALVES, plgpu.SMEM((128, 128), jnp.float16))
def test_a_store_has_the_bank_conflicts_that_no_layout_avoids(x_ref, o_ref, array):
    array[0, 127] = x_ref[0, 0]  # an array that is accessed so has no tiles
    array[:16, :16] = x_ref[...]
    o_ref[...] = plgpu.load(array.at[:16, :16], optimized=False)


def test_a_tiled_array_that_no_wgmma_layout_covers_is_stored_without_conflicts(
    monkeypatch,
):
    x, plans = numbers(64), []
    plan = smem.plan_access

    def remember(*args, **kwargs):
        plans.append(plan(*args, **kwargs))
        return plans[-1]

    monkeypatch.setattr(smem, "plan_access", remember)

    def body(x_ref, o_ref, tiled):
        tiled[...] = jnp.broadcast_to(x_ref[...], (32, 64))
        o_ref[...] = tiled[...].sum(0)

    transforms = (plgpu.TilingTransform((8, 8)), plgpu.SwizzleTransform(32))
    scratch = plgpu.SMEM((32, 64), jnp.float32, transforms=transforms)
    check(body, [x], 32 * x, scratch)
    assert all(p.conflict_free for p in plans)

# SPDX-License-Identifier: Apache-2.0
"""An array is moved to another layout once, and used there from then on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.semantics import Warpgroup, under

SHAPE = (64, 128)
X = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED


def kernel(body):
    return everywhere.kernel(body, jax.ShapeDtypeStruct(SHAPE, jnp.float32))


def shuffles(body) -> int:
    (report,) = plgpu.offline.lower(under(Warpgroup, kernel(body)(None)), X)
    return report.mlir.count("nvvm.shfl.sync bfly")


def one_use(x_ref, o_ref):
    x = plgpu.load(x_ref, layout=plgpu.Layout.WGMMA, optimized=False)
    o_ref[...] = plgpu.layout_cast(x, TRANSPOSED) * 2


def two_uses(x_ref, o_ref):
    x = plgpu.load(x_ref, layout=plgpu.Layout.WGMMA, optimized=False)
    o_ref[...] = plgpu.layout_cast(x, TRANSPOSED) * 2
    o_ref[...] = plgpu.layout_cast(x, TRANSPOSED) * 3


def in_a_branch_and_behind_it(x_ref, o_ref):
    x = plgpu.load(x_ref, layout=plgpu.Layout.WGMMA, optimized=False)

    @plgpu.when(x_ref[0, 0] > 100)
    def _():
        o_ref[...] = plgpu.layout_cast(x, TRANSPOSED) * 2

    o_ref[...] = plgpu.layout_cast(x, TRANSPOSED) * 3


def test_an_array_is_moved_to_a_layout_once():
    once = shuffles(one_use)
    assert once > 0
    assert shuffles(two_uses) == once
    everywhere.check(kernel(two_uses), [X], X * 3)


def test_what_a_branch_has_moved_is_not_used_behind_it():
    assert shuffles(in_a_branch_and_behind_it) == 2 * shuffles(one_use)
    everywhere.check(kernel(in_a_branch_and_behind_it), [X], X * 3)

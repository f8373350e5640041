# SPDX-License-Identifier: Apache-2.0
"""run_scoped: results, nesting, refusals."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from tests.support.entry_kernels import TILE, numbers, run
from tests.support.refusal import refused


def test_a_scope_returns_values():
    def body(x, o):
        def scoped(tile, *, barrier):
            plgpu.copy_gmem_to_smem(x, tile, barrier)
            plgpu.barrier_wait(barrier)
            return tile[...] + 1, {"row": tile[3]}

        value, more = plgpu.run_scoped(scoped, TILE, barrier=plgpu.Barrier())
        o[...] = value
        o[0] = more["row"]

    expected = numbers() + 1
    expected[0] = numbers()[3]
    np.testing.assert_array_equal(run(body), expected)


def test_scopes_nest_and_follow_each_other():
    def body(x, o):
        def outer(a):
            a[...] = x[...]

            def inner(b):
                b[...] = a[...] * 2
                a[...] = b[...]

            plgpu.run_scoped(inner, TILE)
            plgpu.run_scoped(inner, TILE)
            o[...] = a[...]

        plgpu.run_scoped(outer, TILE)

    np.testing.assert_array_equal(run(body), numbers() * 4)


THREADS = {"num_threads": 2, "thread_name": "wg", "grid": (2,), "grid_names": ("i",)}
SCOPES = {
    "one warpgroup of several": (TILE, {}, THREADS),
    "along an axis of the grid": (TILE, {"collective_axes": "i"}, THREADS),
    "along an axis of one warpgroup": (TILE, {"collective_axes": "wg"}, {}),
    "a type": (jnp.float32, {}, {}),
}


@pytest.mark.parametrize(("scratch", "axes", "mesh"), SCOPES.values(), ids=SCOPES)
@refused
def test_all_warpgroups_enter_a_scope_of_memory_together(scratch, axes, mesh):
    def body(x, o):
        plgpu.run_scoped(lambda tile: None, scratch, **axes)  # HERE

    run(body, **mesh)


@refused
def test_a_scope_is_part_of_a_kernel():
    plgpu.run_scoped(lambda tile: None, TILE)  # HERE


def test_none_declares_nothing():
    def body(x, o, unused, tile):
        assert unused is None

        def scope(trees, named):
            assert trees[0] is None
            assert named is None
            trees[1][...] = tile[...] = x[...]
            o[...] = trees[1][...] + tile[...]

        plgpu.run_scoped(scope, [None, TILE], named=None)

    got = run(body, scratch_types=[None, TILE])
    np.testing.assert_array_equal(got, numbers() * 2)

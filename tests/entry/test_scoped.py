# SPDX-License-Identifier: Apache-2.0
"""run_scoped: results, nesting, refusals."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu
from tests.support.entry_kernels import TILE, numbers, run
from tests.support.refusal import refused, refused_by

THREADS = {"num_threads": 2, "thread_name": "wg"}


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


@refused_by(run, **THREADS)
def test_several_warpgroups_enter_a_scope_together(x, o):
    plgpu.run_scoped(lambda tile: None, TILE)  # HERE


@refused_by(run, grid=(2,), grid_names=("i",), **THREADS)
def test_a_scope_is_collective_over_the_thread_axis(x, o):
    plgpu.run_scoped(lambda tile: None, TILE, collective_axes="i")  # HERE


@refused_by(run)
def test_one_warpgroup_has_no_thread_axis(x, o):
    plgpu.run_scoped(lambda tile: None, TILE, collective_axes="wg")  # HERE


@refused_by(run)
def test_a_scope_declares_memory(x, o):
    plgpu.run_scoped(lambda tile: None, jnp.float32)  # HERE


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

# SPDX-License-Identifier: Apache-2.0
"""The SMEM of other CTAs: mistakes that are refused, or found in the emulator."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import everywhere
from tests.support.refusal import refused, refused_by

F32 = jnp.float32
N = 128
OUT = jax.ShapeDtypeStruct((2, N), F32)
SEEDS = range(4)


def run(body, scratch, *arrays, **options):
    """Runs a kernel of one cluster of two CTAs along "c"."""
    options = {"cluster": {"c": 2}, **options}
    return everywhere.emulate(body, arrays, OUT, *scratch, **options)


ARRAY = plgpu.SMEM((N,), F32)
MEETING = plgpu.ClusterBarrier(collective_axes="c")


def meet(barrier):
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def other(ref):
    return plgpu.cluster_ref(ref, {"c": 1 - lax.axis_index("c")})


def second(ref):
    return plgpu.cluster_ref(ref, {"c": 1})


# --- what they are --------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_what_scratch_types_declares_exists_until_the_cluster_ends(seed):
    """The compiled kernel's CTAs wait for each other at their end."""

    def body(o, tile, meeting):
        i = lax.axis_index("c")
        tile[...] = jnp.full((N,), i).astype(F32)
        plgpu.barrier_arrive(meeting)

        @plgpu.when(i == 0)
        def _():
            plgpu.barrier_wait(meeting)
            o[0] = other(tile)[...]
            o[1] = other(tile)[...] + 1

    np.testing.assert_array_equal(run(body, [ARRAY, MEETING], seed=seed)[:, 0], [1, 2])


# --- found in the emulator ------------------------------------------------------------


@refused
def test_a_cta_outside_of_the_cluster_is_reported():
    def body(o, tile):
        tile[...] = jnp.zeros((N,), F32)
        right = plgpu.cluster_ref(tile, {"c": lax.axis_index("c") + 1})
        o[lax.axis_index("c")] = right[...]  # HERE

    for seed in SEEDS:
        run(body, [ARRAY], seed=seed)


@refused_by(lambda body: run(body, [ARRAY, MEETING], np.array([N], np.int32)))
def test_an_index_outside_of_the_array_is_reported(i, o, tile, meeting):
    tile[...] = jnp.zeros((N,), F32)
    meet(meeting)
    o[lax.axis_index("c")] = jnp.full((N,), second(tile)[i[0]])  # HERE


@refused_by(run, [ARRAY, MEETING])
def test_what_no_cta_has_written_is_reported(o, tile, meeting):
    meet(meeting)
    o[lax.axis_index("c")] = second(tile)[...]  # HERE


@pytest.mark.parametrize("seed", SEEDS)
def test_an_access_to_memory_that_a_cta_uses_for_another_scope_is_reported(seed):
    def body(o, meeting):
        def first(tile):
            tile[...] = jnp.ones((N,), F32)
            o[lax.axis_index("c")] = tile[...]

        def second(tile):
            other(tile)[...] = jnp.ones((N,), F32)
            meet(meeting)

        plgpu.run_scoped(first, ARRAY)
        plgpu.run_scoped(second, ARRAY)

    with pytest.raises(errors.RaceError):
        for seed_ in range(4 * seed, 4 * seed + 4):
            run(body, [MEETING], seed=seed_)


# --- refused --------------------------------------------------------------------------


def trace(body, scratch=(ARRAY,), **options):
    options = {"cluster": {"c": 2}, **options}
    jax.eval_shape(everywhere.kernel(body, OUT, *scratch, **options)())


@refused_by(trace)
def test_an_unknown_axis_is_refused(o, tile):
    o[0] = plgpu.cluster_ref(tile, {"d": 0})[...]  # HERE


@refused_by(trace)
def test_a_position_beyond_the_cluster_is_refused(o, tile):
    o[0] = plgpu.cluster_ref(tile, {"c": 2})[...]  # HERE


@refused_by(trace, cluster={})
def test_a_kernel_without_clusters_has_no_other_cta(o, tile):
    plgpu.atomic_add(plgpu.cluster_ref(tile, {"c": 0}), 1.0)  # HERE


@refused_by(trace, ())
def test_only_smem_is_reached(o):
    plgpu.cluster_ref(o, {"c": 0})  # HERE


@pytest.mark.parametrize("positions", [{}, 1, [("c", 1)], None], ids=repr)
@refused_by(trace)
def test_positions_are_a_dict(o, tile, *, positions):
    plgpu.cluster_ref(tile, positions)  # HERE


@pytest.mark.parametrize("position", [1.0, "1", None], ids=repr)
@refused_by(trace)
def test_a_position_is_an_integer(o, tile, *, position):
    plgpu.cluster_ref(tile, {"c": position})  # HERE


@refused_by(trace)
def test_a_position_is_a_scalar(o, tile):
    plgpu.cluster_ref(tile, {"c": jnp.arange(2)})  # HERE


@refused_by(trace, (ARRAY, plgpu.Barrier()))
def test_a_copy_does_not_take_it(x, tile, barrier):
    plgpu.copy_gmem_to_smem(x.at[0], other(tile), barrier)  # HERE

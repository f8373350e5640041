# SPDX-License-Identifier: Apache-2.0
"""Clusters in the emulator: barriers and copies that reach other CTAs.

Pipelines of multicasts are in tests/support/mutations/multicast.py.
"""

from __future__ import annotations

import collections

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from pallas_gpu.emulator.engine.history import History
from pallas_gpu.emulator.engine.in_flight import InFlight
from tests.support import everywhere
from tests.support.entry_kernels import f32
from tests.support.refusal import refused_by

F32 = jnp.float32
ASYNCHRONY = ("eager", "late", "random")
TILE = (4, 128)
ONE_TILE = plgpu.SMEM(TILE, F32), plgpu.Barrier()
MEETING = plgpu.ClusterBarrier(collective_axes="x")
RACE = errors.RaceError


def ramp(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1


X = ramp(*TILE)


def run(body, scratch=ONE_TILE, args=(X,), out=(2, *TILE), **options):
    """Runs a kernel of one cluster with two CTAs along "x"."""
    options = {"cluster": {"x": 2}, **options}
    return everywhere.emulate(body, args, f32(*out), *scratch, **options)


def multicast(src, dst, barrier):
    plgpu.copy_gmem_to_smem(src, dst, barrier, collective_axes="x")


def meet(barrier):
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


# --- what they do ---------------------------------------------------------------------


def test_the_memory_of_a_scope_is_reached_before_its_cta_enters_it():
    def body(x, o, start, tile_ready):
        at = lax.axis_index("x")

        def scope(tile):
            multicast(x, tile, tile_ready)
            plgpu.barrier_wait(tile_ready)
            o[at] = tile[...]

        plgpu.barrier_arrive(start)
        plgpu.when(at == 1)(lambda: plgpu.barrier_wait(start))
        plgpu.run_scoped(scope, plgpu.SMEM(TILE, F32))

    for seed in range(4):
        got = run(body, [MEETING, plgpu.Barrier()], seed=seed)
        np.testing.assert_array_equal(got, np.stack([ramp(*TILE)] * 2))


HALVES = (plgpu.ds(0, 2), plgpu.ds(2, 2))


def early_multicast(read_late, **options):
    """CTA 0 copies rows 0 and 1 while CTA 1 still reads some rows."""

    def body(x, o, tile, barrier, free):
        at = lax.axis_index("x")
        tile[...] = jnp.full(TILE, 7.0)
        plgpu.commit_smem()

        @plgpu.when(at == 0)
        def _():
            o[0, HALVES[1]] = tile[HALVES[1]]
            meet(free)

        @plgpu.when(at == 1)
        def _():
            plgpu.barrier_arrive(free)
            o[1, HALVES[1]] = tile[read_late]
            plgpu.barrier_wait(free)

        multicast(x, tile, barrier)
        plgpu.barrier_wait(barrier)
        o[at, HALVES[0]] = tile[HALVES[1]]

    return run(body, [*ONE_TILE, MEETING], **options)


@pytest.mark.parametrize("asynchrony", ASYNCHRONY)
def test_only_the_rows_that_another_cta_copies_are_not_read_in_a_multicast(asynchrony):
    for seed in range(8):
        options = {"seed": seed, "asynchrony": asynchrony}
        expected = np.full((2, *TILE), 7, np.float32)
        expected[:, :2] = ramp(*TILE)[2:]
        got = early_multicast(HALVES[1], **options)
        np.testing.assert_array_equal(got, expected)
        with pytest.raises(RACE, match="the copy from input 0"):
            early_multicast(HALVES[0], **options)


@pytest.mark.parametrize("ctas", [2, 4, 8])
def test_the_cost_of_a_multicast_is_linear_in_the_cluster(ctas, monkeypatch):
    def body(x, o, tile, barrier):
        multicast(x, tile, barrier)
        plgpu.barrier_wait(barrier)
        o[lax.axis_index("x")] = tile[...]

    counts, x = collections.Counter(), ramp(ctas, 128)

    def counted(owner, method, name):
        original = getattr(owner, method)

        def count(self, *args, **kwargs):
            counts[name] += 1
            return original(self, *args, **kwargs)

        monkeypatch.setattr(owner, method, count)

    counted(History, "access", "records")
    counted(InFlight, "submit", "copies")
    scratch = [plgpu.SMEM(x.shape, F32), plgpu.Barrier()]
    run(body, scratch, [x], (ctas, *x.shape), cluster={"x": ctas})
    # Each CTA also reads its copy and stores it.
    assert counts == {"records": 3 * ctas, "copies": ctas}


def test_an_arrival_on_a_cluster_barrier_that_nobody_waits_for_is_legal_at_the_end():
    def body(o, ready):
        at = lax.axis_index("x")
        o[at] = jnp.ones(TILE, F32)
        plgpu.when(at == 0)(lambda: plgpu.barrier_arrive(ready))

    np.testing.assert_array_equal(run(body, [MEETING], ()), np.ones((2, *TILE)))


def test_ctas_of_a_cluster_may_write_the_same_element_one_after_the_other():
    def body(o, ready):
        at = lax.axis_index("x")
        plgpu.when(at == 0)(lambda: o.at[0].set(jnp.ones(TILE, F32)))
        meet(ready)

        @plgpu.when(at == 1)
        def _():
            o[0] = jnp.full(TILE, 2.0, F32)
            o[1] = o[0]

    np.testing.assert_array_equal(run(body, [MEETING], ())[0], np.full(TILE, 2.0))


# --- mistakes -------------------------------------------------------------------------


@refused_by(run, scratch=[*ONE_TILE, MEETING])
def test_a_read_of_the_piece_of_another_cta_before_the_wait(x, o, tile, barrier, ready):
    at = lax.axis_index("x")
    multicast(x, tile, barrier)
    meet(ready)
    half = plgpu.ds(2 * (1 - at), 2)
    o[at, half] = tile[half]  # HERE
    plgpu.barrier_wait(barrier)


@refused_by(run)
def test_a_multicast_that_one_cta_does_not_call(x, o, tile, barrier):
    plgpu.when(lax.axis_index("x") == 0)(lambda: multicast(x, tile, barrier))
    plgpu.barrier_wait(barrier)  # HERE


@refused_by(run, args=[ramp(2, *TILE)])
def test_a_multicast_of_different_parts(x, o, tile, barrier):
    multicast(x.at[lax.axis_index("x")], tile, barrier)
    plgpu.barrier_wait(barrier)


TWICE = plgpu.ClusterBarrier(collective_axes="x", num_arrivals=2)


@refused_by(run, scratch=[TWICE], args=())
def test_arrivals_of_all_ctas_that_are_missing(o, ready):
    plgpu.when(lax.axis_index("x") == 0)(lambda: plgpu.barrier_arrive(ready))
    plgpu.barrier_wait(ready)  # HERE


TWO = plgpu.ClusterBarrier(collective_axes="x", num_barriers=2)


@refused_by(run, scratch=[TWO], args=())
def test_a_wait_for_one_of_several_barriers(o, ready):
    plgpu.barrier_wait(ready.at[1])  # HERE


def test_a_cta_may_not_end_while_another_multicasts_into_it():
    def body(x, o, tile, barrier):
        @plgpu.when(lax.axis_index("x") == 0)
        def _():
            multicast(x, tile, barrier)
            plgpu.barrier_wait(barrier)

    texts = "a multicast writes to|is freed while|in the middle of a phase"
    for seed in range(4):
        with pytest.raises(errors.KernelError, match=texts) as caught:
            run(body, seed=seed)
        assert "CTA (x=1)" in str(caught.value)


def test_a_multicast_into_memory_that_was_something_else_needs_an_order():
    def body(x, o, barrier):
        at = lax.axis_index("x")

        def before(tile):
            tile[...] = jnp.ones(TILE, F32)
            o[at] = tile[...]

        def scope(tile):
            multicast(x, tile, barrier)
            plgpu.barrier_wait(barrier)
            o[at] = tile[...]

        plgpu.run_scoped(before, plgpu.SMEM(TILE, F32))
        plgpu.run_scoped(scope, plgpu.SMEM(TILE, F32))

    # Some orders of the CTAs show it.
    with pytest.raises(RACE, match="may still use that memory") as caught:
        for seed in range(8):
            run(body, [plgpu.Barrier()], seed=seed)
    assert "ClusterBarrier" in str(caught.value)

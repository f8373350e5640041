# SPDX-License-Identifier: Apache-2.0
"""Clusters in the emulator: barriers and copies that reach other CTAs."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from pallas_gpu.emulator.engine.history import History
from pallas_gpu.emulator.engine.in_flight import InFlight
from tests.support import host
from tests.support.refusal import refused, refused_by

F32 = jnp.float32
ASYNCHRONY = ("eager", "late", "random")
TILE = (4, 128)


def ramp(*shape):
    return jnp.arange(np.prod(shape), dtype=F32).reshape(shape) + 1


def pair_kernel(body, scratch, out=(2, *TILE), seed=0, asynchrony="random", **options):
    """A kernel of one cluster with two CTAs along "x"."""
    options.setdefault("cluster", (2,))
    options.setdefault("cluster_names", ("x",))
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(out, F32),
        scratch_types=scratch,
        interpret=plgpu.InterpretParams(
            seed=seed, asynchrony=asynchrony, detect_races=True
        ),
        **options,
    )


def multicast(src, dst, barrier, axes="x", **options):
    plgpu.copy_gmem_to_smem(src, dst, barrier, collective_axes=axes, **options)


ONE_TILE = [plgpu.SMEM(TILE, F32), plgpu.Barrier()]


# --- what they do ---------------------------------------------------------------------


def test_every_cta_of_every_cluster_knows_its_position():
    def body(o):
        g, x, y = (lax.axis_index(name) for name in "gxy")
        o[g, x, y] = jnp.full((128,), 100 * g + 10 * x + y).astype(F32)

    run = pair_kernel(
        body,
        (),
        out=(3, 2, 2, 128),
        grid=(3,),
        grid_names=("g",),
        cluster=(2, 2),
        cluster_names=("x", "y"),
    )
    g, x, y = np.indices((3, 2, 2))
    np.testing.assert_array_equal(run()[..., 0], 100 * g + 10 * x + y)


@pytest.mark.parametrize("asynchrony", ASYNCHRONY)
def test_a_multicast_brings_all_pieces_to_all_ctas(asynchrony):
    def body(x, o, tile, barrier):
        multicast(x, tile, barrier)
        plgpu.barrier_wait(barrier)
        o[lax.axis_index("x")] = tile[...]

    run = pair_kernel(body, ONE_TILE, asynchrony=asynchrony)
    np.testing.assert_array_equal(run(ramp(*TILE)), np.stack([ramp(*TILE)] * 2))


def test_a_multicast_over_the_edge_reads_zeros():
    def body(x, o, tile, barrier):
        multicast(x.at[plgpu.ds(lax.axis_index("g") + 3, 4)], tile, barrier)
        plgpu.barrier_wait(barrier)
        o[lax.axis_index("x")] = tile[...]

    run = pair_kernel(body, ONE_TILE, grid=(1,), grid_names=("g",))
    want = np.concatenate([ramp(*TILE)[3:], np.zeros((3, 128))])
    np.testing.assert_array_equal(run(ramp(*TILE)), np.stack([want] * 2))


def test_a_multicast_along_one_of_two_axes_stays_on_its_line():
    def body(x, o, tile, barrier):
        i, j = lax.axis_index("x"), lax.axis_index("y")
        multicast(x.at[j], tile, barrier, axes="x")
        plgpu.barrier_wait(barrier)
        o[i, j] = tile[...]

    run = pair_kernel(
        body, ONE_TILE, out=(2, 2, *TILE), cluster=(2, 2), cluster_names=("x", "y")
    )
    x = ramp(2, *TILE)
    np.testing.assert_array_equal(run(x), np.stack([x, x]))


def test_an_arrival_on_a_cluster_barrier_reaches_every_cta():
    def body(o, ready):
        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)
        o[lax.axis_index("x")] = jnp.ones(TILE, F32)

    run = pair_kernel(body, [plgpu.ClusterBarrier(collective_axes="x")])
    np.testing.assert_array_equal(run(), np.ones((2, *TILE)))


def pipeline(free, steps=6, slots=2):
    """Every CTA adds up tiles that both copy; `free` declares the slots' barriers."""

    def body(x, o, tiles, full, empty):
        def turn(k, _):
            slot = lax.rem(k, slots)

            @plgpu.when(k >= slots)
            def _():
                plgpu.barrier_wait(empty.at[slot])

            multicast(x.at[k], tiles.at[slot], full.at[slot])
            plgpu.barrier_wait(full.at[slot])
            at = lax.axis_index("x")

            @plgpu.when(k == 0)
            def _():
                o[at] = tiles[slot]

            @plgpu.when(k > 0)
            def _():
                o[at] += tiles[slot]

            plgpu.barrier_arrive(empty.at[slot])

        lax.fori_loop(0, steps, turn, None)

    scratch = [
        plgpu.SMEM((slots, *TILE), F32),
        plgpu.Barrier(num_barriers=slots),
        free(slots),
    ]
    return lambda **options: pair_kernel(body, scratch, **options)


@pytest.mark.parametrize("asynchrony", ASYNCHRONY)
@pytest.mark.parametrize("seed", range(3))
def test_a_pipeline_of_multicasts_is_exact(asynchrony, seed):
    make = pipeline(lambda n: plgpu.ClusterBarrier(collective_axes="x", num_barriers=n))
    x = ramp(6, *TILE)
    got = make(seed=seed, asynchrony=asynchrony)(x)
    np.testing.assert_array_equal(got, np.stack([x.sum(0)] * 2))


def test_the_memory_of_a_scope_is_reached_before_its_cta_enters_it():
    def body(x, o, start, tile_ready):
        at = lax.axis_index("x")

        def scope(tile):
            multicast(x, tile, tile_ready)
            plgpu.barrier_wait(tile_ready)
            o[at] = tile[...]

        @plgpu.when(at == 1)
        def _():
            plgpu.barrier_arrive(start)
            plgpu.barrier_wait(start)

        @plgpu.when(at == 0)
        def _():
            plgpu.barrier_arrive(start)

        plgpu.run_scoped(scope, plgpu.SMEM(TILE, F32))

    scratch = [plgpu.ClusterBarrier(collective_axes="x"), plgpu.Barrier()]
    for seed in range(4):
        got = pair_kernel(body, scratch, seed=seed)(ramp(*TILE))
        np.testing.assert_array_equal(got, np.stack([ramp(*TILE)] * 2))


@pytest.mark.parametrize("seed", range(2))
def test_a_matmul_with_multicast_along_both_axes(seed):
    m = n = k = 128
    tile, depth = 64, 64
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def body(a, b, o, sa, sb, full, empty):
        i, j = lax.axis_index("x"), lax.axis_index("y")
        rows, columns = plgpu.ds(i * tile, tile), plgpu.ds(j * tile, tile)

        def scope(acc):
            def turn(step, _):
                @plgpu.when(step > 0)
                def _():
                    plgpu.barrier_wait(empty)

                at = plgpu.ds(step * depth, depth)
                multicast(a.at[rows, at], sa, full, axes="y")
                multicast(b.at[at, columns], sb, full, axes="x")
                plgpu.barrier_wait(full)
                plgpu.wgmma(acc, sa, sb)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(empty)

            lax.fori_loop(0, k // depth, turn, None)
            return acc[...]

        o[rows, columns] = plgpu.run_scoped(scope, plgpu.ACC((tile, tile)))

    run = pair_kernel(
        body,
        [
            plgpu.SMEM((tile, depth), jnp.float16, transforms=tiled),
            plgpu.SMEM((depth, tile), jnp.float16, transforms=tiled),
            plgpu.Barrier(num_arrivals=2),
            plgpu.ClusterBarrier(collective_axes=("x", "y")),
        ],
        out=(m, n),
        cluster=(2, 2),
        cluster_names=("x", "y"),
        seed=seed,
    )
    rng = np.random.default_rng(0)
    a, b = (host.array(rng.standard_normal((m, n)), jnp.float16) for _ in range(2))
    want = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    np.testing.assert_allclose(run(a, b), want, atol=2e-5)


HALVES = (plgpu.ds(0, 2), plgpu.ds(2, 2))


def early_multicast(read_late):
    """A kernel whose CTA 0 copies rows 0 and 1 while CTA 1 still reads some rows."""

    def body(x, o, tile, barrier, free):
        at = lax.axis_index("x")
        tile[...] = jnp.full(TILE, 7.0)
        plgpu.commit_smem()

        @plgpu.when(at == 0)
        def _():
            o[0, HALVES[1]] = tile[HALVES[1]]
            plgpu.barrier_arrive(free)
            plgpu.barrier_wait(free)

        @plgpu.when(at == 1)
        def _():
            plgpu.barrier_arrive(free)
            o[1, HALVES[1]] = tile[read_late]
            plgpu.barrier_wait(free)

        multicast(x, tile, barrier)
        plgpu.barrier_wait(barrier)
        o[at, HALVES[0]] = tile[HALVES[1]]

    scratch = [*ONE_TILE, plgpu.ClusterBarrier(collective_axes="x")]
    return lambda **options: pair_kernel(body, scratch, **options)(ramp(*TILE))


@pytest.mark.parametrize("asynchrony", ASYNCHRONY)
def test_a_cta_may_read_the_rows_of_a_multicast_that_it_will_copy_itself(asynchrony):
    for seed in range(8):
        got = early_multicast(HALVES[1])(seed=seed, asynchrony=asynchrony)
        expected = np.broadcast_to(np.float32(7), (2, *TILE)).copy()
        expected[:, :2] = ramp(*TILE)[2:]
        np.testing.assert_array_equal(got, expected)


def records_of_a_multicast(ctas, monkeypatch):
    """Returns how many accesses to SMEM a multicast records and how many copies it
    has in flight, in a cluster of a size."""

    def body(x, o, tile, barrier):
        multicast(x, tile, barrier)
        plgpu.barrier_wait(barrier)
        o[lax.axis_index("x")] = tile[...]

    counts = collections.Counter()

    def counted(owner, method, name):
        original = getattr(owner, method)

        def count(self, *args, **kwargs):
            counts[name] += 1
            return original(self, *args, **kwargs)

        monkeypatch.setattr(owner, method, count)

    with monkeypatch.context():
        counted(History, "access", "records")
        counted(InFlight, "submit", "copies")
        x = ramp(ctas, 128)
        scratch = [plgpu.SMEM(x.shape, F32), plgpu.Barrier()]
        out = pair_kernel(body, scratch, out=(ctas, *x.shape), cluster=(ctas,))(x)
    np.testing.assert_array_equal(out, np.broadcast_to(x, (ctas, *x.shape)))
    return counts


def test_the_cost_of_a_multicast_is_linear_in_the_cluster(monkeypatch):
    # Each CTA also reads its copy and stores it.
    for ctas in (2, 4, 8):
        assert records_of_a_multicast(ctas, monkeypatch) == {
            "records": 3 * ctas,
            "copies": ctas,
        }


# --- mistakes -------------------------------------------------------------------------


@pytest.mark.parametrize("asynchrony", ASYNCHRONY)
def test_a_slot_freed_for_its_own_cta_alone_is_a_race(asynchrony):
    make = pipeline(lambda n: plgpu.Barrier(num_barriers=n))
    for seed in range(3):
        with pytest.raises(errors.RaceError, match=r"SMEM .* of CTA"):
            make(seed=seed, asynchrony=asynchrony)(ramp(6, *TILE))


def test_reading_the_piece_of_another_cta_before_the_wait_is_a_race():
    def body(x, o, tile, barrier, ready):
        at = lax.axis_index("x")
        multicast(x, tile, barrier)
        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)
        o[at, pl_half(1 - at)] = tile[pl_half(1 - at)]
        plgpu.barrier_wait(barrier)

    def pl_half(i):
        return plgpu.ds(2 * i, 2)

    scratch = [*ONE_TILE, plgpu.ClusterBarrier(collective_axes="x")]
    with pytest.raises(errors.RaceError, match="read before the copy from input 0"):
        pair_kernel(body, scratch)(ramp(*TILE))


@pytest.mark.parametrize("asynchrony", ASYNCHRONY)
def test_reading_the_rows_of_a_multicast_that_another_cta_copies_is_a_race(asynchrony):
    for seed in range(8):
        with pytest.raises(errors.RaceError, match="the copy from input 0"):
            early_multicast(HALVES[0])(seed=seed, asynchrony=asynchrony)


@refused
def test_a_multicast_that_one_cta_does_not_call_is_named_in_the_deadlock():
    def body(x, o, tile, barrier):
        @plgpu.when(lax.axis_index("x") == 0)
        def _():
            multicast(x, tile, barrier)
            plgpu.barrier_wait(barrier)

        @plgpu.when(lax.axis_index("x") == 1)
        def _():
            plgpu.barrier_wait(barrier)

    pair_kernel(body, ONE_TILE)(ramp(*TILE))


def test_a_cta_may_not_end_while_another_multicasts_into_it():
    def body(x, o, tile, barrier):
        @plgpu.when(lax.axis_index("x") == 0)
        def _():
            multicast(x, tile, barrier)
            plgpu.barrier_wait(barrier)

    for seed in range(4):
        with pytest.raises(errors.KernelError) as caught:
            pair_kernel(body, ONE_TILE, seed=seed)(ramp(*TILE))
        text = str(caught.value)
        assert "CTA (x=1)" in text
        assert (
            "a multicast writes to" in text
            or "is freed while" in text
            or "in the middle of a phase" in text
        )


@refused_by(lambda body: pair_kernel(body, ONE_TILE)(ramp(2, *TILE)))
def test_the_ctas_of_a_multicast_have_to_copy_the_same_part(x, o, tile, barrier):
    multicast(x.at[lax.axis_index("x")], tile, barrier)
    plgpu.barrier_wait(barrier)


def test_a_deadlock_on_a_cluster_barrier_counts_the_arrivals_of_all_ctas():
    def body(o, ready):
        @plgpu.when(lax.axis_index("x") == 0)
        def _():
            plgpu.barrier_arrive(ready)

        plgpu.barrier_wait(ready)

    barrier = plgpu.ClusterBarrier(collective_axes="x", num_arrivals=2)
    with pytest.raises(errors.DeadlockError, match="1 of 4 arrivals"):
        pair_kernel(body, [barrier])()


def test_an_arrival_on_a_cluster_barrier_that_nobody_waits_for_is_legal_at_the_end():
    def body(o, ready):
        at = lax.axis_index("x")
        o[at] = jnp.ones(TILE, F32)

        @plgpu.when(at == 0)
        def _():
            plgpu.barrier_arrive(ready)

    barrier = plgpu.ClusterBarrier(collective_axes="x")
    np.testing.assert_array_equal(pair_kernel(body, [barrier])(), np.ones((2, *TILE)))


def test_a_deadlock_names_the_barrier_and_its_cta():
    def body(o, ready):
        plgpu.barrier_wait(ready.at[1])

    barrier = plgpu.ClusterBarrier(collective_axes="x", num_barriers=2)
    with pytest.raises(errors.DeadlockError) as caught:
        pair_kernel(body, [barrier])()
    assert "barrier ready[1] of CTA (x=1): 0 phases complete" in str(caught.value)


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

    found = []
    for seed in range(8):
        try:
            pair_kernel(body, [plgpu.Barrier()], seed=seed)(ramp(*TILE))
        except errors.RaceError as error:
            found.append(str(error))
    assert found, "some order of the CTAs shows it"
    assert "may still use that memory" in found[0]
    assert "ClusterBarrier" in found[0]


@refused_by(
    lambda body: pair_kernel(body, [plgpu.ClusterBarrier(collective_axes="x")])()
)
def test_two_ctas_of_a_cluster_that_write_the_same_element_race(o, ready):
    o[0] = jnp.full(TILE, lax.axis_index("x"), F32)
    plgpu.barrier_arrive(ready)
    plgpu.barrier_wait(ready)


def test_ctas_of_a_cluster_may_write_the_same_element_one_after_the_other():
    def body(o, ready):
        at = lax.axis_index("x")

        @plgpu.when(at == 0)
        def _():
            o[0] = jnp.ones(TILE, F32)

        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)

        @plgpu.when(at == 1)
        def _():
            o[0] = jnp.full(TILE, 2.0, F32)
            o[1] = o[0]

    run = pair_kernel(body, [plgpu.ClusterBarrier(collective_axes="x")])
    np.testing.assert_array_equal(run()[0], np.full(TILE, 2.0))

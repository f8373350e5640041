# SPDX-License-Identifier: Apache-2.0
"""Loads of two CTAs that the barrier of the leader tracks."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.refusal import refused_by
from tests.support.semantics import BOTH, under

F32 = jnp.float32
PARTITIONED = plgpu.CopyPartition.PARTITIONED
REPLICATED = plgpu.CopyPartition.REPLICATED
TILE = (16, 32)
TILED = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
PAIR = {"cluster": {"c": 2}}


def numbers(*shape):
    return np.random.default_rng(0).standard_normal(shape, np.float32)


# A partial function, so that errors name the line of its call.
load = functools.partial(plgpu.copy_gmem_to_smem, collective_axes="c")


def then(x, o, tile, full, ready):
    """The leader waits and tells the other; each stores what it has got."""

    @plgpu.when(lax.axis_index("c") == 0)
    def _():
        plgpu.barrier_wait(full)

    plgpu.barrier_arrive(ready)
    plgpu.barrier_wait(ready)
    o[lax.axis_index("c")] = tile[...]


def kernel(body, tile=TILE, transforms=(), target="sm_100a", mesh=PAIR, arrivals=1):
    return everywhere.kernel(
        body,
        jax.ShapeDtypeStruct((2, *tile), F32),
        plgpu.SMEM(tile, F32, transforms=transforms),
        plgpu.Barrier(num_arrivals=arrivals),
        plgpu.ClusterBarrier(collective_axes="c"),
        target=target,
        **mesh,
    )


def check(make, args, expected):
    everywhere.check(make, args, expected, on_gpu=False)


CASES = {
    "rows": ((32, 32), {"leader_tracked": PARTITIONED(0)}),
    "columns": ((16, 64), {"leader_tracked": PARTITIONED(1)}),
    "older spelling": ((32, 32), {"partitioned_axis": 0}),
    "replicated": (TILE, {"leader_tracked": REPLICATED}),
}


def halves(x, options):
    if options.get("leader_tracked") is REPLICATED:
        return np.stack([x, x])
    axis = 1 if options.get("leader_tracked") == PARTITIONED(1) else 0
    return np.stack(np.split(x, 2, axis))


@pytest.mark.parametrize("transforms", [(), TILED], ids=["plain", "tiled"])
@pytest.mark.parametrize("case", CASES)
def test_each_cta_gets_its_part_and_the_leader_counts_both(case, transforms):
    shape, options = CASES[case]

    def body(x, o, tile, full, ready):
        load(x, tile, full, **options)
        then(x, o, tile, full, ready)

    x = numbers(*shape)
    check(kernel(body, transforms=transforms), [x], halves(x, options))


@everywhere.gives(
    [numbers(2, 32, 3, 32)],
    lambda x: x[1, :, 1].reshape(2, *TILE),
    by=kernel,
    on_gpu=False,
)
def test_the_axis_counts_dimensions_that_are_not_indexed(x, o, tile, full, ready):
    load(x.at[1, :, 1], tile, full, leader_tracked=PARTITIONED(0))
    then(x, o, tile, full, ready)


@pytest.mark.parametrize("case", ["rows", "replicated"])
def test_a_warp_fetches_and_copies(case):
    shape, options = CASES[case]

    def body(x, o, tile, full, ready):
        @plgpu.warp_map
        def _(warp):
            @plgpu.when(warp == 1)
            def _():
                plgpu.async_prefetch(x, collective_axes="c", **options)
                load(x, tile, full, **options)

        then(x, o, tile, full, ready)

    x = numbers(*shape)
    check(kernel(body), [x], halves(x, options))


@everywhere.gives(
    [numbers(20, 32)],
    lambda x: np.stack([np.pad(x[8:], ((0, 4), (0, 0)))] * 2),
    by=kernel,
    on_gpu=False,
)
def test_each_cta_gets_zeros_for_what_lies_outside(x, o, tile, full, ready):
    load(x.at[plgpu.ds(8, 16)], tile, full, leader_tracked=REPLICATED)
    then(x, o, tile, full, ready)


@pytest.mark.parametrize("predicate", [False, True])
def test_a_skipped_copy_still_arrives_at_the_leader(predicate):
    def body(x, o, tile, full, ready):
        tile[...] = jnp.zeros(TILE, F32)
        plgpu.commit_smem()
        load(
            x, tile, full, leader_tracked=PARTITIONED(0), predicate=jnp.bool_(predicate)
        )
        then(x, o, tile, full, ready)

    x = numbers(32, 32)
    check(kernel(body), [x], x.reshape(2, *TILE) * predicate)


@everywhere.gives(
    [numbers(2, 16, 32)],
    lambda x: np.stack(
        [np.stack([x[0, 8 * c : 8 * c + 8], x[1, :8]]) for c in range(2)]
    ),
    by=kernel,
    on_gpu=False,
    tile=(2, 8, 32),
    arrivals=2,
)
def test_two_operands_share_a_barrier(x, o, tile, full, ready):
    load(x.at[0], tile.at[0], full, leader_tracked=PARTITIONED(0))
    load(x.at[1, 0:8], tile.at[1], full, leader_tracked=REPLICATED)
    then(x, o, tile, full, ready)


# --- what the emulator reports --------------------------------------------------------


def emulate(body, x, seeds=3, **options):
    for seed in range(seeds):
        params = plgpu.InterpretParams(seed=seed, asynchrony="random")
        kernel(body, **options)(params)(x)


@refused_by(lambda body: emulate(body, numbers(32, 32)))
def test_the_leader_has_to_wait(x, o, tile, full, ready):
    load(x, tile, full, leader_tracked=PARTITIONED(0))
    o[lax.axis_index("c")] = tile[...]

    @plgpu.when(lax.axis_index("c") == 0)
    def _():
        plgpu.barrier_wait(full)


@refused_by(lambda body: emulate(body, numbers(32, 32)))
def test_the_barrier_of_the_other_cta_gets_no_arrival(x, o, tile, full, ready):
    load(x, tile, full, leader_tracked=PARTITIONED(0))
    plgpu.barrier_wait(full)
    o[lax.axis_index("c")] = tile[...]


@refused_by(lambda body: emulate(body, numbers(32, 32)))
def test_the_leader_waits_in_vain_if_the_other_cta_copies_nothing(
    x, o, tile, full, ready
):
    @plgpu.when(lax.axis_index("c") == 0)
    def _():
        load(x, tile, full, leader_tracked=PARTITIONED(0))

    then(x, o, tile, full, ready)


@refused_by(lambda body: emulate(body, numbers(2, 16, 32), 20, tile=(2, 8, 32)))
def test_bytes_of_the_next_phase_do_not_complete_this_one(x, o, tile, full, ready):
    leads = lax.axis_index("c") == 0
    for step in range(2):
        load(x.at[step], tile.at[step], full, leader_tracked=PARTITIONED(0))
        plgpu.when(leads)(lambda: plgpu.barrier_wait(full))
    plgpu.barrier_arrive(ready)
    plgpu.barrier_wait(ready)
    o[lax.axis_index("c")] = tile[...]


# --- what is refused ------------------------------------------------------------------


def trace(body, **options):
    jax.eval_shape(kernel(body, **options)(None), jax.ShapeDtypeStruct((32, 32), F32))


@refused_by(trace)
def test_the_axis_of_the_ctas_is_named(x, o, tile, full, ready):
    load(x, tile, full, leader_tracked=PARTITIONED(0), collective_axes=None)  # HERE


@refused_by(trace)
def test_one_of_two_spellings(x, o, tile, full, ready):
    load(x, tile, full, leader_tracked=PARTITIONED(0), partitioned_axis=0)  # HERE


@refused_by(trace)
def test_a_source_is_divided_along_one_of_its_dimensions(x, o, tile, full, ready):
    load(x.at[0:31], tile, full, leader_tracked=PARTITIONED(0))  # HERE


@refused_by(trace)
def test_each_cta_has_room_for_its_half(x, o, tile, full, ready):
    load(x.at[0:16], tile, full, leader_tracked=PARTITIONED(0))  # HERE


@refused_by(trace, mesh={"cluster": {"c": 2, "d": 2}})
def test_the_ctas_have_adjacent_ranks(x, o, tile, full, ready):
    load(x, tile, full, leader_tracked=PARTITIONED(0))  # HERE


@refused_by(trace, target="sm_90a")
def test_hopper_has_no_pairs(x, o, tile, full, ready):
    load(x, tile, full, leader_tracked=PARTITIONED(0))  # HERE


@refused_by(trace)
def test_a_partition_is_written_with_its_class(x, o, tile, full, ready):
    load(x, tile, full, leader_tracked=0)


# --- what is emitted ------------------------------------------------------------------


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize("case", ["rows", "replicated"])
def test_the_instruction_signals_the_leader(case, semantics):
    shape, options = CASES[case]

    def body(x, o, tile, full, ready):
        load(x, tile, full, **options)
        then(x, o, tile, full, ready)

    make = under(semantics, kernel(body)(None))
    (report,) = plgpu.offline.compile(make, numbers(*shape), target="sm_100a")
    multicast = ".multicast::cluster" if case == "replicated" else ""
    assert f"complete_tx::bytes{multicast}.cta_group::2" in report.ptx
    assert "mapa" in report.ptx
    assert report.resources.spill_store_bytes == 0

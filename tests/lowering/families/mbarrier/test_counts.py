# SPDX-License-Identifier: Apache-2.0
"""Counts of a phase, everywhere: arrivals of several, bytes, arrivals of no copy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.features.row import Row
from tests.support.refusal import refused, refused_by
from tests.support.semantics import BOTH, under

ROW = jax.ShapeDtypeStruct((2, 128), jnp.float32)
ONES = np.ones(ROW.shape, np.float32)


def counted(first, second, declared, cluster=False):
    """Two warpgroups arrive with counts of their own; both wait, three times."""

    def body(o, barrier):
        wg = lax.axis_index("wg")

        @plgpu.loop(0, 3)
        def _(i):
            for number, count in enumerate((first, second)):
                plgpu.barrier_arrive(
                    barrier, num_arrivals=count, predicate=wg == number
                )
            plgpu.barrier_wait(barrier)

        @plgpu.when((wg == 0) & (lax.axis_index("c") == 0))
        def _():
            o[...] = jnp.ones(ROW.shape)

    declare = (
        plgpu.ClusterBarrier(collective_axes="c", num_arrivals=declared)
        if cluster
        else plgpu.Barrier(num_arrivals=declared)
    )
    return everywhere.kernel(body, ROW, declare, threads={"wg": 2}, cluster={"c": 2})


@pytest.mark.parametrize("cluster", [False, True])
def test_an_arrival_may_count_as_several(cluster):
    everywhere.check(counted(1, 4, 5, cluster), [], ONES)


@pytest.mark.offline
@pytest.mark.parametrize("cluster", [False, True])
@pytest.mark.parametrize("semantics", BOTH)
def test_the_instruction_has_the_count(semantics, cluster):
    kernel = under(semantics, counted(1, 4, 5, cluster)(None))
    (report,) = plgpu.offline.compile(kernel)
    arrivals = [x for x in report.ptx.splitlines() if "mbarrier.arrive." in x]
    as_four = [line for line in arrivals if line.strip().endswith(", 4;")]
    assert len(as_four) == len(arrivals) / 2 > 0


@pytest.mark.parametrize(("first", "second"), [(1, 3), (2, 4)])
@refused
def test_a_phase_has_neither_fewer_arrivals_than_declared_nor_more(first, second):
    counted(first, second, 5)(plgpu.InterpretParams())()


@refused_by(everywhere.emulate, [], ROW, plgpu.Barrier(num_arrivals=2))
def test_a_count_is_at_most_that_of_a_phase(o, barrier):
    plgpu.barrier_arrive(barrier, num_arrivals=3)  # HERE


@pytest.mark.parametrize("count", [0, -1, 2**20])
@refused_by(everywhere.emulate, [], ROW, plgpu.Barrier())
def test_a_count_is_one_of_the_hardware(o, barrier, *, count):
    plgpu.barrier_arrive(barrier, num_arrivals=count)  # HERE


@refused_by(
    everywhere.emulate,
    [],
    ROW,
    plgpu.ClusterBarrier(collective_axes="c", num_arrivals=2**19),
    cluster={"c": 2},
)
def test_the_arrivals_of_all_ctas_are_counted_by_the_hardware(o, barrier):
    """Each CTA of the cluster has as many as a barrier can count, and one more."""
    o[...] = jnp.ones(ROW.shape)


# --- copies that a predicate skips ----------------------------------------------------


def some_copies():
    """Each CTA copies one of two rows; the barrier has an arrival for both."""

    def body(x, o, rows, barrier):
        i = lax.axis_index("g")
        rows[...] = jnp.zeros((2, 128))
        plgpu.commit_smem()
        for row in range(2):
            plgpu.copy_gmem_to_smem(
                x.at[row], rows.at[row], barrier, predicate=i == row
            )
        plgpu.barrier_wait(barrier)
        o[i] = rows[0] + rows[1]

    return everywhere.kernel(
        body,
        ROW,
        plgpu.SMEM((2, 128), jnp.float32),
        plgpu.Barrier(num_arrivals=2),
        grid={"g": 2},
    )


def test_a_skipped_copy_arrives_without_bytes():
    x = np.arange(256, dtype=np.float32).reshape(2, 128)
    everywhere.check(some_copies(), [x], x)


@everywhere.gives([ONES], ONES, plgpu.SMEM((128,), jnp.float32), plgpu.Barrier())
def test_a_copy_that_a_constant_skips_arrives_without_bytes(x, o, row, barrier):
    plgpu.copy_gmem_to_smem(x.at[0], row, barrier, predicate=False)
    plgpu.barrier_wait(barrier)
    o[...] = x[...]


@everywhere.gives([], ONES * 0, plgpu.Barrier(num_arrivals=2), grid={"g": 2})
def test_a_skipped_arrival_does_not_count(o, barrier):
    plgpu.barrier_arrive(barrier, predicate=lax.axis_index("g") < 0)
    plgpu.barrier_arrive(barrier, predicate=lax.axis_index("g") >= 0)
    done = plgpu.barrier_test(barrier)
    o[lax.axis_index("g")] = jnp.full(128, done.astype(jnp.float32))


# --- bytes that somebody else completes -----------------------------------------------


def expecting(num_bytes, predicate=None):
    def body(o, barrier):
        plgpu.barrier_expect(barrier, num_bytes, predicate=predicate)  # HERE
        plgpu.barrier_arrive(barrier)
        done = plgpu.barrier_test(barrier)
        o[...] = jnp.full(ROW.shape, done.astype(jnp.float32))

    return everywhere.kernel(body, ROW, plgpu.Barrier())


@pytest.mark.parametrize(("num_bytes", "predicate"), [(0, None), (16, False)])
def test_no_bytes_are_there_at_once(num_bytes, predicate):
    everywhere.check(expecting(num_bytes, predicate), [], ONES)


@refused_by(everywhere.emulate, [], ROW, plgpu.Barrier())
def test_a_phase_waits_for_expected_bytes(o, barrier):
    plgpu.barrier_expect(barrier, 48)
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


@refused
def test_bytes_that_never_come_are_reported_at_the_end():
    expecting(32)(plgpu.InterpretParams())()


@refused_by(everywhere.emulate, [], ROW, plgpu.Barrier())
def test_a_barrier_counts_less_than_a_mebibyte(o, barrier):
    plgpu.barrier_expect(barrier, 2**20 - 1)
    plgpu.barrier_expect(barrier, 1)  # HERE


@pytest.mark.parametrize("count", [-1, 2**20])
@refused_by(everywhere.emulate, [], ROW, plgpu.Barrier())
def test_expected_bytes_are_a_count_of_the_hardware(o, barrier, *, count):
    plgpu.barrier_expect(barrier, count)  # HERE


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
def test_expected_bytes_are_no_arrival(semantics):
    (report,) = plgpu.offline.compile(under(semantics, expecting(16)(None)))
    assert "mbarrier.expect_tx.relaxed.cta.shared::cta.b64" in report.ptx
    assert report.ptx.count("mbarrier.arrive") == 1


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
def test_a_skipped_copy_announces_no_bytes(semantics):
    kernel = under(semantics, some_copies()(None))
    (report,) = plgpu.offline.compile(kernel, np.zeros((2, 128), np.float32))
    lines = report.ptx.splitlines()
    announced = [x for x in lines if "mbarrier.arrive.expect_tx" in x]
    copies = [x for x in lines if "cp.async.bulk.shared::cluster.global" in x]
    assert len(announced) == len(copies) == 2
    # Bytes that are selected: 512, or 0.
    assert sum("selp" in x and "512" in x for x in lines) == 2


GOOD = {
    "barrier_arrive": lambda e: {"barrier": e.b},
    "barrier_expect": lambda e: {"barrier": e.b, "num_bytes": 16},
}
EFFECTS = {
    "barrier_arrive.num_arrivals": "",
    "barrier_arrive.predicate": [lambda e: e.i == 0],
    "barrier_expect.predicate": "",
}
FEATURES = [
    Row(
        "arrivals, waits, phases; counts of arrivals",
        upstream=(
            "primitives: barrier_arrive",
            "primitives: barrier_wait, phase bits",
            "scratch: TMABarrier, Barrier",
            "copy: arrive=True and False",
        ),
        operations=("barrier_arrive", "barrier_wait"),
        runs="an_arrival_may_count_as_several",
        offline="the_instruction_has_the_count",
        instruction="mbarrier.arrive.",
        omissions={
            "wait": "smem_handover: no wait for the other",
            "count": "lines: one arrival",
        },
    ),
    Row(
        "bytes that somebody else completes",
        upstream=("copy: transaction counts by hand",),
        operations=("barrier_expect",),
        runs="no_bytes_are_there_at_once",
        offline="expected_bytes_are_no_arrival",
        instruction="mbarrier.expect_tx.relaxed.cta.shared::cta.b64",
        omissions={"count": "lines: bytes of nobody"},
    ),
]

# SPDX-License-Identifier: Apache-2.0
"""The order of accesses to tensor memory: a kernel and its mutants for each pair."""

from __future__ import annotations

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from pallas_gpu.emulator.gpu.tensor_cores.order import ORDER, Operation
from tests.support import everywhere, tiers
from tests.support.mutations.mutant import Switches
from tests.support.semantics import BOTH
from tests.support.tensor_orders import PAIRS, M, N, make, model
from tests.support.tensor_products import F32, storage

SCHEDULES = [
    {"asynchrony": asynchrony, "seed": seed}
    for seed, asynchrony in enumerate(("random", "eager", "late", "random"))
]
DOCS = pathlib.Path(__file__).parents[4] / "docs" / "semantics.md"


def schedules():
    return SCHEDULES if tiers.runs_everything() else SCHEDULES[:1]


def ids(value):
    if isinstance(value, str):
        return value.replace(" ", "-")
    where = "crosses" if value.crosses else "stays"
    return f"{value.first.name}-{value.second.name}-{where}"


@pytest.mark.parametrize("pair", PAIRS, ids=ids)
def test_a_pair_that_is_ordered_raises_no_alarm(pair):
    for schedule in schedules():
        got = make(pair, Switches())(plgpu.InterpretParams(**schedule))()
        for value, expected in zip(got, model(pair), strict=True):
            np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize("pair", PAIRS, ids=ids)
def test_a_pair_that_is_ordered_is_right_as_emitted(pair):
    """The models of pallas_gpu/lockstep know the order in one warp alone."""
    executed = BOTH if pair.completes or pair.needs_nothing else ()
    kernel = make(pair, Switches())
    everywhere.check(
        kernel, [], model(pair), emulate=False, executed=executed, on_gpu=False
    )


@pytest.mark.parametrize(
    ("pair", "mistake"), [(pair, name) for pair in PAIRS for name in pair.mistakes],
    ids=ids,
)  # fmt: skip
def test_a_pair_without_an_order_is_a_race_in_every_run(pair, mistake):
    for schedule in schedules():
        kernel = make(pair, Switches(mistake))(plgpu.InterpretParams(**schedule))
        with pytest.raises(errors.RaceError, match=r"\(place\) is (read|written)"):
            kernel()


def test_the_docs_print_the_table():
    kinds = list(Operation)
    rows = [
        ["first \\ second", *(kind.value for kind in kinds)],
        *([first.value, *(ORDER[first, x].value for x in kinds)] for first in kinds),
    ]
    header, *lines = [f"| {' | '.join(row)} |" for row in rows]
    table = [header, "|---" * len(rows[0]) + "|", *lines]
    assert "\n".join(table) in DOCS.read_text()


# --- several in a row -----------------------------------------------------------------


def emulate(body, expected, schedule, threads=2):
    """A kernel over two arrays in TMEM, operands in SMEM, and barriers."""
    smem = plgpu.SMEM((M, N), F32, transforms=storage(F32, 64))
    barrier = plgpu.Barrier(orders_tensor_core=True)
    got = everywhere.emulate(
        body,
        [],
        expected,
        plgpu.TMEM((M, N), F32),
        plgpu.TMEM((M, N), F32),
        *(smem, smem),
        plgpu.SMEM((N, N), F32, transforms=storage(F32, 64)),
        *(barrier, barrier),
        threads={"wg": threads},
        target="sm_100a",
        **schedule,
    )
    np.testing.assert_array_equal(got, expected)


def fill(held, left, right):
    held[...] = jnp.full((M, N), 2, F32)
    left[...] = jnp.full((M, N), 1, F32)
    right[...] = jnp.full((N, N), 1, F32)
    plgpu.commit_smem()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("reads", [True, False])
def test_a_copy_follows_a_copy_that_a_product_in_between_has_read(reads, schedule):
    def body(out, place, other, held, left, right, done, _):
        fill(held, left, right)
        plgpu.async_copy_smem_to_tmem(held, place)
        if reads:
            plgpu.tcgen05_mma(other, place, right.T, accumulate=False)
        plgpu.async_copy_smem_to_tmem(left, place)
        plgpu.tcgen05_mma(other, place, right.T, done, accumulate=reads)
        plgpu.barrier_wait(done)
        out[...] = other[...]

    expected = np.full((M, N), N * 3.0, np.float32)
    if reads:
        emulate(body, expected, schedule, threads=1)
        return
    with pytest.raises(errors.RaceError, match="async_copy_smem_to_tmem has been"):
        emulate(body, expected, schedule, threads=1)


def alternate(waits=True):
    """Two warpgroups take turns: the last commit completes the products of both."""

    def body(out, place, other, held, left, right, turn, done):
        wg = lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def _():
            fill(held, left, right)
            plgpu.tcgen05_mma(place, held, right.T, accumulate=False)
            plgpu.barrier_arrive(turn)

        @plgpu.when(wg == 1)
        def _():
            plgpu.barrier_wait(turn)
            plgpu.tcgen05_mma(place, left, right.T, done)
            if waits:
                plgpu.barrier_wait(done)
            # The operand of the first product, too.
            held[...] = jnp.zeros((M, N), F32)
            if not waits:
                plgpu.barrier_wait(done)
            out[...] = place[...]

    return body


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_product_that_is_complete_completes_those_that_it_follows(schedule):
    expected = np.full((M, N), N * 3.0, np.float32)
    emulate(alternate(), expected, schedule)
    with pytest.raises(errors.RaceError, match="while the tcgen05_mma may still read"):
        emulate(alternate(waits=False), expected, schedule)

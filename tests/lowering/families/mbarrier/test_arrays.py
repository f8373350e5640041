# SPDX-License-Identifier: Apache-2.0
"""Arrays of barriers, everywhere: what names one of them, and how many there may be."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.refusal import refused_by
from tests.support.semantics import BOTH, under

OUT = jax.ShapeDtypeStruct((2, 128), jnp.float32)
ONES = np.ones(OUT.shape, np.float32)


def uses(num_barriers, select):
    """A kernel in which each of two CTAs uses the barrier that `select` gives."""

    def body(o, barriers):
        i = lax.axis_index("g")
        plgpu.barrier_arrive_and_wait(select(barriers, i))
        o[i] = jnp.ones(128)

    return everywhere.kernel(
        body, OUT, plgpu.Barrier(num_barriers=num_barriers), grid={"g": 2}
    )


@pytest.mark.parametrize(
    ("num_barriers", "select"),
    {
        "one": ((), lambda b, i: b),
        "array_of_one": (1, lambda b, i: b),
        "array_of_one_in_two_dimensions": ((1, 1), lambda b, i: b),
        "everything_of_one": (1, lambda b, i: b.at[...]),
        "slice_of_one": (1, lambda b, i: b.at[0:1]),
        "slice": (4, lambda b, i: b.at[1:2]),
        "dynamic_slice": (4, lambda b, i: b.at[plgpu.ds(i + 1, 1)]),
        "index_of_a_slice": (4, lambda b, i: b.at[plgpu.ds(i + 1, 2)].at[1]),
        "from_the_end": (3, lambda b, i: b.at[-1]),
        "two_indices": ((2, 3), lambda b, i: b.at[i, 2]),
        "row_then_column": ((2, 3), lambda b, i: b.at[i].at[i + 1]),
        "slices": ((2, 3), lambda b, i: b.at[plgpu.ds(i, 1), 0:1]),
        "transposed": ((2, 3), lambda b, i: b.T.at[2, i]),
        "reshaped": (4, lambda b, i: b.reshape(2, 2).at[i, 1]),
        "slice_reshaped": (6, lambda b, i: b.at[2:6].reshape(2, 2).at[i, 0]),
        "reshaped_to_one": (1, lambda b, i: b.reshape(())),
        "new_axis": (2, lambda b, i: b.at[i, None]),
        "narrow_index": (4, lambda b, i: b.at[i.astype(jnp.uint8)]),
    }.values(),
    ids=lambda x: None,
)
def test_what_names_one_barrier(num_barriers, select):
    everywhere.check(uses(num_barriers, select), [], ONES)


@everywhere.gives(
    [],
    ONES,
    plgpu.Barrier(num_barriers=6),
    plgpu.SMEM((128,), jnp.float32),
    grid={"g": 2},
    threads={"wg": 2},
)
def test_reshaped_barriers_are_those_of_the_declaration(o, barriers, row):
    """Warpgroups meet at the same barrier, named by a reshape and without one."""

    wg, i = lax.axis_index("wg"), lax.axis_index("g")

    @plgpu.when(wg == 0)
    def _():
        row[...] = jnp.ones(128)
        plgpu.barrier_arrive(barriers.reshape(3, 2).T.at[i, 2])

    @plgpu.when(wg == 1)
    def _():
        plgpu.barrier_wait(barriers.at[4 + i])
        o[i] = row[...]


@refused_by(everywhere.emulate, [], OUT, plgpu.Barrier(num_barriers=4))
def test_a_static_index_of_reshaped_barriers_is_checked(o, barriers):
    plgpu.barrier_wait(barriers.reshape(2, 2).at[0, 2])  # HERE


def ring(size, rounds):
    """Each barrier of an array is waited for in each of some rounds, by each warpgroup.

    The phase of each is another one after an odd number of rounds.
    """

    def body(o, barriers):
        wg = lax.axis_index("wg")

        @plgpu.loop(0, rounds * size)
        def _(i):
            plgpu.barrier_arrive_and_wait(barriers.at[lax.rem(i * 5, size)])

        for static in (0, 31, 32, size - 1):
            plgpu.barrier_arrive_and_wait(barriers.at[static])
        o[wg] = jnp.ones(128)

    return everywhere.kernel(
        body, OUT, plgpu.Barrier(num_barriers=size, num_arrivals=2), threads={"wg": 2}
    )


@pytest.mark.parametrize("size", [33, 68])
@pytest.mark.parametrize("rounds", [1, 2])
def test_more_barriers_than_a_register_has_bits(size, rounds):
    everywhere.check(ring(size, rounds), [], ONES)


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
def test_warps_initialize_barriers_in_turns(semantics):
    kernel = under(semantics, ring(33, 1)(None))
    (report,) = plgpu.offline.compile(kernel)
    # Two warpgroups have eight warps.
    assert report.ptx.count("mbarrier.init.shared.b64") == 5
    assert report.resources.smem_bytes == 33 * 8

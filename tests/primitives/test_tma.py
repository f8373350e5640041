# SPDX-License-Identifier: Apache-2.0
"""What the copies refuse, and what they say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from tests.support import effects as see
from tests.support.entry_kernels import TILE, numbers, run
from tests.support.refusal import refused, refused_by

BARRIER = plgpu.Barrier()
SCRATCH = (TILE, BARRIER)
TILED = plgpu.SMEM(
    (64, 128),
    jnp.float32,
    transforms=(plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)),
)


load = plgpu.copy_gmem_to_smem
COPIES = {
    "a load takes its source from GMEM": lambda x, o, tile, full: load(tile, x, full),
    "a load goes to SMEM": lambda x, o, tile, full: load(x, o, full),
    "a store takes its source from SMEM": lambda x, o, tile, full: (
        plgpu.copy_smem_to_gmem(x, o)
    ),
    "references, not values": lambda x, o, tile, full: load(x[...], tile, full),
    "a barrier is no place": lambda x, o, tile, full: load(x, full, full),
    "shapes agree": lambda x, o, tile, full: load(x.at[0:32], tile, full),
    "inside of SMEM": lambda x, o, tile, full: load(
        x.at[0:8], tile.at[plgpu.ds(60, 8)], full
    ),
    "a predicate is one truth value": lambda x, o, tile, full: load(
        x, tile, full, predicate=jnp.array([True, False])
    ),
    "vmap does not reach it": lambda x, o, tile, full: jax.vmap(
        lambda on: load(x, tile, full, predicate=on)
    )(jnp.array([True, False])),
}


@pytest.mark.parametrize("copy", COPIES)
@refused_by(run, scratch_types=SCRATCH)
def test_a_copy_is_refused(x, o, tile, barrier, *, copy):
    COPIES[copy](x, o, tile, barrier)


@refused_by(run, scratch_types=(plgpu.SMEM((64, 128), jnp.int32), BARRIER))
def test_dtypes_of_a_copy_agree(x, o, tile, barrier):
    plgpu.copy_gmem_to_smem(x, tile, barrier)  # HERE


# Without it, threads carry what TMA cannot.
BY_TMA = {"implementation": plgpu.AsyncCopyImplementation.TMA}


@refused_by(run, scratch_types=(TILE,))
def test_a_load_by_tma_needs_a_barrier(x, o, tile):
    plgpu.copy_gmem_to_smem(x, tile, **BY_TMA)  # HERE


# Parts of the source and of a tiled destination.
PARTS = {
    "half of a tile": (slice(0, 4), slice(0, 4)),
    "from the middle of a tile": (slice(0, 8), slice(4, 12)),
    "from an odd row": (slice(0, 8), slice(3, 11)),
    "several pieces": ((..., slice(0, 32)), (..., slice(0, 32))),
}


@pytest.mark.parametrize("parts", PARTS)
@refused_by(run, scratch_types=(TILED, BARRIER))
def test_a_copy_takes_one_piece_of_whole_tiles(x, o, tile, barrier, *, parts):
    source, destination = PARTS[parts]
    plgpu.copy_gmem_to_smem(  # HERE
        x.at[source], tile.at[destination], barrier, **BY_TMA
    )


@refused_by(run, scratch_types=(plgpu.SMEM((4, 16), jnp.float32), BARRIER))
def test_a_copy_starts_at_128_bytes_of_smem(x, o, rows, barrier):
    plgpu.copy_gmem_to_smem(x.at[0, 0:16], rows.at[1], barrier, **BY_TMA)  # HERE


def test_a_copy_may_reach_over_the_edge_of_gmem():
    def body(x, o, tile, barrier):
        plgpu.copy_gmem_to_smem(x.at[plgpu.ds(-4, 64)], tile, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(tile, o)
        plgpu.wait_smem_to_gmem(0)

    padded = np.concatenate([np.zeros((4, 128), np.float32), numbers()])
    np.testing.assert_array_equal(run(body, scratch_types=SCRATCH), padded[:64])


@refused_by(run, scratch_types=(plgpu.SMEM((128, 64), jnp.float32), BARRIER))
def test_a_copy_keeps_the_order_of_dimensions(x, o, tile, barrier):
    plgpu.copy_gmem_to_smem(x.T, tile, barrier, **BY_TMA)  # HERE


def test_threads_copy_what_tma_refuses():
    def body(x, o, tile, barrier):
        plgpu.copy_gmem_to_smem(x.T, tile.T, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_gmem_to_smem(x.at[3:6, 1:6], tile.at[3:6, 1:6], barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(tile.at[:, 0:32], o.at[:, 0:32])
        plgpu.copy_smem_to_gmem(tile.at[:, 32:], o.at[:, 32:])

    np.testing.assert_array_equal(run(body, scratch_types=(TILED, BARRIER)), numbers())


@refused_by(run, scratch_types=SCRATCH)
def test_threads_cannot_copy_a_multicast(x, o, tile, barrier):
    plgpu.copy_gmem_to_smem(  # HERE
        x, tile, barrier, collective_axes="g",
        implementation=plgpu.AsyncCopyImplementation.CP_ASYNC,
    )  # fmt: skip


@pytest.mark.parametrize("n", [-1, True, 1.0, "1", None])
@pytest.mark.parametrize("wait", [plgpu.wait_gmem_to_smem, plgpu.wait_smem_to_gmem])
@refused_by(run)
def test_a_wait_names_a_number_of_copies_or_groups(x, o, *, wait, n):
    wait(n)  # HERE


@pytest.mark.parametrize("name", ["commit_smem", "commit_gmem"])
@refused
def test_a_fence_outside_of_a_kernel_is_refused(name):
    fence = getattr(plgpu, name)
    fence()  # HERE


FAMILIES = "tests/lowering/families"
GOOD = {
    "copy_gmem_to_smem": lambda e: {"src": e.x, "dst": e.s, "barrier": e.b},
    "copy_smem_to_gmem": lambda e: {"src": e.s, "dst": e.o},
    "commit_gmem": lambda e: {},
    "commit_smem": lambda e: {},
    "commit_smem_to_gmem_group": lambda e: {},
    "wait_smem_to_gmem": lambda e: {"n": 0},
}
EFFECTS = {
    "copy_gmem_to_smem.barrier": [lambda e: e.b],
    "copy_gmem_to_smem.collective_axes": ["g"],
    "copy_gmem_to_smem.cache_hint": f"{FAMILIES}/copies/test_cache_hints.py",
    "copy_gmem_to_smem.implementation": "",
    "copy_gmem_to_smem.leader_tracked": f"{FAMILIES}/test_leader_tracked.py",
    "copy_gmem_to_smem.oob_mode": "tests/emulator/gpu/test_tma.py",
    "copy_gmem_to_smem.partitioned_axis": f"{FAMILIES}/test_leader_tracked.py",
    "copy_gmem_to_smem.predicate": [lambda e: e.i == 0],
    "copy_smem_to_gmem.cache_hint": f"{FAMILIES}/copies/test_cache_hints.py",
    "copy_smem_to_gmem.commit_group": [True, False],
    "copy_smem_to_gmem.predicate": [lambda e: e.i == 0],
    "copy_smem_to_gmem.reduction_op": f"{FAMILIES}/test_copy_reductions.py",
    "wait_smem_to_gmem.wait_read_only": lambda: see.bodies(
        *(
            lambda e, r=r: (plgpu.wait_smem_to_gmem(0, r), e.o.set(1.0, (0, 0)))
            for r in (False, True)
        )
    ),
}

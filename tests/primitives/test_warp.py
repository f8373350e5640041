# SPDX-License-Identifier: Apache-2.0
"""warp_map: what it computes everywhere, and what it refuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.entry_kernels import TILE, numbers, run
from tests.support.refusal import refused, refused_by
from tests.support.tensor_products import BLACKWELL

I32 = jnp.int32


# --- what it does ---------------------------------------------------------------------


@everywhere.gives([], np.arange(8, dtype=np.int32).reshape(2, 4), threads={"wg": 2})
def test_the_warps_of_each_warpgroup_run(o):
    wg = lax.axis_index("wg")

    @plgpu.warp_map
    def _(warp_id):
        o[wg, warp_id] = 4 * wg + warp_id


@everywhere.gives([], np.array([0, 1, 2, 3, 7], np.int32), threads={"wg": 2})
def test_one_warpgroup_alone_may_let_its_warps_run(o):
    @plgpu.when(lax.axis_index("wg") == 1)
    def _():
        @plgpu.warp_map
        def _(warp_id):
            o[warp_id] = warp_id

    @plgpu.when(lax.axis_index("wg") == 0)
    def _():
        o[4] = jnp.int32(7)


@everywhere.gives(
    [numbers(5, 8)],
    lambda x: x.diagonal(),
    plgpu.SMEM((8,), jnp.float32),
    plgpu.Barrier(),
)
def test_each_warp_keeps_its_parity_from_one_warp_map_to_the_next(x, o, tile, full):
    """Warp 1 waits for five phases in two regions; the others for none."""

    def one_copy(i, warp_id):
        @plgpu.when(warp_id == 1)
        def _():
            plgpu.copy_gmem_to_smem(x.at[i], tile, full)
            plgpu.barrier_wait(full)
            o[i] = tile[i]

    @plgpu.warp_map
    def _(warp_id):
        for i in range(2):
            one_copy(i, warp_id)

    @plgpu.loop(2, 5)
    def _(i):
        @plgpu.warp_map
        def _(warp_id):
            one_copy(i, warp_id)


@everywhere.gives([numbers()], numbers(), TILE)
def test_the_warpgroup_waits_for_the_stores_of_its_warps(x, o, tile):
    tile[...] = x[...]
    plgpu.commit_smem()

    @plgpu.warp_map
    def _(warp_id):
        rows = plgpu.ds(16 * warp_id, 16)
        plgpu.copy_smem_to_gmem(tile.at[rows], o.at[rows])

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    tile[...] = x[...] * 2


@everywhere.gives(
    [np.array([5], np.int32)], np.array([0, 0, 5, 15] * 2, np.int32), grid={"i": 2}
)
def test_scalars_of_the_warpgroup_are_seen_inside(x, o):
    start = lax.axis_index("i") * 4
    factor = x[0]

    @plgpu.warp_map
    def _(warp_id):
        def step(i, total):
            return total + i * factor

        o[start + warp_id] = lax.fori_loop(0, warp_id, step, jnp.int32(0))


@everywhere.gives(
    [],
    np.arange(8, dtype=np.int32).reshape(2, 4),
    plgpu.ClusterBarrier(collective_axes=("c",), num_arrivals=4),
    cluster={"c": 2},
)
def test_warps_arrive_in_every_block_of_a_cluster(o, ready):
    me = lax.axis_index("c")

    @plgpu.warp_map
    def _(warp_id):
        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)
        o[me, warp_id] = 4 * me + warp_id


@everywhere.gives(
    [numbers()], lambda x: np.stack([x, x]), TILE, plgpu.Barrier(), cluster={"c": 2}
)
def test_a_warp_multicasts(x, o, tile, full):
    @plgpu.warp_map
    def _(warp_id):
        @plgpu.when(warp_id == 2)
        def _():
            plgpu.copy_gmem_to_smem(x, tile, full, collective_axes="c")

    plgpu.barrier_wait(full)
    o[lax.axis_index("c")] = tile[...]


@everywhere.gives(
    [numbers(3, 128)],
    lambda x: x[:, 0::32] + x[:, 31::32],
    plgpu.SMEM((128,), jnp.float32),
    plgpu.Barrier(num_barriers=4),
)
def test_each_warp_waits_for_a_barrier_of_its_own(x, o, tile, full):
    """The warp's number chooses the barrier, and the bit of its parity."""

    @plgpu.warp_map
    def _(warp_id):
        mine = plgpu.ds(32 * warp_id, 32)

        @plgpu.loop(0, 3)
        def _(i):
            source = x.at[i, mine]
            plgpu.copy_gmem_to_smem(source, tile.at[mine], full.at[warp_id])
            plgpu.barrier_wait(full.at[warp_id])
            o[i, warp_id] = tile[32 * warp_id] + tile[32 * warp_id + 31]


@everywhere.gives(
    [numbers(4)],
    lambda x: x * 2,
    plgpu.SMEM((4,), jnp.float32),
    plgpu.Barrier(num_arrivals=4),
    plgpu.Barrier(),
)
def test_predicates_and_loads_of_elements_are_the_warps(x, o, tile, full, done):
    """All four warps arrive for their copies, three of them with 0 bytes."""

    @plgpu.warp_map
    def _(warp_id):
        last = warp_id == 3
        plgpu.copy_gmem_to_smem(x, tile, full, predicate=last)
        plgpu.barrier_wait(full)
        o[warp_id] = plgpu.load(tile.at[warp_id]) * 2
        plgpu.barrier_arrive(done, predicate=last)

    plgpu.barrier_wait(done)


# --- what it refuses ------------------------------------------------------------------


F16_TILE = plgpu.SMEM((64, 64), jnp.float16)


@refused_by(run, scratch_types=[F16_TILE, F16_TILE])
def test_wgmma_is_refused(x, o, a, b):
    def multiply(acc):
        @plgpu.warp_map
        def _(warp_id):
            plgpu.wgmma(acc, a, b)  # HERE

    plgpu.run_scoped(multiply, plgpu.ACC((64, 64)))


@refused_by(run)
def test_an_accumulator_is_refused(x, o):
    def read(acc):
        @plgpu.warp_map
        def _(warp_id):
            o[0, 0] = acc[...][0, 0]  # HERE

    plgpu.run_scoped(read, plgpu.ACC((64, 64)))


TMEM_ACCESSES = {
    "a read": lambda held: held[...],
    "a write": lambda held: held.set(0),
    "an update": lambda held: held.addupdate(1),
    "a load": lambda held: plgpu.async_load_tmem(held),
    "a store": lambda held: plgpu.async_store_tmem(held, jnp.zeros((128, 8))),
}


@pytest.mark.parametrize("access", TMEM_ACCESSES.values(), ids=TMEM_ACCESSES)
@refused
def test_a_warp_does_not_load_or_store_tensor_memory(access):
    def body(x, o, held):
        @plgpu.warp_map
        def _(warp_id):
            access(held)

    held = plgpu.TMEM((128, 8), jnp.float32)
    run(body, scratch_types=[held], compiler_params=BLACKWELL)


@refused_by(run)
def test_the_equations_of_a_warp_are_checked_as_others_are(x, o):
    @plgpu.warp_map
    def _(warp_id):
        o[0, 0] = lax.exp(x[0, 0], accuracy=lax.Tolerance(atol=1e-5))  # HERE


CALLS = {
    "a count of registers": lambda x: plgpu.set_max_registers(40, action="decrease"),
    "a wait for products": lambda x: plgpu.wgmma_wait(0),
    "an accumulator": lambda x: plgpu.run_scoped(lambda _: None, plgpu.ACC((64, 64))),
    "another warp_map": lambda x: plgpu.warp_map(lambda inner: None),
    "a product": lambda x: x[:8, :8] @ x[:8, :8],
    "a layout over warps": lambda x: plgpu.layout_cast(x[...], plgpu.Layout.WGMMA),
    "a load in one": lambda x: plgpu.load(
        x.at[0], layout=plgpu.Layout.WG_STRIDED((128,), 1)
    ),
}


@pytest.mark.parametrize("call", CALLS)
@refused_by(run)
def test_what_takes_a_warpgroup_is_refused(x, o, *, call):
    @plgpu.warp_map
    def _(warp_id):
        CALLS[call](x)


@refused_by(run, num_threads=2, thread_name="wg")
def test_warps_do_not_allocate_together(x, o):
    @plgpu.warp_map
    def _(warp_id):
        shared = plgpu.SMEM((4,), I32)
        plgpu.run_scoped(lambda _: None, shared, collective_axes="wg")  # HERE


@refused_by(run)
def test_it_is_refused_in_a_function_that_jax_has_traced_before(x, o):
    """JAX keeps the jaxpr of a jitted function: its checks must not depend on that."""

    @jax.jit
    def total(ref):
        return (ref[:16, :16] @ ref[:16, :16]).sum()  # HERE

    o[0, 0] = total(x)

    @plgpu.warp_map
    def _(warp_id):
        o[1, 0] = total(x)


@refused_by(run)
def test_a_result_is_refused(x, o):
    plgpu.warp_map(lambda warp_id: warp_id)  # HERE


@refused_by(run)
def test_the_function_takes_the_number_of_its_warp(x, o):
    plgpu.warp_map(lambda: None)  # HERE


@refused
def test_it_is_part_of_a_kernel():
    plgpu.warp_map(lambda warp_id: None)  # HERE


# --- waits ----------------------------------------------------------------------------

BOTH = "a barrier is waited for both by some warps and by the warpgroup"


@refused_by(run, scratch_types=[TILE, plgpu.Barrier()])
def test_a_barrier_is_not_waited_for_inside_and_then_outside(x, o, tile, full):
    @plgpu.warp_map
    def _(warp_id):
        @plgpu.when(warp_id == 0)
        def _():
            plgpu.copy_gmem_to_smem(x, tile, full)
            plgpu.barrier_wait(full)

    plgpu.copy_gmem_to_smem(x, tile, full)
    plgpu.barrier_wait(full)  # HERE


@refused_by(run, scratch_types=[TILE, plgpu.Barrier()])
def test_a_barrier_is_not_waited_for_outside_and_then_inside(x, o, tile, full):
    plgpu.copy_gmem_to_smem(x, tile, full)
    plgpu.barrier_wait(full)

    @plgpu.warp_map
    def _(warp_id):
        plgpu.when(warp_id > 0)(lambda: plgpu.barrier_wait(full))  # HERE


@refused_by(run)
def test_the_waits_are_found_in_loops_branches_scopes_and_calls(x, o):
    @jax.jit
    def wait(barriers):
        plgpu.barrier_wait(barriers.at[1])

    def scoped(barriers):
        def step(state):
            i, total = state

            @plgpu.warp_map
            def _(warp_id):
                @plgpu.when(warp_id == 1)
                def _():
                    wait(barriers)

            return i + 1, total

        lax.while_loop(lambda s: s[0] < o[0, 0].astype(I32), step, (0, 0.0))

        @plgpu.loop(0, 2)
        def _(i):
            @plgpu.when(i > 0)
            def _():
                plgpu.run_scoped(lambda tile: plgpu.barrier_wait(barriers.at[0]), TILE)

    plgpu.run_scoped(scoped, plgpu.Barrier(num_barriers=2))

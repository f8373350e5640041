# SPDX-License-Identifier: Apache-2.0
"""Scopes in the emulator: fresh memory, barriers that stay, warpgroups that meet."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from tests.support.refusal import refused_by

F32 = jnp.float32


def kernel(body, out=(4,), **options):
    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(out, F32), **options)


@refused_by(lambda body: kernel(body)())
def test_a_scope_in_a_loop_finds_fresh_memory(o):
    def turn(i, _):
        def scope(tile):
            @plgpu.when(i == 0)
            def _():
                tile[...] = jnp.ones(4)

            o[...] = tile[...]

        plgpu.run_scoped(scope, plgpu.SMEM((4,), F32))

    lax.fori_loop(0, 2, turn, None)


def test_a_barrier_keeps_its_phase_from_visit_to_visit():
    def body(x, o):
        def turn(i, _):
            def scope(tile, barrier):
                plgpu.copy_gmem_to_smem(x.at[i], tile, barrier)
                plgpu.barrier_wait(barrier)
                o[i] = tile[...]

            plgpu.run_scoped(scope, plgpu.SMEM((4,), F32), plgpu.Barrier())

        lax.fori_loop(0, 5, turn, None)

    x = np.arange(20, dtype=np.float32).reshape(5, 4)
    np.testing.assert_array_equal(kernel(body, (5, 4))(x), x)


@refused_by(lambda body: kernel(body)())
def test_a_phase_nobody_waited_for_is_still_there_at_the_next_visit(o):
    def turn(i, _):
        def scope(barrier):
            plgpu.barrier_arrive(barrier)

            @plgpu.when(i == 2)
            def _():
                plgpu.barrier_wait(barrier)

        plgpu.run_scoped(scope, plgpu.Barrier())

    lax.fori_loop(0, 3, turn, None)


def test_a_scope_returns_values():
    def body(o):
        def scope(tile):
            tile[...] = jnp.ones(4)
            return tile[...] * 3

        o[...] = plgpu.run_scoped(scope, plgpu.SMEM((4,), F32))

    np.testing.assert_array_equal(kernel(body)(), np.full(4, 3.0))


def test_memory_of_a_shared_scope_belongs_to_all_warpgroups():
    def body(o, tile, ready):
        wg = lax.axis_index("wg")
        tile[wg] = wg.astype(F32)
        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)

        @plgpu.when(wg == 0)
        def _():
            o[...] = tile[...]

    run = kernel(
        body,
        scratch_types=[plgpu.SMEM((4,), F32), plgpu.Barrier(num_arrivals=4)],
        num_threads=4,
        thread_name="wg",
        interpret=plgpu.InterpretParams(detect_races=True),
    )
    np.testing.assert_array_equal(run(), np.arange(4))


@refused_by(lambda body: kernel(body, num_threads=2, thread_name="wg")())
def test_a_warpgroup_that_does_not_enter_is_named_in_the_deadlock(o):
    @plgpu.when(lax.axis_index("wg") == 0)
    def _():
        def scope(tile):
            tile[...] = jnp.ones(4)

        plgpu.run_scoped(scope, plgpu.SMEM((4,), F32), collective_axes="wg")

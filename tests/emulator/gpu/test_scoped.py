# SPDX-License-Identifier: Apache-2.0
"""Scopes in the emulator: fresh memory, barriers that stay, warpgroups that meet."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors

F32 = jnp.float32


def kernel(body, out=(4,), **options):
    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(out, F32), **options)


def test_a_scope_in_a_loop_finds_fresh_memory():
    def body(o):
        def turn(i, _):
            def scope(tile):
                @plgpu.when(i == 0)
                def _():
                    tile[...] = jnp.ones(4)

                o[...] = tile[...]

            plgpu.run_scoped(scope, plgpu.SMEM((4,), F32))

        lax.fori_loop(0, 2, turn, None)

    with pytest.raises(errors.UninitializedReadError):
        kernel(body)()


def test_a_phase_nobody_waited_for_is_still_there_at_the_next_visit():
    def body(o):
        def turn(i, _):
            def scope(barrier):
                plgpu.barrier_arrive(barrier)

                @plgpu.when(i == 2)
                def _():
                    plgpu.barrier_wait(barrier)

            plgpu.run_scoped(scope, plgpu.Barrier())

        lax.fori_loop(0, 3, turn, None)

    with pytest.raises(errors.BarrierError, match="missed its phase"):
        kernel(body)()


def test_a_warpgroup_that_does_not_enter_is_named_in_the_deadlock():
    def body(o):
        @plgpu.when(lax.axis_index("wg") == 0)
        def _():
            def scope(tile):
                tile[...] = jnp.ones(4)

            plgpu.run_scoped(scope, plgpu.SMEM((4,), F32), collective_axes="wg")

    run = kernel(body, num_threads=2, thread_name="wg")
    with pytest.raises(errors.DeadlockError, match="1 of 2 warpgroups have entered"):
        run()

# SPDX-License-Identifier: Apache-2.0
"""Scopes in the emulator: fresh memory, barriers that stay, warpgroups that meet."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.entry_kernels import f32
from tests.support.refusal import refused_by

F32 = jnp.float32
TILE = plgpu.SMEM((4,), F32)


def run(body, **options):
    return everywhere.emulate(body, (), f32(4), **options)


@refused_by(run)
def test_a_scope_in_a_loop_finds_fresh_memory(o):
    def turn(i, _):
        def scope(tile):
            plgpu.when(i == 0)(lambda: tile.set(jnp.ones(4)))
            o[...] = tile[...]  # HERE

        plgpu.run_scoped(scope, TILE)

    lax.fori_loop(0, 2, turn, None)


@refused_by(run)
def test_a_phase_nobody_waited_for_is_still_there_at_the_next_visit(o):
    def turn(i, _):
        def scope(barrier):
            plgpu.barrier_arrive(barrier)
            plgpu.when(i == 2)(lambda: plgpu.barrier_wait(barrier))  # HERE

        plgpu.run_scoped(scope, plgpu.Barrier())

    lax.fori_loop(0, 3, turn, None)


@refused_by(run, threads={"wg": 2})
def test_a_warpgroup_that_does_not_enter_is_named_in_the_deadlock(o):
    @plgpu.when(lax.axis_index("wg") == 0)
    def _():
        fill = lambda tile: tile.set(jnp.ones(4))  # noqa: E731
        plgpu.run_scoped(fill, TILE, collective_axes="wg")

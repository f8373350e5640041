# SPDX-License-Identifier: Apache-2.0
"""Semaphores of JAX's Pallas, and of this package, in received bodies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as upstream

import pallas_gpu as plgpu
from tests.bridge.test_bodies import X, call, check
from tests.support import everywhere
from tests.support.refusal import refused_by

ROWS = 8
SPEC = pl.BlockSpec((ROWS, 128), lambda i: (i, 0))
STEPS = X.shape[0] // ROWS


@everywhere.tests(
    check, X + 1, X, scratch_shapes=[upstream.SemaphoreType.REGULAR((2,))]
)
def test_a_semaphore_of_the_scratch(x_ref, o_ref, sems):
    pl.semaphore_signal(sems.at[1], 3)
    pl.semaphore_wait(sems.at[1], 2, decrement=True)
    o_ref[...] = x_ref[...] + pl.semaphore_read(sems.at[1]).astype(jnp.float32)
    upstream.semaphore_wait(sems.at[1], memory_scope="gpu")


@everywhere.tests(check, 2 * X, X, grid=(STEPS,), in_specs=[SPEC], out_specs=SPEC)
def test_a_semaphore_of_all_ctas(x_ref, o_ref):
    turn = pl.get_global(upstream.SemaphoreType.REGULAR)
    step = pl.program_id(0)
    upstream.semaphore_wait(turn, step, memory_scope="gpu")
    o_ref[...] = 2 * x_ref[...]

    @pl.when(step < STEPS - 1)
    def _():
        upstream.semaphore_signal(turn, step + 1, memory_scope="gpu")


@everywhere.tests(check, X, X, scratch_shapes=[plgpu.SemaphoreType.REGULAR])
def test_a_semaphore_of_this_package(x_ref, o_ref, sem):
    plgpu.semaphore_signal(sem)
    plgpu.semaphore_wait(sem)
    o_ref[...] = x_ref[...]


@everywhere.tests(check, X, X)
def test_a_delay(x_ref, o_ref):
    pl.delay(100)
    o_ref[...] = x_ref[...]


def test_a_semaphore_and_the_memory_of_another_device():
    def body(x_ref, o_ref, sem):
        other = 1 - lax.axis_index("x")
        upstream.remote_ref(o_ref, other)[...] = x_ref[...]
        pl.semaphore_signal(sem, device_id=other)
        pl.semaphore_wait(sem)

    whole = pl.BlockSpec(memory_space=upstream.GMEM)
    scratch = [upstream.SemaphoreType.REGULAR]
    options = {"in_specs": [whole], "out_specs": whole, "scratch_shapes": scratch}
    mesh = jax.sharding.AbstractMesh((2,), ("x",), (jax.sharding.AxisType.Auto,))
    f = jax.shard_map(
        lambda x: call(body, x, **options),
        mesh=mesh,
        in_specs=jax.P(),
        out_specs=jax.P(),
        check_vma=False,
    )
    lowered = jax.jit(f).trace(X).lower(lowering_platforms=("cuda",))
    assert "uses_xla_collective_metadata = true" in lowered.as_text()
    (report,) = plgpu.offline.lower(f, X)
    assert report.program.count("of device %") == 2


@refused_by(call, X, scratch_shapes=[upstream.SemaphoreType.REGULAR])
def test_other_devices_are_in_a_shard_map(x_ref, o_ref, sem):
    pl.semaphore_signal(sem, device_id=jnp.int32(1))
    o_ref[...] = x_ref[...]

# SPDX-License-Identifier: Apache-2.0
"""What is reported of kernels whose devices reach each other's memory."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from tests.support.devices import programs
from tests.support.devices.programs import REGULAR, neighbour
from tests.support.mutations.mutant import Launch
from tests.support.refusal import refused_by

X = np.zeros((4, 128), np.float32)


def on(body, *scratch, mesh=None, **options):
    """Runs a kernel on four devices."""
    mesh = {"x": 4} if mesh is None else mesh
    launch = Launch.on_mesh(mesh, body, [X], X, *scratch, **options)
    launch.call(plgpu.InterpretParams(seed=1))(X)


@refused_by(on, REGULAR, grid={"i": 2})
def test_a_deadlock_names_device_cta_and_line(x, o, sem):
    last = (lax.axis_index("x") == 3) & (lax.axis_index("i") == 1)
    plgpu.when(~last)(lambda: plgpu.semaphore_signal(sem, device_id=neighbour()))
    plgpu.semaphore_wait(sem)  # HERE
    o[...] = x[...]


@refused_by(on, REGULAR, mesh={"x": 2, "y": 2})
def test_devices_of_a_mesh_have_their_positions(x, o, sem):
    plgpu.semaphore_signal(sem, device_id={"y": 0})  # HERE
    o[...] = x[...]


@refused_by(on)
def test_stores_of_two_devices_race(x, o):
    first = plgpu.remote_ref(o, 0)
    first[0] = x[0] + lax.axis_index("x").astype(jnp.float32)  # HERE


@refused_by(on, plgpu.GMEM((1, 128), jnp.float32), REGULAR)
def test_a_store_after_the_signal(x, o, inbox, sem):
    plgpu.semaphore_signal(sem, device_id=neighbour())
    plgpu.remote_ref(inbox, neighbour())[...] = x[...]  # HERE
    plgpu.semaphore_wait(sem)
    o[...] = x[...]


@refused_by(on)
def test_a_load_that_may_come_after_the_end(x, o):
    o[...] = plgpu.remote_ref(x, neighbour())[...]  # HERE


@refused_by(on, plgpu.SMEM((1, 128), jnp.float32), REGULAR)
def test_a_copy_that_nobody_has_waited_for(x, o, tile, sem):
    tile[...] = x[...]
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, plgpu.remote_ref(o, neighbour()))  # HERE
    plgpu.semaphore_signal(sem, device_id=neighbour())
    plgpu.wait_smem_to_gmem(0)
    plgpu.semaphore_wait(sem)


@refused_by(on, REGULAR)
def test_a_wait_at_gpu_scope_for_another_device(x, o, sem):
    plgpu.remote_ref(o, neighbour())[...] = x[...]
    plgpu.semaphore_signal(sem, device_id=neighbour())
    plgpu.semaphore_wait(sem, memory_scope="gpu")  # HERE


@refused_by(on, plgpu.GMEM((1,), jnp.int32, init=0))
def test_an_atomic_at_gpu_scope_and_one_of_another_device(x, o, counter):
    o[...] = x[...]
    plgpu.atomic_add(plgpu.remote_ref(counter, neighbour()).at[0], 1)
    plgpu.atomic_add(counter.at[0], 1)  # HERE


@refused_by(on, plgpu.GMEM((1, 128), jnp.float32))
def test_what_another_device_has_not_stored_yet(x, o, inbox):
    o[...] = plgpu.remote_ref(inbox, neighbour())[...]  # HERE


@refused_by(on, REGULAR)
def test_a_device_that_the_mesh_does_not_have(x, o, sem):
    o[...] = x[...]
    next_one = lax.axis_index("x") + 1
    plgpu.semaphore_signal(sem, device_id=next_one)  # HERE
    plgpu.semaphore_wait(sem)


@refused_by(on, REGULAR)
def test_a_result_that_nobody_stores_on_one_device(x, o, sem):
    @plgpu.when(lax.axis_index("x") > 0)
    def _():
        o[...] = x[...]  # HERE

    plgpu.semaphore_signal(sem, device_id=neighbour())
    plgpu.semaphore_wait(sem)


# --- without XLA's barrier ------------------------------------------------------------

ALONE = {"compiler_params": plgpu.CompilerParams(skip_device_barrier=True)}
BARRIER = plgpu.SemaphoreType.BARRIER


@refused_by(on, REGULAR, **ALONE)
def test_a_device_that_may_not_have_started(x, o, sem):
    o[...] = plgpu.remote_ref(x, neighbour())[...]  # HERE
    plgpu.semaphore_signal(sem)
    plgpu.semaphore_wait(sem)


@refused_by(on, REGULAR, **ALONE)
def test_a_semaphore_of_a_launch_that_may_not_have_started(x, o, sem):
    plgpu.semaphore_signal(sem, device_id=neighbour())  # HERE
    plgpu.semaphore_wait(sem)
    o[...] = x[...]


def test_devices_that_meet_by_semaphores_of_the_program():
    def body(x, o, ready, done):
        next_one = neighbour()
        programs.meet(ready)
        plgpu.remote_ref(o, next_one)[...] = x[...]
        plgpu.semaphore_signal(done, device_id=next_one)
        plgpu.semaphore_wait(done)

    on(body, BARRIER, BARRIER, **ALONE)


def test_signals_at_gpu_scope_reach_another_device_through_a_thread():
    """Causality order holds over both scopes (PTX ISA, Memory Consistency Model)."""

    def body(x, o, local, remote):
        wg = lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def _():
            plgpu.remote_ref(o, neighbour())[...] = x[...] + 1
            plgpu.semaphore_signal(local, memory_scope="gpu")

        @plgpu.when(wg == 1)
        def _():
            plgpu.semaphore_wait(local, memory_scope="gpu")
            plgpu.semaphore_signal(remote, device_id=neighbour())
            plgpu.semaphore_wait(remote)

    launch = Launch.on_mesh({"x": 4}, body, [X], X, REGULAR, REGULAR, threads={"wg": 2})
    (got,) = launch.call(plgpu.InterpretParams(schedules=20))(X)
    np.testing.assert_array_equal(got, X + 1)

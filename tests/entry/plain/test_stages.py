# SPDX-License-Identifier: Apache-2.0
"""Loads that a loop with `num_stages` leaves where they are: errors that say why."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.refusal import refused_by

F32 = jnp.float32
X = np.ones((128, 64), np.float32)
TABLE = np.zeros(12, np.int32)
ZEROS = np.zeros((8, 64), np.float32)
OUT = jax.ShapeDtypeStruct((8, 64), jnp.float32)


def emulated(body, *args, scratch=()):
    everywhere.emulate(body, args, OUT, *scratch)


def emulated_ref(body):
    ref = jax.new_ref(X)
    plgpu.kernel(lambda x: body(ref, x), out_type=())(ref)


@refused_by(emulated, X)
def test_a_load_that_depends_on_the_carry(x, o):
    @plgpu.loop(0, 4, init_carry=(ZEROS, jnp.int32(0)), num_stages=3)  # HERE
    def last(i, carry):
        total, at = carry
        return total + x[plgpu.ds(at * 8, 8), :], at + 1

    o[...] = last[0]


@refused_by(emulated, X)
def test_a_load_of_what_the_loop_writes(x, o):
    @plgpu.loop(0, 4, num_stages=2)  # HERE
    def _(i):
        o[...] = o[...] + x[i, 0]


@refused_by(emulated, X, scratch=[plgpu.RefUnion(*[plgpu.SMEM((4,), jnp.int32)] * 2)])
def test_a_load_of_indices_in_memory_that_the_loop_writes(x, o, union):
    indices, others = union

    @plgpu.loop(0, 4, num_stages=2)  # HERE
    def _(i):
        others[...] = jnp.full(4, i)
        o[i] = x[indices[i], :]


@refused_by(emulated_ref)
def test_a_load_of_what_the_loop_writes_through_a_closure(closed_over, x):
    @plgpu.loop(0, 4, num_stages=2)  # HERE
    def _(i):
        closed_over[i + 1] = x[i, :] + closed_over[plgpu.ds(i, 1)].sum()


@refused_by(emulated, X)
def test_a_load_of_the_same_in_each_iteration(x, o):
    @plgpu.loop(0, 4, num_stages=2)  # HERE
    def _(i):
        o[i] = x[0, :] + x[8, i]


@refused_by(emulated, scratch=[plgpu.Barrier()])
def test_a_load_of_what_is_written_before_a_wait(o, full):
    o[...] = ZEROS

    @plgpu.loop(0, 2, init_carry=ZEROS[:4], num_stages=2)  # HERE
    def _(i, total):
        plgpu.barrier_arrive(full)
        plgpu.barrier_wait(full)
        return total + o[plgpu.ds(i * 4, 4), :]


@refused_by(emulated, X, TABLE, scratch=[plgpu.SMEM((12,), jnp.int32)])
def test_a_load_of_indices_that_are_copied_before_a_wait(x, table, o, smem):
    plgpu.copy_gmem_to_smem(table, smem)

    @plgpu.loop(0, 8, num_stages=2)  # HERE
    def _(i):
        plgpu.wait_gmem_to_smem(0)
        o[i] = x[smem[i], :]


@refused_by(emulated, X)
def test_a_load_of_what_the_kernel_before_may_write(x, o):
    @plgpu.loop(0, 8, num_stages=2)  # HERE
    def _(i):
        plgpu.griddepcontrol_wait()
        o[i] = x[i, :]


@refused_by(emulated, X)
def test_a_load_beyond_the_array(x, o):
    @plgpu.loop(0, 17, num_stages=3)
    def _(i):
        o[...] = x[plgpu.ds(i * 8, 8), :]  # HERE


@refused_by(emulated, X)
def test_a_load_in_a_branch(x, o):
    @plgpu.loop(0, 4, num_stages=2)  # HERE
    def _(i):
        @plgpu.when(i > 2)
        def _():
            o[...] = x[plgpu.ds(i * 8, 8), :]


@refused_by(emulated, X.astype(np.float16)[:, :63])
def test_a_load_of_rows_that_start_at_two_bytes(x, o):
    @plgpu.loop(0, 3, num_stages=2)  # HERE
    def _(i):
        o[:, :62] = x[plgpu.ds(i * 8, 8), :62].astype(F32)


@refused_by(emulated, X.astype(np.float16)[:, :64], np.zeros(3, np.int32))
def test_a_load_that_starts_at_any_column(x, starts, o):
    @plgpu.loop(0, 3, num_stages=2)  # HERE
    def _(i):
        o[:, :8] = x[:8, plgpu.ds(starts[i], 8)].astype(F32)


@refused_by(emulated, X.astype(np.float16)[:, :64])
def test_a_load_of_a_column(x, o):
    @plgpu.loop(0, 3, num_stages=2)  # HERE
    def _(i):
        o[0, :8] = x[plgpu.ds(i * 8, 8), 2].astype(F32)


@refused_by(emulated, X)
def test_a_body_without_loads(x, o):
    @plgpu.loop(0, 3, num_stages=2)  # HERE
    def _(i):
        o[...] = x[i, 1] + ZEROS


@refused_by(emulated, X)
def test_a_carry_of_another_type(x, o):
    @plgpu.loop(0, 3, init_carry=jnp.int32(0), num_stages=2)  # HERE
    def _(i, carry):
        return carry + x[i, 0]


@refused_by(emulated, X)
def test_a_loop_under_vmap(x, o):
    @jax.vmap
    def rows(scale):
        loop = plgpu.loop(0, 3, init_carry=scale, num_stages=2)
        return loop(lambda i, total: total + x[i, :].sum())  # HERE

    o[...] = rows(jnp.arange(8.0))[:, None]


@refused_by(lambda body: body())
def test_a_loop_outside_a_kernel():
    plgpu.loop(0, 3, num_stages=2)(lambda i: None)  # HERE


@refused_by(emulated, np.zeros((4, 256, 64), np.float32))  # HERE
def test_more_buffers_than_there_is_memory(x, o):
    @plgpu.loop(0, 4, num_stages=4)
    def _(i):
        o[...] = x[i][:8]

# SPDX-License-Identifier: Apache-2.0
"""Memory that a body asks for by a call: `get_global`, `jax.empty_ref`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_gpu import errors
from pallas_gpu import sparsecore as plsc
from tests.support.refusal import refused, refused_by
from tests.support.sparsecore import emitted
from tests.support.sparsecore.kernels import check, emulate, kernel, part
from tests.support.sparsecore.tracing import scalars, trace

X = np.arange(128, dtype=np.float32)
N = np.arange(128, dtype=np.int32)
V = plsc.VMEM((128,), jnp.float32)
M = plsc.SMEM((128,), jnp.int32)


def _two_arrays(x, o):
    a, b = plsc.get_global(V), plsc.get_global(V)
    plsc.sync_copy(x, a)
    b[...] = a[...] + 1
    plsc.sync_copy(b, o)


def _in_a_loop(x, o, v):
    plsc.sync_copy(x, v)

    @plsc.loop(0, 3)
    def _(i):
        last = plsc.get_global(V)
        plsc.when(i > 0)(lambda: v.__setitem__(..., v[...] + last[...]))
        last[...] = v[...]

    plsc.sync_copy(v, o)


def _shared(x, o, v):
    shared = plsc.get_global(plsc.VMEM_SHARED((128,), jnp.float32))
    arrived = plsc.get_global(plsc.SemaphoreType.DMA)
    plsc.async_copy(x, shared, arrived).wait()
    plsc.sync_copy(shared, v)
    plsc.sync_copy(v, o)


def _of_others(x, o, v):
    """The last subcore counts in the SMEM of the first, which waits for it."""
    counted = plsc.get_global(plsc.SMEM((8,), jnp.int32))
    s = lax.axis_index("s")
    counted[0] = 0
    plsc.subcore_barrier()
    plsc.fetch_and_add(counted.at[0], s, subcore_id=0)
    plsc.subcore_barrier()

    @plsc.when(s == 0)
    def _():
        plsc.sync_copy(x, v)
        v[...] += counted[0].astype(jnp.float32)
        plsc.sync_copy(v, o)


def _in_branches(x, o, v):
    plsc.sync_copy(x, v)

    def negated():
        v_ = plsc.get_global(V)
        v_[...] = -v[...]
        plsc.sync_copy(v_, o)

    lax.cond(v[part(0)][2] > 0, negated, lambda: plsc.sync_copy(v, o))


def _called(x, o):
    @jax.jit
    def moved(x, o):
        v = plsc.get_global(V)
        plsc.sync_copy(x, v)
        plsc.sync_copy(v, o)

    moved(x, o)
    moved(x, o)


def _empty(*shape, space=plsc.VMEM, dtype=jnp.float32):
    return jax.empty_ref(jax.ShapeDtypeStruct(shape, dtype), memory_space=space)


def _empty_arrays(x, o):
    a, m = _empty(128), _empty(8, space=plsc.SMEM, dtype=jnp.int32)
    plsc.sync_copy(x, a)
    m[3] = 2
    b = plsc.empty_ref_like(plsc.VMEM((2, 128), jnp.float32))
    b = plsc.empty_ref_like(b)
    b[1] = a[...] + m[3].astype(jnp.float32)
    plsc.sync_copy(b.at[1], o)


def _empty_in_loops_and_branches(x, o):
    shared = _empty(128, space=plsc.VMEM_SHARED)
    v = _empty(128)
    plsc.sync_copy(x, v)
    plsc.sync_copy(v, shared)

    def step(i, n):
        v = _empty(128)
        plsc.sync_copy(shared, v)

        def doubled():
            w = _empty(128)
            w[...] = v[...] * 2
            plsc.sync_copy(w, shared)

        lax.cond(i != 1, doubled, lambda: None)
        return n + v[part(0)][2].astype(jnp.int32)

    n = lax.fori_loop(0, 3, step, 0)
    plsc.sync_copy(shared, v)
    v[...] += n.astype(jnp.float32)
    plsc.sync_copy(v, o)


@pytest.mark.parametrize(
    "body, expected, scratch",
    [
        (_two_arrays, X + 1, ()),
        (_in_a_loop, X * 4, (V,)),
        (_shared, X, (V,)),
        (_in_branches, -X, (V,)),
        (_called, X, ()),
        (_empty_arrays, X + 2, ()),
        (_empty_in_loops_and_branches, X * 4 + 2 + 4 + 4, ()),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_each_call_has_an_array(body, expected, scratch):
    check(body, [X], expected, *scratch, subcores=1)


def test_subcores_reach_that_of_others():
    check(_of_others, [X], X + sum(range(16)), V)


def test_scratch_of_the_kernel_lasts_as_without_it():
    def body(x, o, v, counted):
        plsc.get_global(plsc.SMEM((8,), jnp.int32))[0] = 0
        counted[0] = 0
        plsc.subcore_barrier()
        plsc.when(lax.axis_index("s") == 1)(lambda: _copied(x, v, o))
        plsc.fetch_and_add(counted.at[0], 1, subcore_id=0)  # 0 may have ended

    emulate(body, [X], X, V, plsc.SMEM((8,), jnp.int32), schedules=6)


def _copied(x, v, o):
    plsc.sync_copy(x, v)
    plsc.sync_copy(v, o)


def test_a_scalar_subcore_has_smem():
    def body(x, o):
        m = plsc.get_global(M)
        plsc.sync_copy(x, m)
        m[1] += 7
        plsc.sync_copy(m, o)

    check(body, [N], N + np.int32(7) * (N == 1), scalar=True)


def test_each_call_is_one_allocation():
    build = emitted.lowered(kernel(_two_arrays, X), X)
    assert str(build.module).count("memref.alloca") == 2


@refused_by(trace, mesh=scalars())
def test_vmem_of_a_scalar_subcore(x, o):
    plsc.get_global(V)  # HERE


@refused_by(trace)
def test_a_call_in_a_parallel_loop(x, o):
    @plsc.parallel_loop(0, 4)  # HERE
    def _(i):
        plsc.get_global(V)


@refused_by(trace)
def test_more_vmem_than_there_is(x, o):
    plsc.get_global(plsc.VMEM((200_000,), jnp.float32))


@refused_by(trace)
def test_an_array_in_hbm(x, o):
    plsc.get_global(plsc.HBM((128,), jnp.float32))  # HERE


@refused_by(trace)
def test_not_a_declaration(x, o):
    plsc.get_global(jnp.float32)  # HERE


@refused
def test_a_call_outside_of_a_kernel():
    plsc.get_global(V)  # HERE


@refused_by(trace)
def test_an_empty_ref_without_a_memory(x, o):
    jax.empty_ref(jax.ShapeDtypeStruct((128,), jnp.float32))  # HERE


@refused_by(trace)
def test_an_empty_ref_like_one_of_another_tiling(x, o):
    plsc.empty_ref_like(plsc.VMEM((128,), jnp.float32, tiling="sparsecore"))  # HERE


@refused_by(trace)
def test_an_empty_ref_in_a_parallel_loop(x, o):
    @plsc.parallel_loop(0, 4)  # HERE
    def _(i):
        _empty(128)


def test_an_empty_ref_is_empty_in_each_iteration():
    def body(x, o):
        @plsc.loop(0, 2)
        def _(i):
            v = _empty(128)
            plsc.when(i == 0)(lambda: plsc.sync_copy(x, v))
            plsc.sync_copy(v, o)

    with pytest.raises(errors.UninitializedReadError):
        kernel(body, X, subcores=1)(X)


def test_what_is_read_has_to_be_written():
    def body(x, o):
        plsc.sync_copy(plsc.get_global(V), o)

    with pytest.raises(errors.UninitializedReadError):
        kernel(body, X, subcores=1)(X)

# SPDX-License-Identifier: Apache-2.0
"""Where the compiler inserts fences between threads and the copies that overwrite SMEM.

Each kernel is right in the emulator and as emitted code, under both semantics; without
its fences, the machine that executes the emitted module reports it.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.entry import call
from pallas_gpu.errors import PtxError
from pallas_gpu.memory import fences
from pallas_gpu.primitives.tma import fence_smem_p
from pallas_gpu.program.bodies import bodies, equations
from tests.support import everywhere
from tests.support.lockstep import faults

F32 = jnp.float32
ROWS = (64, 128)
RING = plgpu.SMEM((2, *ROWS), F32)
TILE = plgpu.SMEM(ROWS, F32)
BARRIER = plgpu.Barrier()
TWO = plgpu.Barrier(num_barriers=2)
X = np.arange(4 * 64 * 128, dtype=np.float32).reshape(4, *ROWS)
ROLES = {"threads": {"wg": 2}}
BY_HAND = plgpu.CompilerParams(unsafe_no_auto_barriers=True)


def kernel(body, *scratch, out=X, **options):
    return everywhere.kernel(body, out, *scratch, **options)(None)


def fenced(function, *args):
    """The names of the equations after each fence; "end" at the end of a scope."""
    (eqn,) = (
        eqn
        for eqn in equations(jax.make_jaxpr(function)(*args).jaxpr)
        if eqn.primitive is call.kernel_p
    )
    params = call.CallParams(**eqn.params)
    given = params.mesh, params.compiler_params
    fenced = fences.with_fences(params.jaxpr, *given)
    assert fences.with_fences(fenced, *given) is fenced, "more fences the second time"
    inner = (body for eqn in equations(fenced) for body in bodies(eqn))
    jaxprs = [fenced, *(body.jaxpr for body in inner)]
    return [
        jaxpr.eqns[i + 1].primitive.name if i + 1 < len(jaxpr.eqns) else "end"
        for jaxpr in dict.fromkeys(jaxprs)
        for i, eqn in enumerate(jaxpr.eqns)
        if eqn.primitive is fence_smem_p
    ]


def copy(source, target, barrier):
    plgpu.copy_gmem_to_smem(source, target, barrier)
    plgpu.barrier_wait(barrier)


def in_a_loop(x, o, tile, full):
    @plgpu.loop(0, 4)
    def _(i):
        copy(x.at[i], tile, full)
        o[i] = tile[...] + 1


def unrolled(x, o, tile, full):
    for i in range(4):
        copy(x.at[i], tile, full)
        o[i] = tile[...] + 1


def only_where_it_is_read(x, o, tile, full):
    @plgpu.loop(0, 4)
    def _(i):
        copy(x.at[i], tile, full)
        o[i] = jnp.zeros(ROWS, F32)

        @plgpu.when(i > 0)
        def _():
            o[i] = tile[...] + 1

    o[0] = x[0] + 1


def in_place(x, o, tile, full):
    """Its own fence for the copy out covers what the next copy in overwrites."""

    @plgpu.loop(0, 4)
    def _(i):
        copy(x.at[i], tile, full)
        tile[...] = tile[...] + 1
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, o.at[i])
        plgpu.wait_smem_to_gmem(0)


def by_roles(x, o, ring, full, empty):
    @plgpu.when(lax.axis_index("wg") == 0)
    def _():
        @plgpu.loop(0, 4)
        def _(i):
            slot = i % 2

            @plgpu.when(i >= 2)
            def _():
                plgpu.barrier_wait(empty.at[slot])

            plgpu.copy_gmem_to_smem(x.at[i], ring.at[slot], full.at[slot])

    @plgpu.when(lax.axis_index("wg") != 0)
    def _():
        @plgpu.loop(0, 4)
        def _(i):
            slot = i % 2
            plgpu.barrier_wait(full.at[slot])
            o[i] = ring[slot] + 1

            @plgpu.when(i < 2)
            def _():
                plgpu.barrier_arrive(empty.at[slot])


def readers_before_the_copies(x, o, ring, full, empty):
    """The reader's branch comes first: its accesses are none of the other's."""
    other = 1 - lax.axis_index("wg")

    @plgpu.when(other == 0)
    def _():
        @plgpu.loop(0, 2)
        def _(i):
            plgpu.barrier_wait(full.at[0])
            o[i] = ring[0] + 1
            o[2 + i] = x[2 + i] + 1
            plgpu.barrier_arrive(empty.at[0])

    @plgpu.when(other == 1)
    def _():
        @plgpu.loop(0, 2)
        def _(i):
            plgpu.copy_gmem_to_smem(x.at[i], ring.at[0], full.at[0])
            plgpu.barrier_wait(empty.at[0])


def by_a_warp(x, o, tile, full):
    @plgpu.loop(0, 4)
    def _(i):
        @plgpu.warp_map
        def _(warp):
            @plgpu.when(warp == 2)
            def _():
                plgpu.copy_gmem_to_smem(x.at[i], tile, full)

        plgpu.barrier_wait(full)
        o[i] = tile[...] + 1


def read_by_a_warp(x, o, tile, full):
    copy(x.at[0], tile, full)

    @plgpu.warp_map
    def _(warp):
        o[0, warp, 0] = tile[warp, 0]

    copy(x.at[1], tile, full)
    o[1] = tile[...] + 1
    o[0] = x[0] + 1
    o[2] = x[2] + 1
    o[3] = x[3] + 1


def where_warpgroups_meet(x, o, tile, full):
    wg = lax.axis_index("wg")
    mine = plgpu.ds(wg * 32, 32)

    @plgpu.loop(0, 4)
    def _(i):
        def together(scratch):
            @plgpu.when(wg == 0)
            def _():
                plgpu.copy_gmem_to_smem(x.at[i], tile, full)

            plgpu.barrier_wait(full)
            scratch[mine] = tile[mine] + 1
            o[i, mine] = scratch[mine]

        plgpu.run_scoped(together, TILE, collective_axes="wg")


def of_a_union(x, o, memory, full):
    tile, result = memory

    @plgpu.loop(0, 4)
    def _(i):
        copy(x.at[i], tile, full)
        value = tile[...] + 1
        result[...] = value
        o[i] = result[...]


UNION = plgpu.RefUnion(TILE, TILE)
COPY, ARRIVAL = "copy_gmem_to_smem", "barrier_arrive"
CASES = [
    (in_a_loop, (TILE, BARRIER), {}, [COPY]),
    (unrolled, (TILE, BARRIER), {}, [COPY] * 3),
    (only_where_it_is_read, (TILE, BARRIER), {}, [COPY]),
    (in_place, (TILE, BARRIER), {}, []),
    (by_roles, (RING, TWO, TWO), ROLES, [ARRIVAL]),
    (readers_before_the_copies, (RING, TWO, TWO), ROLES, [ARRIVAL]),
    (by_a_warp, (TILE, BARRIER), {}, ["warp_map"]),
    (read_by_a_warp, (TILE, BARRIER), {}, [COPY]),
    (where_warpgroups_meet, (TILE, BARRIER), ROLES, ["run_scoped"]),
    (of_a_union, (UNION, BARRIER), {}, [COPY]),
]


def name(value):
    return getattr(value, "__name__", "")


@pytest.mark.parametrize(("body", "scratch", "options", "before"), CASES, ids=name)
def test_a_fence_precedes_what_signals_that_threads_are_done(
    body, scratch, options, before
):
    assert fenced(kernel(body, *scratch, **options), X) == before
    everywhere.run(body, [X], X + 1, *scratch, **options)


@pytest.mark.parametrize(
    ("body", "scratch", "options"), [case[:3] for case in CASES if case[3]], ids=name
)
def test_the_machine_reports_fences_that_are_missing(body, scratch, options):
    fault = faults.drop("nvvm.fence.proxy")
    with pytest.raises(PtxError, match=r"(read|written) without fence\.proxy\.async"):
        faults.run(kernel(body, *scratch, **options), [X], fault)


@pytest.mark.parametrize("body", [in_a_loop, of_a_union], ids=name)
def test_without_automatic_barriers_there_is_none(body):
    scratch = UNION if body is of_a_union else TILE
    options = {"compiler_params": BY_HAND}
    assert fenced(kernel(body, scratch, BARRIER, **options), X) == []


def test_a_scope_that_is_entered_again_ends_with_one():
    def body(x, o):
        @plgpu.loop(0, 4)
        def _(i):
            def scope(tile, full):
                copy(x.at[i], tile, full)
                o[i] = tile[...] + 1

            plgpu.run_scoped(scope, TILE, BARRIER)

    for options in ({}, {"compiler_params": BY_HAND}):
        assert fenced(kernel(body, **options), X) == ["end"]
    everywhere.run(body, [X], X + 1)


def test_a_loop_of_one_step_does_not_come_back():
    def body(x, o, tile, full):
        @plgpu.loop(0, 1)
        def _(i):
            copy(x.at[i], tile, full)
            o[i] = tile[...] + 1

    assert fenced(kernel(body, TILE, BARRIER), X) == []


def test_reads_of_another_cta_are_fenced_for_the_cluster():
    def body(x, o, tile, full, done):
        other = 1 - lax.axis_index("c")

        @plgpu.loop(0, 4)
        def _(i):
            copy(x.at[i], tile, full)
            plgpu.barrier_arrive(done)
            plgpu.barrier_wait(done)
            o[i] = plgpu.cluster_ref(tile, {"c": other})[...] + 1
            plgpu.barrier_arrive(done)
            plgpu.barrier_wait(done)

    done = plgpu.ClusterBarrier(collective_axes="c")
    options = {"cluster": {"c": 2}}
    function = kernel(body, TILE, BARRIER, done, **options)
    assert fenced(function, X) == [ARRIVAL]
    (report,) = plgpu.offline.compile(function, X)
    assert "fence.proxy.async.shared::cluster" in report.ptx


# --- what the tensor core reads -------------------------------------------------------

A = np.arange(4 * 64 * 64).reshape(4, 64, 64) % 7
PRODUCT = plgpu.SMEM((64, 64), jnp.float16, transforms=(
    plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128),
))  # fmt: skip


def products(x, o, tile, full, free, *, reads):
    def accumulate(acc):
        @plgpu.loop(0, 4)
        def _(i):
            copy(x.at[i], tile, full)
            plgpu.wgmma(acc, tile, tile)
            plgpu.wgmma_wait(0)
            if reads:
                o[...] = tile[...].astype(F32)
            plgpu.barrier_arrive(free)
            plgpu.barrier_wait(free)

        return acc[...]

    o[...] = plgpu.run_scoped(accumulate, plgpu.ACC((64, 64), F32))


@pytest.mark.parametrize("reads", [False, True])
def test_what_the_tensor_core_reads_needs_none(reads):
    x, out = A.astype(np.float16), np.zeros((64, 64), np.float32)
    body = functools.partial(products, reads=reads)
    scratch = PRODUCT, BARRIER, BARRIER
    found = fenced(kernel(body, *scratch, out=out), x)
    assert found == ([ARRIVAL] if reads else [])
    expected = np.einsum("bij,bjk->ik", A, A).astype(np.float32)
    everywhere.run(body, [x], expected, *scratch)

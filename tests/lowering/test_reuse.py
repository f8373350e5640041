# SPDX-License-Identifier: Apache-2.0
"""Scopes that follow each other use the same bytes, in an order that is emitted."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.memory import fences, sharing
from tests.support import everywhere
from tests.support.lockstep import kernels as in_lockstep
from tests.support.refusal import refused_by
from tests.support.semantics import BOTH, under

F32 = jnp.float32
TILE = plgpu.SMEM((64, 128), F32)
X = np.arange(64 * 128, dtype=np.float32).reshape(64, 128)
TWO = {"threads": {"wg": 2}}


of = functools.partial(everywhere.kernel, out=(X, X))


def load(x, tile, barrier):
    plgpu.copy_gmem_to_smem(x, tile, barrier)
    plgpu.barrier_wait(barrier)


def threads_then_copy(x, o, p):
    def first(tile):
        tile[...] = x[...]
        o[...] = tile[...] * 2

    def second(tile, barrier):
        load(x, tile, barrier)
        p[...] = tile[...] + 1

    plgpu.run_scoped(first, TILE)
    plgpu.run_scoped(second, TILE, plgpu.Barrier())


def copy_in_a_loop(x, o, p):
    def turn(i, carry):
        def scope(tile, barrier):
            load(x, tile, barrier)
            tile[...] = tile[...] + 1
            p[...] = tile[...]
            o[...] = 2 * x[...]

        plgpu.run_scoped(scope, TILE, plgpu.Barrier())
        return carry

    lax.fori_loop(0, 3, turn, None)


def a_function_called_twice(x, o, p):
    @jax.jit
    def scoped():
        def scope(tile, barrier):
            load(x, tile, barrier)
            tile[...] = tile[...] * 2
            return tile[...]

        return plgpu.run_scoped(scope, TILE, plgpu.Barrier())

    o[...] = scoped()
    p[...] = scoped() - x[...] + 1


def values_that_outlive_their_memory(x, o, p):
    """Each thread reads what others have copied, and stores where others still read."""

    def first(tile, barrier):
        load(x, tile, barrier)
        return plgpu.load(tile, layout=plgpu.Layout.WGMMA, optimized=False)

    def second(tile):
        tile[...] = x[...]
        plgpu.commit_smem()
        return plgpu.load(tile, layout=plgpu.Layout.WGMMA, optimized=False)

    one = plgpu.run_scoped(first, TILE, plgpu.Barrier())
    two = plgpu.run_scoped(second, TILE)
    o[...] = one + two
    p[...] = two + 1


def within_another_scope(x, o, p):
    def outer(kept):
        kept[...] = x[...]

        def first(tile):
            tile[...] = kept[...] + 1
            p[...] = tile[...]

        def second(tile, barrier):
            load(x, tile, barrier)
            o[...] = tile[...] + kept[...]

        plgpu.run_scoped(first, TILE)
        plgpu.run_scoped(second, TILE, plgpu.Barrier())

    plgpu.run_scoped(outer, TILE)


def of_two_warpgroups(x, o, p, call=lambda f: f()):
    mine = plgpu.ds(lax.axis_index("wg") * 32, 32)

    def first(tile):
        tile[mine] = x[mine]
        o[mine] = tile[mine] * 2

    def second(tile, barrier):
        @plgpu.when(lax.axis_index("wg") == 0)
        def _():
            plgpu.copy_gmem_to_smem(x, tile, barrier)

        plgpu.barrier_wait(barrier)
        p[mine] = tile[mine] + 1

    call(lambda: plgpu.run_scoped(first, TILE, collective_axes="wg"))
    plgpu.run_scoped(second, TILE, plgpu.Barrier(), collective_axes="wg")


def in_a_function_of_two_warpgroups(x, o, p):
    of_two_warpgroups(x, o, p, lambda f: jax.jit(f)())


WITHOUT_BARRIERS = {
    "compiler_params": plgpu.CompilerParams(unsafe_no_auto_barriers=True)
}
COPIES = [threads_then_copy, copy_in_a_loop, a_function_called_twice]
# What has to be emitted between their scopes.
SHARING = [
    *((body, {}, "meets") for body in (*COPIES, within_another_scope)),
    (of_two_warpgroups, TWO, "meets"),
    (in_a_function_of_two_warpgroups, TWO, "meets"),
    (values_that_outlive_their_memory, WITHOUT_BARRIERS, "fences"),
]


def name(value):
    return getattr(value, "__name__", "")


@pytest.mark.parametrize(("body", "options", "kept"), SHARING, ids=name)
def test_scopes_take_turns(body, options, kept):
    everywhere.run(body, [X], (2 * X, X + 1), **options)


@pytest.mark.parametrize(("body", "options", "kept"), SHARING, ids=name)
def test_the_machine_reports_what_is_not_emitted(body, options, kept, monkeypatch):
    if kept == "meets":
        monkeypatch.setattr(fences, "with_fences", lambda jaxpr, *_: jaxpr)
    else:
        monkeypatch.setattr(sharing, "meets", lambda jaxpr: frozenset())
    lowered = in_lockstep.lower(of(body, **options)(None), [X])
    with pytest.raises(plgpu.errors.PtxError):
        lowered.run()


def test_a_scope_by_itself_needs_no_order():
    def body(x, o, p):
        def outer(a):
            def inner(b, barrier):
                load(x, b, barrier)
                a[...] = b[...]
                o[...] = 2 * a[...]
                p[...] = a[...] + 1

            plgpu.run_scoped(inner, TILE, plgpu.Barrier())

        plgpu.run_scoped(outer, TILE)

    (kernel,) = in_lockstep.lower(of(body)(None), [X]).kernels
    assert not sharing.meets(kernel.params.jaxpr)
    assert "fence.proxy" not in str(kernel.module)


@refused_by(lambda body: of(body)(plgpu.InterpretParams())(X))
def test_a_copy_in_flight_does_not_outlive_its_scope(x, o, p):
    def first(tile, barrier):
        plgpu.copy_gmem_to_smem(x, tile, barrier)

    plgpu.run_scoped(first, TILE, plgpu.Barrier())
    plgpu.run_scoped(lambda tile: None, TILE)


@refused_by(lambda body: of(body)(plgpu.InterpretParams())(X))
def test_a_store_in_flight_ends_before_another_scope_begins(x, o, p):
    def first(tile):
        tile[...] = x[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, o)

    plgpu.run_scoped(first, TILE)
    plgpu.run_scoped(first, TILE)
    plgpu.wait_smem_to_gmem(0)


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
def test_two_scopes_compile_to_the_memory_of_one(semantics):
    kernel = under(semantics, of(threads_then_copy)(None))
    (report,) = plgpu.offline.compile(kernel, X)
    assert report.resources.smem_bytes == X.nbytes + 8
    # The threads meet between what they did in the first scope and the copy.
    fence, copy = map(report.ptx.index, ("fence.proxy.async", "cp.async.bulk.tensor"))
    assert fence < report.ptx.index("bar.sync", fence) < copy

# SPDX-License-Identifier: Apache-2.0
"""Scopes of single warps: each warp has memory and barriers of its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.entry_kernels import numbers, run
from tests.support.refusal import refused_by
from tests.support.semantics import BOTH, under

ROW = plgpu.SMEM((64,), jnp.float32)


@everywhere.gives([numbers(3, 4, 64)], lambda x: x * 2)
def test_each_warp_has_memory_and_barriers_of_its_own(x, o):
    @plgpu.warp_map
    def _(warp_id):
        @plgpu.loop(0, 3)
        def _(i):
            def doubled(row, full):
                plgpu.copy_gmem_to_smem(x.at[i, warp_id], row, full)
                plgpu.barrier_wait(full)
                o[i, warp_id] = row[...] * 2

            plgpu.run_scoped(doubled, ROW, plgpu.Barrier())


def test_scopes_of_warps_are_nested_and_follow_each_other():
    """While one warp is in the first scope, another may be in the second."""

    def body(x, o, whole):
        whole[...] = x[...]

        @plgpu.warp_map
        def _(warp_id):
            def outer(a):
                def inner(b, c):
                    b[...] = a[...] * 2
                    c[...] = b[...].reshape(8, 8).T
                    o[0, warp_id] = b[...] + c[...].reshape(64)

                a[...] = whole[warp_id] + 1
                plgpu.run_scoped(inner, ROW, plgpu.SMEM((8, 8), jnp.float32))

            def after(d):
                d[...] = whole[plgpu.ds(warp_id, 2)]
                o[1, warp_id] = d[0] - d[1]

            plgpu.run_scoped(outer, ROW)
            plgpu.run_scoped(after, plgpu.SMEM((2, 64), jnp.float32))

    x = numbers(5, 64)
    b = 2 * (x[:4] + 1)
    turned = b.reshape(4, 8, 8).transpose(0, 2, 1).reshape(4, 64)
    expected = np.stack([b + turned, x[:4] - x[1:]])
    everywhere.run(
        body, [x], expected, scratch_types=[plgpu.SMEM((5, 64), jnp.float32)]
    )


@everywhere.gives(
    [numbers(8, 64)], lambda x: np.concatenate([x * 2, x[:2]]), threads={"wg": 2}
)
def test_the_warps_of_all_warpgroups_have_their_own(x, o):
    """One warpgroup is in a shared scope while warps of the other are in theirs."""
    wg = lax.axis_index("wg")

    def shared(tile):
        tile[wg] = x[wg]

        @plgpu.warp_map
        def _(warp_id):
            def doubled(row, full):
                plgpu.copy_gmem_to_smem(x.at[4 * wg + warp_id], row, full)
                plgpu.barrier_wait(full)
                o[4 * wg + warp_id] = row[...] * 2

            plgpu.run_scoped(doubled, ROW, plgpu.Barrier())

        o[8 + wg] = tile[wg]

    two_rows = plgpu.SMEM((2, 64), jnp.float32)
    plgpu.run_scoped(shared, two_rows, collective_axes="wg")


def test_a_function_allocates_for_the_warpgroup_and_for_its_warps():
    """JAX traces it once: the same scope has two places in the plan."""

    @jax.jit
    def copied(source, target):
        def scope(row, full):
            plgpu.copy_gmem_to_smem(source, row, full)
            plgpu.barrier_wait(full)
            target[...] = row[...]

        plgpu.run_scoped(scope, ROW, plgpu.Barrier())

    def body(x, o):
        copied(x.at[4], o.at[4])

        @plgpu.warp_map
        def _(warp_id):
            copied(x.at[warp_id], o.at[warp_id])

    everywhere.run(body, [numbers(5, 64)], numbers(5, 64))


def over_warps(x, o):
    @plgpu.kernel(
        mesh=plgpu.WarpMesh(axis_name="warp"),
        scratch_types={"row": ROW, "full": plgpu.Barrier()},
    )
    def copy(source, *, row, full):
        warp = lax.axis_index("warp")
        plgpu.copy_gmem_to_smem(source.at[warp], row, full)
        plgpu.barrier_wait(full)
        o[warp] = row[...] + lax.axis_size("warp")

    copy(x)


def test_a_kernel_over_warps_has_scratch_in_each_warp():
    x = numbers(4, 64)
    everywhere.run(over_warps, [x], x + 4)


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
def test_each_warp_waits_for_its_own_barrier(semantics):
    x = numbers(4, 64)
    kernel = plgpu.kernel(over_warps, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))
    (report,) = plgpu.offline.compile(under(semantics, kernel), x)
    assert report.ptx.count("mbarrier.init.shared.b64") == 4
    assert report.ptx.count("cp.async.bulk.shared::cluster.global") == 1
    copy, wait = map(report.ptx.index, ("cp.async.bulk", "mbarrier.try_wait"))
    assert "bar.sync" not in report.ptx[copy:wait]


@refused_by(run)
def test_a_scope_of_a_warp_is_not_left_while_a_copy_is_in_flight(x, o):
    @plgpu.warp_map
    def _(warp_id):
        def scope(row, full):
            plgpu.copy_gmem_to_smem(x.at[0], row, full)  # HERE

        plgpu.run_scoped(scope, plgpu.SMEM((128,), jnp.float32), plgpu.Barrier())


@refused_by(run)
def test_a_warp_declares_no_scratch_in_gmem(x, o):
    @plgpu.warp_map
    def _(warp_id):
        rows = plgpu.GMEM((4, 64), jnp.float32)
        plgpu.run_scoped(lambda rows: None, rows)  # HERE

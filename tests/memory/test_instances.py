# SPDX-License-Identifier: Apache-2.0
"""Arrays of `jax.vmap` whose instances start where TMA cannot address them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.refusal import refused
from tests.support.semantics import BOTH, under

F32 = jnp.float32


def ramp(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def loading(part, shape, **options):
    """Returns `make` for a kernel that copies a part of its argument to its result."""

    def body(x, o, tile, full):
        plgpu.copy_gmem_to_smem(x.at[part], tile, full, **options)  # HERE
        plgpu.barrier_wait(full)
        o[...] = tile[...]

    return of(body, shape, plgpu.SMEM(shape, F32), plgpu.Barrier())


def of(body, shape, *scratch, **options):
    make = everywhere.kernel(
        body, jax.ShapeDtypeStruct(shape, F32), *scratch, **options
    )
    return lambda interpret: jax.vmap(make(interpret))


def gives(args, expected, *scratch):
    """Makes a test of a body: what it gives for each instance."""
    return everywhere.gives(
        args, expected, *scratch, by=lambda body, *s: of(body, expected.shape[1:], *s)
    )


@pytest.mark.parametrize(
    ("shape", "size"), [((6,), 4), ((27,), 16), ((5, 5), 4), ((5, 13), 4)]
)
def test_bytes_that_are_aligned_in_the_first_instance_alone(shape, size):
    x = ramp(3, *shape)
    part = plgpu.ds(0, size)
    everywhere.check(loading(part, (size, *shape[1:])), [x], x[:, :size])


@pytest.mark.parametrize(
    ("columns", "size", "options"),
    [(6, 8, {}), (7, 4, {"cache_hint": "evict_first"})],
    ids=["over the edge", "with a hint for TMA"],
)
def test_parts_over_the_edge_and_with_hints(columns, size, options):
    x = ramp(3, columns)
    expected = np.pad(x, ((0, 0), (0, 2)))[:, :size]
    make = loading(plgpu.ds(0, size), (size,), **options)
    everywhere.check(make, [x], expected)


def test_results_and_nested_levels():
    def body(x, o, tile):
        tile[...] = x[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, o.at[plgpu.ds(0, 4)])
        plgpu.wait_smem_to_gmem(0)
        o[4] = x[0]

    make = of(body, (5,), plgpu.SMEM((4,), F32))
    x = ramp(2, 3, 4)
    expected = np.concatenate([x, x[:, :, :1]], axis=2)
    everywhere.check(lambda i: jax.vmap(make(i)), [x], expected)


@gives(
    [ramp(2, 17)],
    ramp(2, 17)[:, :16].reshape(2, 4, 4),
    plgpu.SMEM((4, 4), F32),
    plgpu.Barrier(num_arrivals=4),
)
def test_copies_in_loops_branches_and_warps(x, o, tile, full):
    @plgpu.warp_map
    def _(warp):
        @plgpu.loop(0, 4)
        def _(i):
            @plgpu.when(warp == i)
            def _():
                rows = plgpu.ds(4 * i, 4)
                plgpu.copy_gmem_to_smem(x.at[rows], tile.at[i], full)

    plgpu.barrier_wait(full)
    o[...] = tile[:, 0:4]


SCRATCH = plgpu.GMEM((6,), F32), plgpu.SMEM((4,), F32), plgpu.Barrier()


@gives([ramp(3, 6)], ramp(3, 6)[:, :4], *SCRATCH)
def test_scratch_in_gmem(x, o, copy, tile, full):
    copy[...] = x[...]
    plgpu.commit_gmem()
    plgpu.copy_gmem_to_smem(copy.at[plgpu.ds(0, 4)], tile, full)
    plgpu.barrier_wait(full)
    o[...] = tile[...]


@gives([ramp(3, 6)], ramp(3, 6))
def test_a_prefetch_is_left_out(x, o):
    plgpu.async_prefetch(x.at[plgpu.ds(0, 4)])
    o[...] = x[...]


@pytest.mark.parametrize("axis", ["parallel", "arbitrary"])
def test_blocks_of_pallas_call(axis):
    def make(interpret):
        block = plgpu.BlockSpec((64,), lambda i: (i,))

        def body(x, o):
            o[...] = x[...] + 1

        params = plgpu.CompilerParams(dimension_semantics=(axis,))
        return jax.vmap(
            plgpu.pallas_call(
                body, jax.ShapeDtypeStruct((101,), F32), grid=(2,), in_specs=[block],
                out_specs=block, compiler_params=params, interpret=interpret,
            )
        )  # fmt: skip

    x = ramp(3, 101)
    everywhere.check(make, [x], x + 1)


def test_what_all_instances_share_is_copied_by_tma():
    def body(x, y, o, tile, full):
        plgpu.copy_gmem_to_smem(x.at[plgpu.ds(0, 4)], tile, full)
        plgpu.barrier_wait(full)
        o[...] = tile[...] + y[...]

    x, y = ramp(6), ramp(3, 4)
    of_one = everywhere.kernel(body, y[0], plgpu.SMEM((4,), F32), plgpu.Barrier())
    make = lambda interpret: jax.vmap(of_one(interpret), (None, 0))  # noqa: E731
    everywhere.check(make, [x, y], x[:4] + y)
    assert "copy_gmem_to_smem" in str(jax.make_jaxpr(make(None))(x, y))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"oob_mode": plgpu.OOBFillMode.NAN}, id="nan"),
        pytest.param({"collective_axes": "c"}, id="multicast"),
    ],
)
@refused
def test_what_threads_cannot_copy_is_refused(options):
    cluster = {"cluster": (2,), "cluster_names": ("c",)}

    def body(x, o, tile, full):
        plgpu.copy_gmem_to_smem(x.at[plgpu.ds(0, 64)], tile, full, **options)  # HERE
        plgpu.barrier_wait(full)

    scratch = plgpu.SMEM((64,), F32), plgpu.Barrier()
    make = of(body, (1,), *scratch, **cluster)
    make(plgpu.InterpretParams())(ramp(2, 65))


@refused
def test_elements_that_share_bytes_with_others_are_refused():
    def body(x, o, tile, full):
        start = lax.axis_index("i")
        plgpu.copy_gmem_to_smem(x.at[plgpu.ds(start, 32)], tile, full)  # HERE
        plgpu.barrier_wait(full)

    tile = plgpu.SMEM((32,), jnp.int4)
    make = of(body, (1,), tile, plgpu.Barrier(), grid={"i": 1})
    make(plgpu.InterpretParams())(np.zeros((2, 66), jnp.int4))


@refused
def test_a_reduction_is_refused():
    def body(x, o, tile):
        tile[...] = x[...]
        plgpu.commit_smem()
        part = o.at[plgpu.ds(0, 4)]
        plgpu.copy_smem_to_gmem(tile, part, reduction_op="add")  # HERE

    make = of(body, (6,), plgpu.SMEM((4,), F32))
    make(plgpu.InterpretParams())(ramp(2, 4))


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
def test_the_instructions_are_those_of_threads(semantics):
    make = loading(plgpu.ds(0, 4), (4,))
    (report,) = plgpu.offline.compile(under(semantics, make(None)), ramp(3, 6))
    assert "cp.async.ca.shared.global" in report.ptx
    assert "cp.async.bulk" not in report.ptx

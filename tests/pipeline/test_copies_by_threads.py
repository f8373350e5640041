# SPDX-License-Identifier: Apache-2.0
"""Blocks of a `pallas_call` that threads copy, as TMA cannot address their rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu.runtime import ptx_stats
from tests.support import everywhere
from tests.support.entry_kernels import f32, numbers

ODD_BLOCKS = {
    "rows over the edge": ((100, 77), (32, 77), (4,), lambda i: (i, 0)),
    "columns over the edge": ((100, 77), (16, 32), (7, 3), lambda i, j: (i, j)),
    "narrow rows": ((7, 3), (4, 3), (2,), lambda i: (i, 0)),
    "rows of several elements": (
        (21, 6, 26),
        (8, 4, 26),
        (3, 2),
        lambda i, j: (i, j, 0),
    ),
    "lines of several rows": ((7, 6, 5), (1, 4, 5), (7, 2), lambda i, j: (i, j, 0)),
    "one axis": ((1001,), (256,), (4,), lambda i: (i,)),
    "squeezed": ((7, 33, 5), (None, 8, 5), (7, 5), lambda i, j: (i, j, 0)),
    "whole": ((1001,), (1001,), (1,), lambda i: (0,)),
}


def called(body, out, **options):
    """Returns what `everywhere.check` takes."""
    return lambda interpret: plgpu.pallas_call(
        body, out, interpret=interpret, **options
    )


@pytest.mark.parametrize("name", ODD_BLOCKS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_threads_copy_blocks_of_rows_that_tma_cannot_address(name, dtype):
    shape, block, grid, index_map = ODD_BLOCKS[name]
    x = (np.arange(np.prod(shape)) % 7).reshape(shape).astype(dtype)

    def body(x, o):
        o[...] = x[...] * 2

    spec = plgpu.BlockSpec(block, index_map)
    make = called(
        body,
        jax.ShapeDtypeStruct(shape, dtype),
        grid=grid,
        in_specs=[spec],
        out_specs=spec,
    )

    everywhere.check(make, [x], x * 2)


@pytest.mark.offline
@pytest.mark.parametrize(
    ("name", "copy"),
    [("rows over the edge", "cp.async.cg"), ("columns over the edge", "cp.async.ca")],
)
def test_threads_copy_blocks_by_cp_async_in_the_widest_parts(name, copy):
    """Adjacent rows are parts of 16 bytes, parts of rows may start anywhere."""
    shape, block, grid, index_map = ODD_BLOCKS[name]

    def body(x, o):
        o[...] = x[...] + 1

    spec = plgpu.BlockSpec(block, index_map)
    make = plgpu.pallas_call(
        body, f32(*shape), grid=grid, in_specs=[spec], out_specs=spec
    )
    (report,) = plgpu.offline.compile(make, f32(*shape))
    assert ptx_stats.count(report.ptx, copy) > 0
    assert ptx_stats.count(report.ptx, "ld.global") == 0


def test_what_is_outside_of_the_array_is_zero_in_a_block_that_threads_copy():
    x = numbers(7, 3) + 1

    def body(x, o):
        o[...] = jnp.broadcast_to(x[...].sum(), (1, 1))

    make = called(
        body,
        f32(2, 1),
        grid=2,
        in_specs=[plgpu.BlockSpec((4, 3), lambda i: (i, 0))],
        out_specs=plgpu.BlockSpec((1, 1), lambda i: (i, 0)),
    )

    everywhere.check(make, [x], np.array([[x[:4].sum()], [x[4:].sum()]]))


def test_steps_accumulate_in_a_block_that_threads_copy():
    x = numbers(13, 37)

    def body(x, o):
        @plgpu.when(plgpu.program_id(1) == 0)
        def _():
            o[...] = jnp.zeros(o.shape, o.dtype)

        o[...] += x[...].sum(axis=1)

    params = plgpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"))

    make = called(
        body,
        f32(13),
        grid=(4, 3),
        in_specs=[plgpu.BlockSpec((4, 16), lambda i, j: (i, j))],
        out_specs=plgpu.BlockSpec((4,), lambda i, j: (i,)),
        compiler_params=params,
    )

    # Under Lane the author would load the output in the layout of the sum.
    warpgroup = [plgpu.LoweringSemantics.Warpgroup]
    everywhere.check(make, [x], x.sum(axis=1), semantics=warpgroup)


def stores_at(step, last):
    """A sum over the last axis of the grid that the body stores at one of its steps."""

    def body(x, o, total):
        @plgpu.when(step == 0)
        def _():
            total[...] = jnp.zeros(total.shape, total.dtype)

        total[...] += x[...]

        @plgpu.when(step == last)
        def _():
            o[...] = total[...]

    return body


# Shape, grid, index map of the output: one block for all steps, some, or in turn.
VISITS = {
    "one block": ((16, 77), (5,), lambda k: (0, 0)),
    "a block for each row of the grid": ((50, 77), (4, 3), lambda i, k: (i, 0)),
    "blocks that return": ((50, 77), (2, 4, 3), lambda r, i, k: (i, 0)),
    "one step": ((16, 77), (1,), lambda k: (0, 0)),
}


@pytest.mark.parametrize("name", VISITS)
def test_a_block_that_threads_copy_may_be_stored_at_its_last_step_only(name):
    shape, grid, index_map = VISITS[name]
    last = grid[-1] - 1
    x = numbers(grid[-1] * 16, shape[1]).reshape(grid[-1], 16, shape[1])

    def body(x, o, total):
        stores_at(plgpu.program_id(len(grid) - 1), last)(x, o, total)

    make = called(
        body,
        f32(*shape),
        grid=grid,
        in_specs=[plgpu.BlockSpec((None, 16, 77), lambda *at: (at[-1], 0, 0))],
        out_specs=plgpu.BlockSpec((16, 77), index_map),
        scratch_shapes=[plgpu.SMEM((16, 77), jnp.float32)],
        compiler_params=plgpu.CompilerParams(
            dimension_semantics=("arbitrary",) * len(grid)
        ),
    )

    rows = np.tile(x.sum(axis=0), (-(-shape[0] // 16), 1))
    everywhere.check(make, [x], rows[: shape[0]])


# Shape, block, and steps of a grid that may exceed the array.
SPECIALIZED = {
    "rows of 12 bytes": ((22, 3), (4, 3), (5, 1)),
    "columns of 20 bytes": ((16, 15), (8, 5), (2, 3)),
    "over the edge": ((13, 9), (5, 4), (3, 3)),
}


@pytest.mark.parametrize("name", SPECIALIZED)
def test_the_memory_warpgroup_copies_blocks_by_threads(name):
    """Compares twice the part of an array that the grid of a pipeline covers."""
    shape, block, grid = SPECIALIZED[name]
    spec = plgpu.BlockSpec(block, lambda i, j: (i, j))

    def step(_, x, o):
        @plgpu.when(jax.lax.axis_index("wg") == 0)
        def _():
            o[...] = 2 * x[...]

    def body(x, o):
        plgpu.emit_pipeline_warp_specialized(
            step, grid=grid, in_specs=[spec], out_specs=[spec], wg_axis="wg",
            num_compute_wgs=2, memory_registers=40,
        )(x, o)  # fmt: skip

    x = numbers(*shape)
    part = tuple(slice(n * g) for n, g in zip(block, grid, strict=True))
    make = everywhere.kernel(body, x, threads={"wg": 3})

    def partly(interpret):
        if interpret is not None:
            interpret = plgpu.InterpretParams(seed=1, partial_results=True)
        return lambda x: make(interpret)(x)[part]

    everywhere.check(partly, [x], 2 * x[part])


def test_the_first_of_several_warpgroups_copies_without_a_sequential_axis():
    def body(x, o):
        rows = plgpu.ds(jax.lax.axis_index("wg") * 2, 2)
        o[rows] = x[rows] + 1

    spec = plgpu.BlockSpec((4, 3), lambda i: (i, 0))
    make = called(
        body, f32(7, 3), in_specs=[spec], out_specs=spec, grid=2, num_threads=2,
        thread_name="wg",
    )  # fmt: skip
    everywhere.check(make, [numbers(7, 3)], numbers(7, 3) + 1)


@pytest.mark.parametrize("threads", [None, 2])
@pytest.mark.parametrize("semantics", ["parallel", "arbitrary"])
@pytest.mark.parametrize(
    ("dtype", "columns"), [(jnp.int4, 3), (jnp.uint2, 6)], ids=["int4", "uint2"]
)
def test_elements_that_share_bytes_with_others(dtype, columns, semantics, threads):
    def body(x, o):
        rows = plgpu.ds(jax.lax.axis_index("wg") * 2, 2) if threads else slice(None)
        o[rows] = x[rows]

    x = (np.arange(7 * columns) % 4).reshape(7, columns).astype(dtype)
    spec = plgpu.BlockSpec((4, columns), lambda i: (i, 0))
    zeros = spec.replace(oob_fill_mode=plgpu.OOBFillMode.ZEROS)
    make = called(
        body, jax.ShapeDtypeStruct(x.shape, dtype), grid=2, in_specs=[zeros],
        out_specs=spec, num_threads=threads, thread_name=threads and "wg",
        compiler_params=plgpu.CompilerParams(dimension_semantics=(semantics,)),
    )  # fmt: skip
    everywhere.check(make, [x], x)


@pytest.mark.parametrize("block", [(7, 28), (2, 4)])
@pytest.mark.parametrize("pipeline", ["pallas_call", "one warpgroup", "specialized"])
def test_threads_copy_blocks_whose_buffers_start_where_tma_cannot(pipeline, block):
    """TMA addresses multiples of 128 bytes; a buffer has 784 bytes, or 32."""
    x = numbers(15, 36)
    grid = tuple(map(plgpu.cdiv, x.shape, block))
    spec = plgpu.BlockSpec(block, lambda i, j: (i, j))
    specs = {"in_specs": [spec], "out_specs": [spec]}
    depth = {"max_concurrent_steps": 2}

    def step(_, x, o):
        o[...] = 2 * x[...]

    def one(x, o):
        plgpu.emit_pipeline(step, grid=grid, **specs, **depth)(x, o)

    def several(x, o):
        plgpu.emit_pipeline_warp_specialized(
            step, grid=grid, **specs, **depth, wg_axis="wg", num_compute_wgs=1,
            memory_registers=40,
        )(x, o)  # fmt: skip

    semantics = ("parallel", "arbitrary")
    params = plgpu.CompilerParams(dimension_semantics=semantics, **depth)
    make = {
        "pallas_call": called(
            lambda x, o: step(None, x, o), [f32(*x.shape)], grid=grid, **specs,
            compiler_params=params,
        ),
        "one warpgroup": everywhere.kernel(one, x),
        "specialized": everywhere.kernel(several, x, threads={"wg": 2}),
    }[pipeline]  # fmt: skip
    everywhere.check(make, [x], [2 * x] if pipeline == "pallas_call" else 2 * x)


def test_threads_copy_to_rows_that_start_where_tma_cannot():
    """A row of 48 bytes, which a loop selects."""

    def body(x, o, rows, loaded):
        @plgpu.loop(0, 5)
        def _(i):
            plgpu.copy_gmem_to_smem(x.at[i], rows.at[i], loaded)
            plgpu.barrier_wait(loaded)
            rows[i] = rows[i] + 1
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(rows.at[i], o.at[i])
            plgpu.wait_smem_to_gmem(0)

    x = numbers(5, 12)
    scratch = [plgpu.SMEM((5, 12), jnp.float32), plgpu.Barrier()]
    everywhere.check(everywhere.kernel(body, x, *scratch), [x], x + 1)

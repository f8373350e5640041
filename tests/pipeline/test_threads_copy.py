# SPDX-License-Identifier: Apache-2.0
"""Pipelines over blocks that TMA cannot carry: threads copy them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from tests.support import everywhere

F32 = jnp.float32
SHAPES = {
    "rows of 12 bytes": ((22, 3), (4, 3), (5, 1)),
    "columns of 20 bytes": ((16, 15), (8, 5), (2, 3)),
    "over the edge": ((13, 9), (5, 4), (3, 3)),
}


def numbers(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize("name", SHAPES)
def test_emit_pipeline(name):
    shape, block, grid = SHAPES[name]
    spec = plgpu.BlockSpec(block, lambda i, j: (i, j))

    def body(x, o):
        def step(_, x_tile, o_tile):
            o_tile[...] = 2 * x_tile[...]

        plgpu.emit_pipeline(
            step, grid=grid, in_specs=[spec], out_specs=[spec], max_concurrent_steps=2
        )(x, o)

    x = numbers(*shape)
    whole = tuple(n * g for n, g in zip(block, grid, strict=True))
    part = tuple(slice(min(a, b)) for a, b in zip(shape, whole, strict=True))

    def make(interpret):
        if interpret is not None:
            interpret = plgpu.InterpretParams(seed=1, partial_results=True)
        kernel = plgpu.kernel(
            body, out_type=jax.ShapeDtypeStruct(shape, F32), interpret=interpret
        )
        return lambda x: kernel(x)[part]

    everywhere.check(make, [x], 2 * x[part])


@pytest.mark.parametrize("name", SHAPES)
def test_emit_pipeline_warp_specialized(name):
    shape, block, grid = SHAPES[name]
    spec = plgpu.BlockSpec(block, lambda i, j: (i, j))

    def body(x, o):
        def step(_, x_tile, o_tile):
            @plgpu.when(jax.lax.axis_index("wg") == 0)
            def _():
                o_tile[...] = 2 * x_tile[...]

        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=grid,
            in_specs=[spec],
            out_specs=[spec],
            wg_axis="wg",
            num_compute_wgs=2,
            memory_registers=40,
        )(x, o)

    x = numbers(*shape)
    whole = tuple(n * g for n, g in zip(block, grid, strict=True))
    part = tuple(slice(min(a, b)) for a, b in zip(shape, whole, strict=True))

    def make(interpret):
        if interpret is not None:
            interpret = plgpu.InterpretParams(seed=1, partial_results=True)
        kernel = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct(shape, F32),
            num_threads=3,
            thread_name="wg",
            interpret=interpret,
        )
        return lambda x: kernel(x)[part]

    everywhere.check(make, [x], 2 * x[part])


def test_pallas_call_with_several_warpgroups():
    def body(x, o):
        rows = plgpu.ds(jax.lax.axis_index("wg") * 2, 2)
        o[rows] = x[rows] + 1

    spec = plgpu.BlockSpec((4, 3), lambda i: (i, 0))

    def make(interpret):
        return plgpu.pallas_call(
            body,
            jax.ShapeDtypeStruct((7, 3), F32),
            in_specs=[spec],
            out_specs=spec,
            grid=2,
            num_threads=2,
            thread_name="wg",
            interpret=interpret,
        )

    x = numbers(7, 3)
    everywhere.check(make, [x], x + 1)

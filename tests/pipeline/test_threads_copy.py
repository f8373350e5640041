# SPDX-License-Identifier: Apache-2.0
"""Pipelines over blocks that TMA cannot carry: threads copy them."""

from __future__ import annotations

import functools

import jax
import pytest

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.entry_kernels import f32, numbers

SHAPES = {
    "rows of 12 bytes": ((22, 3), (4, 3), (5, 1)),
    "columns of 20 bytes": ((16, 15), (8, 5), (2, 3)),
    "over the edge": ((13, 9), (5, 4), (3, 3)),
}


def check(name, pipeline, **options):
    """Compares twice the part of an array that the grid of a pipeline covers."""
    shape, block, grid = SHAPES[name]
    spec = plgpu.BlockSpec(block, lambda i, j: (i, j))

    def body(x, o):
        pipeline(grid=grid, in_specs=[spec], out_specs=[spec])(x, o)

    x = numbers(*shape)
    whole = tuple(n * g for n, g in zip(block, grid, strict=True))
    part = tuple(slice(min(a, b)) for a, b in zip(shape, whole, strict=True))
    make = everywhere.kernel(body, x, **options)

    def partly(interpret):
        if interpret is not None:
            interpret = plgpu.InterpretParams(seed=1, partial_results=True)
        return lambda x: make(interpret)(x)[part]

    everywhere.check(partly, [x], 2 * x[part])


@pytest.mark.parametrize("name", SHAPES)
def test_emit_pipeline(name):
    def step(_, x, o):
        o[...] = 2 * x[...]

    pipeline = functools.partial(plgpu.emit_pipeline, step, max_concurrent_steps=2)
    check(name, pipeline)


@pytest.mark.parametrize("name", SHAPES)
def test_emit_pipeline_warp_specialized(name):
    def step(_, x, o):
        @plgpu.when(jax.lax.axis_index("wg") == 0)
        def _():
            o[...] = 2 * x[...]

    pipeline = functools.partial(
        plgpu.emit_pipeline_warp_specialized, step, wg_axis="wg", num_compute_wgs=2,
        memory_registers=40,
    )  # fmt: skip
    check(name, pipeline, threads={"wg": 3})


def test_pallas_call_with_several_warpgroups():
    def body(x, o):
        rows = plgpu.ds(jax.lax.axis_index("wg") * 2, 2)
        o[rows] = x[rows] + 1

    spec = plgpu.BlockSpec((4, 3), lambda i: (i, 0))

    def make(interpret):
        return plgpu.pallas_call(
            body, f32(7, 3), in_specs=[spec], out_specs=spec, grid=2, num_threads=2,
            thread_name="wg", interpret=interpret,
        )  # fmt: skip

    x = numbers(7, 3)
    everywhere.check(make, [x], x + 1)

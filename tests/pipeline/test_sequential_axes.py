# SPDX-License-Identifier: Apache-2.0
"""pallas_call with sequential axes: loops in each CTA, scratch that outlives a step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.entry_kernels import f32, numbers

ROWS = plgpu.BlockSpec((8, 128), lambda i: (i, 0))


def params(*semantics, depth=2):
    return plgpu.CompilerParams(
        dimension_semantics=semantics, max_concurrent_steps=depth
    )


def called(body, out, **options):
    """Returns what `everywhere.check` takes."""

    def make(interpret):
        return plgpu.pallas_call(body, out, interpret=interpret, **options)

    return make


@pytest.mark.parametrize("semantics", ["arbitrary", "sequential"])
def test_scratch_keeps_its_contents_from_step_to_step(semantics):
    """A cumulative sum over blocks of rows."""

    def cumulative(x, o, total):
        @plgpu.when(plgpu.program_id(0) == 0)
        def _():
            total[...] = jnp.zeros(total.shape, total.dtype)

        total[...] += x[...]
        o[...] = total[...]

    spec = plgpu.BlockSpec((8, 128), lambda i: (i, 0))
    make = called(
        cumulative, f32(), grid=8, in_specs=[spec], out_specs=spec,
        scratch_shapes=[plgpu.SMEM((8, 128), jnp.float32)],
        compiler_params=params(semantics),
    )  # fmt: skip
    expected = np.cumsum(numbers().reshape(8, 8, 128), 0).reshape(64, 128)
    everywhere.check(make, [numbers()], expected)


def test_the_sequential_axis_may_be_the_first_one():
    seen = []

    def body(x, o):
        seen.append([plgpu.num_programs(a) for a in range(2)])
        position = plgpu.program_id(0) * 10 + plgpu.program_id(1)
        o[...] = x[...] + position.astype(jnp.float32)

    spec = plgpu.BlockSpec((8, 128), lambda i, j: (i * 2 + j, 0))
    make = called(
        body, f32(), grid=(4, 2), in_specs=[spec], out_specs=spec,
        compiler_params=params("arbitrary", "parallel"),
    )  # fmt: skip
    positions = np.repeat([10 * i + j for i in range(4) for j in range(2)], 8)
    everywhere.check(make, [numbers()], numbers() + positions[:, None])
    assert seen[0] == [4, 2]


def test_vmap_adds_a_parallel_axis():
    def add_up(x, o):
        @plgpu.when(plgpu.program_id(0) == 0)
        def _():
            o[...] = jnp.zeros(o.shape, o.dtype)

        o[...] += x[...]

    call = plgpu.pallas_call(
        add_up, f32(8, 128), grid=8, compiler_params=params("arbitrary"),
        in_specs=[plgpu.BlockSpec((8, 128), lambda i: (i, 0))],
        out_specs=plgpu.BlockSpec((8, 128), lambda i: (0, 0)),
    )  # fmt: skip
    x = numbers(3, 64, 128)
    np.testing.assert_array_equal(jax.vmap(call)(x), x.reshape(3, 8, 8, 128).sum(1))

# SPDX-License-Identifier: Apache-2.0
"""pallas_call with fewer CTAs than positions, and the order of the positions."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from tests.pipeline import test_num_threads
from tests.support import everywhere
from tests.support.entry_kernels import f32
from tests.support.refusal import refused

product = functools.partial(test_num_threads.product, depth=2, m=384, n=192, k=192)


def operands():
    a, b = (test_num_threads.small(*shape) for shape in ((384, 192), (192, 192)))
    return [a, b], a.astype(np.float32) @ b.astype(np.float32)


@pytest.mark.parametrize("threads", [None, 2])
@pytest.mark.parametrize("params", [{"persistent": 4}, {"persistent": 2, "strip": 2}])
def test_few_ctas_share_the_tiles_of_a_product(threads, params):
    args, expected = operands()
    make = lambda interpret: product(interpret, threads, **params)  # noqa: E731
    everywhere.check(make, args, expected)


@pytest.mark.parametrize("params", [{"strip": 2}, {"persistent": 4, "strip": 5}])
def test_the_results_do_not_depend_on_the_order_of_the_tiles(params):
    args, expected = operands()
    call = product(plgpu.InterpretParams(schedules=6), **params)
    np.testing.assert_array_equal(call(*args), expected)


def orders(grid, **params):
    """Returns what the CTA of each position has stored: its position."""

    def body(o):
        o[...] = jnp.full((1, 128), plgpu.program_id(0) * 100 + plgpu.program_id(1))

    def numbered(i, j):
        return i * grid[1] + j, 0

    found = plgpu.pallas_call(
        body, jax.ShapeDtypeStruct((grid[0] * grid[1], 128), jnp.int32),
        grid=grid, out_specs=plgpu.BlockSpec((1, 128), numbered),
        compiler_params=plgpu.CompilerParams(**params),
    )()  # fmt: skip
    return np.asarray(found)[:, 0].reshape(grid)


def test_each_position_is_visited_whatever_the_strip():
    expected = np.arange(4)[:, None] * 100 + np.arange(6)
    for strip in (1, 4, 6, 9):
        np.testing.assert_array_equal(orders((4, 6), strip=strip), expected)


def test_the_launch_has_no_more_ctas_than_positions():
    args, _ = operands()
    for asked, launched in ((True, "9"), (4, "4"), (1000, "9")):
        (report,) = plgpu.offline.lower(product(persistent=asked), *args)
        assert re.findall(r"blocks.*? in \(%\w+ = %c(\d+)", report.mlir) == [launched]


@pytest.mark.parametrize(
    ("grid", "semantics", "params"),
    [
        ((8,), ("parallel",), {"persistent": True}),
        ((8, 1), ("parallel", "arbitrary"), {"strip": 8}),
    ],
)
@refused
def test_parameters_without_an_effect(grid, semantics, params):
    spec = plgpu.BlockSpec((8, 128), lambda *at: (at[0], 0))
    plgpu.pallas_call(
        lambda x, o: None, f32(), grid=grid, in_specs=[spec], out_specs=spec,
        compiler_params=plgpu.CompilerParams(dimension_semantics=semantics, **params),
    )  # fmt: skip


@pytest.mark.parametrize("params", [{"persistent": 0}, {"strip": 0}])
@refused
def test_numbers_that_are_not_positive(params):
    plgpu.CompilerParams(**params)

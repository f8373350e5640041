# SPDX-License-Identifier: Apache-2.0
"""Tensor memory as kernels use it: loads, stores, parts, index expressions."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.layouts import TmemLayout
from tests.support import everywhere
from tests.support.refusal import refused, refused_by
from tests.support.semantics import under
from tests.support.tensor_products import BF16, F16, F32

NATIVE = plgpu.Layout.TCGEN05_TMEM_NATIVE
TCGEN05, WGMMA = plgpu.Layout.TCGEN05, plgpu.Layout.WGMMA
I8 = jnp.int8


def numbers(shape, dtype):
    return np.random.default_rng(0).integers(-8, 8, shape).astype(jnp.dtype(dtype))


def there_and_back(shape, dtype, declaration, layout):
    """Stores an array to TMEM and loads it again."""

    def body(x, o, tile):
        value = plgpu.load(x, layout=layout, optimized=False)
        plgpu.async_store_tmem(tile, value)
        plgpu.commit_tmem()
        loaded = plgpu.async_load_tmem(tile, layout=layout)
        o[...] = loaded + jnp.ones(shape, dtype)

    x = numbers(shape, dtype)
    expected = x + np.ones(shape, x.dtype)
    everywhere.run(body, [x], expected, declaration, **ON_BLACKWELL)


ON_BLACKWELL = {"target": "sm_100a", "on_gpu": False}
TILE = plgpu.TMEM((128, 32), F32)
X = numbers((128, 32), F32)
gives = functools.partial(everywhere.gives, **ON_BLACKWELL)


def load(x):
    return plgpu.load(x, layout=NATIVE(2), optimized=False)


REDUCED = {
    "max": lambda x: x.max(axis=1),
    "min": lambda x: x.min(axis=1),
    "absmax": lambda x: abs(x).max(axis=1),
    "absmin": lambda x: abs(x).min(axis=1),
}


@pytest.mark.parametrize(
    ("reduce", "dtype"), [*((name, F32) for name in REDUCED), ("max", jnp.uint32)]
)
def test_a_load_that_reduces(reduce, dtype):
    def body(x, o, most, tile):
        value = load(x)
        plgpu.async_store_tmem(tile, value)
        plgpu.commit_tmem()
        loaded, most[...] = plgpu.async_load_tmem(tile, reduce=reduce)
        o[...] = loaded

    x = numbers((128, 32), jnp.int32).astype(jnp.dtype(dtype))
    if dtype == F32:
        x[5, 7] = np.nan
    everywhere.run(
        body,
        [x],
        [x, REDUCED[reduce](x)],
        plgpu.TMEM((128, 32), dtype),
        **ON_BLACKWELL,
    )


@pytest.mark.parametrize(
    ("rows", "dtype", "options", "layout"),
    [
        (128, F32, {}, NATIVE(2)),
        (128, F32, {}, TCGEN05),
        (128, F16, {"packed": True}, NATIVE(2)),
        (128, BF16, {"packed": True}, TCGEN05),
        (128, F16, {"packed": False}, NATIVE(2)),
        (128, BF16, {"packed": False}, TCGEN05),
        (128, I8, {"packed": True}, NATIVE(4)),
        (64, F32, {}, WGMMA),
        (64, F16, {"packed": True}, WGMMA),
    ],
)
@pytest.mark.parametrize("columns", [32, 96])
def test_arrays_travel_to_tensor_memory_and_back(rows, dtype, options, layout, columns):
    shape = (rows, columns)
    there_and_back(shape, dtype, plgpu.TMEM(shape, dtype, **options), layout)


def test_the_layout_of_64_rows_of_two_ctas():
    declaration = plgpu.TMEM((64, 32), F32, layout=TmemLayout.m64_collective(32))
    layout = plgpu.Layout.TCGEN05_M64_COLLECTIVE(32)
    there_and_back((64, 32), F32, declaration, layout)


@gives([X], lambda x: x + np.pad(2 * x[:, :16], ((0, 0), (16, 0))), TILE, TILE)
def test_index_expressions_wait_by_themselves(x, o, tile, other):
    tile[...] = load(x)
    other[...] = tile[...]
    tile[...] = tile[...] + other[...]
    other[:, 16:32] += tile[:, 0:16]
    o[...] = other[...]


@gives([X], lambda x: 2 * x, TILE)
def test_parts_may_start_at_a_value(x, o, tile):
    tile[...] = load(x)

    @plgpu.loop(0, 4)
    def _(i):
        part = plgpu.ds(8 * i, 8)
        tile[:, part] = tile[:, part] * 2

    o[...] = tile[...]


@gives(
    [numbers((128, 48), F32)],
    lambda x: x.reshape(128, 3, 16)[:, ::-1].reshape(128, 48),
    plgpu.TMEM((3, 128, 16), F32),
)
def test_leading_dimensions_are_columns(x, o, tiles):
    for i in range(3):
        tiles[i] = load(x.at[:, plgpu.ds(16 * i, 16)])

    @plgpu.loop(0, 3)
    def _(i):
        o[:, plgpu.ds(16 * i, 16)] = tiles[2 - i]


STACK = numbers((2, 3, 128, 8), F32)
RAISED = np.float32([3, 2]).reshape(2, 1, 1, 1)


@gives([STACK], lambda x: x + 1, plgpu.TMEM(STACK.shape, F32))
def test_arrays_with_leading_dimensions_are_stored_and_loaded_whole(x, o, tiles):
    plgpu.async_store_tmem(tiles, plgpu.load(x, layout=TCGEN05, optimized=False))
    plgpu.commit_tmem()
    o[...] = plgpu.async_load_tmem(tiles, layout=TCGEN05) + 1


@gives([STACK], lambda x: x[:, ::-1] + RAISED, plgpu.TMEM(STACK.shape, F32))
def test_ranges_of_leading_dimensions(x, o, tiles):
    tiles[...] = 2
    tiles.at[:1].addupdate(jnp.ones((1, *STACK.shape[1:]), F32))
    value = plgpu.load(x, layout=TCGEN05, optimized=False)
    for i in range(2):
        tiles.at[i].addupdate(value[i])
    for i in range(3):
        o[:, i] = tiles[:, 2 - i]


@gives([X], lambda x: 3 * x, TILE)
def test_scopes_share_the_columns(x, o, outer):
    value = load(x)
    outer[...] = value

    def add(tile):
        tile[...] = value
        outer[...] = outer[...] + tile[...]

    plgpu.run_scoped(add, TILE)
    plgpu.run_scoped(add, TILE)
    o[...] = outer[...]


@gives([X], X, TILE, plgpu.Barrier(orders_tensor_core=True), threads={"wg": 2})
def test_one_warpgroup_stores_what_another_loads(x, o, tile, stored):
    @plgpu.when(lax.axis_index("wg") == 0)
    def _():
        tile[...] = load(x)
        plgpu.barrier_arrive(stored)

    @plgpu.when(lax.axis_index("wg") == 1)
    def _():
        plgpu.barrier_wait(stored)
        o[...] = tile[...]


# --- what is refused ------------------------------------------------------------------


def trace(body):
    jax.eval_shape(everywhere.kernel(body, X, TILE, target="sm_100a")(), X)


@refused_by(trace)
def test_a_load_has_a_layout_that_an_instruction_leaves(x, o, tile):
    plgpu.async_load_tmem(tile, layout=WGMMA)  # HERE


@refused
def test_lane_semantics_store_from_a_layout_of_an_instruction():
    def body(x, o, tile):
        plgpu.async_store_tmem(tile, plgpu.load(x, layout=WGMMA))  # HERE

    made = everywhere.kernel(body, X, TILE, target="sm_100a")()
    lane = under(plgpu.LoweringSemantics.Lane, made)
    plgpu.offline.lower(lane, X, target="sm_100a")


@refused_by(trace)
def test_a_stored_value_has_the_shape_of_the_reference(x, o, tile):
    plgpu.async_store_tmem(tile, jnp.zeros((128, 16), F32))  # HERE

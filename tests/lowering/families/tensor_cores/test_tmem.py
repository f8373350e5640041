# SPDX-License-Identifier: Apache-2.0
"""Tensor memory as kernels use it: loads, stores, parts, index expressions."""

from __future__ import annotations

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.emitters.tensor_cores import load_reduce
from pallas_gpu.layouts import TmemLayout
from pallas_gpu.runtime import ptx_stats
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


ORIGIN = load_reduce._origin


def check_extrema(of, dtype, columns, **options):
    """Checks what a function of a load gives on sm_103a; returns its instructions."""

    def body(x, o, found, tile):
        plgpu.async_store_tmem(tile, load(x))
        plgpu.commit_tmem()
        loaded = plgpu.async_load_tmem(tile, layout=NATIVE(2))
        o[...], found[...] = loaded, of(jnp, loaded)

    x = np.random.default_rng(3).integers(-99, 99, (128, columns)).astype(np.int32)
    x = x.astype(jnp.dtype(dtype))
    if dtype == F32:
        x[5, 1], x[6, -1], x[7, 0], x[8] = np.nan, -np.nan, -np.inf, -1
    expected = [x, of(np, x)]
    tile = plgpu.TMEM((128, columns), dtype)
    make = everywhere.kernel(body, expected, tile, target="sm_103a")
    everywhere.check(make, [x], expected, on_gpu=False, **options)
    (report,) = plgpu.offline.compile(make(None), x, target="sm_103a")
    return list(ptx_stats.mnemonics(report.ptx))


def found_by_loads(instructions):
    """The repetitions and the operation of each tcgen05.ld.red."""
    form = "tcgen05.ld.red.sync.aligned.32x32b."
    return [x.removeprefix(form) for x in instructions if x.startswith(form)]


@pytest.mark.parametrize(
    ("of", "dtype", "operation"),
    [
        ("max", F32, "max.NaN.f32"),
        ("min", F32, "min.NaN.f32"),
        ("absmax", F32, "max.abs.NaN.f32"),
        ("absmin", F32, "min.abs.NaN.f32"),
        ("max", jnp.int32, "max.s32"),
        ("min", jnp.uint32, "min.u32"),
    ],
)
def test_a_load_finds_the_extrema_of_its_rows(of, dtype, operation):
    instructions = check_extrema(lambda _, x: REDUCED[of](x), dtype, 48)
    assert found_by_loads(instructions) == [f"x32.{operation}", f"x16.{operation}"]
    # What the two have found is combined.
    combined = operation.replace(".abs", "")
    assert instructions.count(combined) == 1


@pytest.mark.parametrize(
    ("of", "loads"),
    [
        (lambda xp, x: x.max(1) - x.min(1), ["max", "max"]),
        (lambda xp, x: x[:, :32].max(1), ["max"]),
        (lambda xp, x: abs(x[:, 32:]).max(1), ["max.abs"]),
        (lambda xp, x: x[:, 16:].max(1), []),
        (lambda xp, x: (x + 1).max(1), []),
        (lambda xp, x: x.max(0)[:1] + x.sum(1), []),
        (lambda xp, x: xp.concatenate([abs(x[:, :32]), x[:, 32:]], 1).max(1), []),
    ],
    ids=["also min", "one of two", "absolute", "part", "sum", "columns", "mixed"],
)
def test_a_load_reduces_only_what_it_loads(of, loads):
    found = found_by_loads(check_extrema(of, F32, 64, atol=1e-3))
    assert found == [f"x32.{operation}.NaN.f32" for operation in loads]


@pytest.mark.parametrize(
    ("name", "wrong", "of"),
    [
        ("_TYPES", {np.dtype(np.float32): "s32"}, lambda _, x: x.min(1)),
        (
            "_origin",
            lambda value, lane: (ORIGIN(value, lane)[0], False),
            lambda _, x: abs(x).max(1),
        ),
        ("_count", lambda load: 16, lambda _, x: x[:, :16].max(1)),
    ],
)
def test_a_wrong_reduction_of_a_load_is_noticed(name, wrong, of):
    with mock.patch.object(load_reduce, name, wrong), pytest.raises(AssertionError):
        check_extrema(of, F32, 64, emulate=False)


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


GOOD = {
    "async_load_tmem": lambda e: {"src": e.acc},
    "async_store_tmem": lambda e: {"ref": e.acc, "value": 0.0},
    "wait_load_tmem": lambda e: {},
    "commit_tmem": lambda e: {},
}
EFFECTS = {
    "async_load_tmem.reduce": [None, "max"],
    "async_load_tmem.layout": [TmemLayout.half_lane(64).tiled],
}

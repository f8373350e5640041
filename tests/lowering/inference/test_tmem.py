# SPDX-License-Identifier: Apache-2.0
"""Layouts of values that are loaded from TMEM and stored to it."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.layouts import Layout, SmemLayout, TmemLayout, transfers
from pallas_gpu.layouts.registers.placement import place
from tests.support import inferred
from tests.support.inferred import X, array

infer = functools.partial(inferred.infer, target="sm_100a")
ROWS, HALF = (128, 64), (64, 64)
F16, F32, I8 = jnp.float16, jnp.float32, jnp.int8
OUT, TMEM = array(*ROWS), plgpu.TMEM(ROWS, F32)


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize(
    ("shape", "collective"), [(ROWS, False), (HALF, False), (HALF, True)]
)
def test_loads_and_stores_have_layouts_that_transfer(dtype, shape, collective):
    def body(x, o, tmem):
        value = plgpu.async_load_tmem(tmem)
        plgpu.async_store_tmem(tmem, value + x[...])
        plgpu.commit_tmem()
        o[...] = value

    packed = {} if dtype is F32 else {"packed": False}
    scratch = plgpu.TMEM(shape, dtype, collective=collective, **packed)
    cluster = {"cluster": {"c": 2}} if collective else {}
    x = array(*shape, dtype=dtype)
    found = infer(body, [x], x, scratch, **cluster)
    (storage,) = found.storages
    bits = 8 * jnp.dtype(dtype).itemsize
    for layout in (found.layout("async_load_tmem"), found.operand("async_store_tmem")):
        assert transfers(layout, storage, bits)


def loaded(x, o, tmem, *, layout):
    o[...] = plgpu.layout_cast(plgpu.async_load_tmem(tmem), layout)


@pytest.mark.parametrize(
    "layout", [Layout.TCGEN05, Layout.TCGEN05_TMEM_NATIVE(4)], ids=str
)
def test_a_wish_for_a_register_layout_reaches_the_load(layout):
    found = infer(functools.partial(loaded, layout=layout), [X], OUT, TMEM)
    assert found.layout("async_load_tmem") == place(layout, ROWS)
    assert found.moves == []


def test_other_register_layouts_are_reached_by_a_relayout():
    strided = Layout.WG_STRIDED(ROWS, 4)
    found = infer(functools.partial(loaded, layout=strided), [X], OUT, TMEM)
    assert transfers(found.layout("async_load_tmem"), TmemLayout.default(), 32)
    assert found.moves == ["layout_cast"]


def test_parts_are_loaded_as_arrays_of_their_size():
    def body(x, o, p, tmem):
        o[...] = plgpu.async_load_tmem(tmem)
        p[...] = plgpu.async_load_tmem(tmem.at[:, 64:128])

    scratch = plgpu.TMEM((64, 128), F32, layout=TmemLayout.half_lane(64))
    found = infer(body, [X], [array(64, 128), array(*HALF)], scratch)
    expected = [place(Layout.WGMMA, shape) for shape in ((64, 128), HALF)]
    assert found.layouts("async_load_tmem") == expected


def test_scales_are_loaded_with_a_copy_in_each_warp():
    def body(x, o, tmem):
        o[...] = plgpu.async_load_tmem(tmem)

    shape, scales = (128, 16), TmemLayout.scales()
    found = infer(
        body, [X], array(*shape, dtype=I8), plgpu.TMEM(shape, I8, layout=scales)
    )
    assert found.layout("async_load_tmem") == scales.tiled.linear(shape)


@pytest.mark.parametrize("trips", [4, None])
def test_loads_in_loops_transfer(trips):
    def body(x, o, tmem):
        count = x[0, 0].astype(int) if trips is None else trips

        def step(_, total):
            return total + plgpu.async_load_tmem(tmem)

        o[...] = lax.fori_loop(0, count, step, jnp.zeros(ROWS))

    found = infer(body, [X], OUT, TMEM)
    assert transfers(found.layout("add"), TmemLayout.default(), 32)
    assert found.moves == []


def test_operands_in_smem_are_tiled():
    def body(x, o, a, b, acc, done):
        plgpu.tcgen05_mma(acc, a, b.T, done, accumulate=False)
        plgpu.barrier_wait(done)
        o[...] = plgpu.async_load_tmem(acc)

    scratch = [plgpu.SMEM(ROWS, F16), plgpu.SMEM(HALF, F16), TMEM]
    done = plgpu.Barrier(orders_tensor_core=True)
    tiled = [SmemLayout(shape, 16, (8, 64), 128) for shape in (ROWS, HALF)]
    assert infer(body, [X], OUT, *scratch, done).storages[:2] == tiled


def test_tiles_travel_from_smem_to_tmem():
    def body(x, o, a, scales, tmem, scales_tmem):
        plgpu.async_copy_smem_to_tmem(a, tmem)
        plgpu.async_copy_scales_to_tmem(scales, scales_tmem)

    f8, stored = jnp.float8_e8m0fnu, (1, 1, 32, 16)
    scratch = [
        plgpu.SMEM(ROWS, F16),
        plgpu.SMEM(stored, f8),
        plgpu.TMEM(ROWS, F16, packed=True),
        plgpu.TMEM((128, 4), f8, layout=TmemLayout.scales()),
    ]
    found = infer(body, [X], OUT, *scratch)
    tiled, plain = SmemLayout(ROWS, 16, (8, 64), 128), SmemLayout(stored, 8)
    assert found.storages[:2] == [tiled, plain]

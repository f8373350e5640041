# SPDX-License-Identifier: Apache-2.0
"""How inference stores arrays in SMEM, and what it keeps of the user's transforms."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors
from pallas_gpu.layouts import Layout, SmemLayout
from pallas_gpu.layouts.registers.placement import place
from tests.support.inferred import SQUARE, X, array, infer
from tests.support.products import tiles

F16, F8 = jnp.float16, jnp.float8_e4m3fn
TILE, ACC = plgpu.SMEM(SQUARE, F16), plgpu.ACC(SQUARE)


def tiled(shape, bits: int, swizzle: int) -> SmemLayout:
    return SmemLayout(shape, bits, (8, swizzle * 8 // bits), swizzle)


@pytest.mark.parametrize("shape", [SQUARE, (128,)])
def test_an_array_without_needs_lies_row_major(shape):
    def body(x, o, a, unused):
        a[...] = x[...]
        o[...] = a[...]

    scratch = plgpu.SMEM(shape, jnp.float32), plgpu.SMEM((4, 64, 64), F16)
    found = infer(body, [array(*shape)], array(*shape), *scratch)
    assert found.storages == [SmemLayout(shape, 32), SmemLayout((4, 64, 64), 16)]


@pytest.mark.parametrize(
    ("dtype", "columns", "swizzle"),
    [
        (F16, 128, 128),
        (F16, 64, 128),
        (F16, 32, 64),
        (F16, 16, 32),
        (jnp.bfloat16, 96, 64),
        (F8, 128, 128),
        (F8, 64, 64),
        (jnp.float32, 32, 128),
    ],
)
def test_an_operand_of_wgmma_has_the_widest_swizzle_that_fits(dtype, columns, swizzle):
    def body(x, o, a, b, acc):
        plgpu.wgmma(acc, a, b.T)
        o[...] = acc[...]

    operand = plgpu.SMEM((64, columns), dtype)
    storage = tiled((64, columns), 8 * jnp.dtype(dtype).itemsize, swizzle)
    assert infer(body, [X], X, operand, operand, ACC).storages == [storage] * 2


@pytest.mark.parametrize("start", [32, 0])
def test_a_slice_of_an_operand_narrows_the_swizzle(start):
    def body(x, o, a, b, acc):
        plgpu.wgmma(acc, a.at[:, start : start + 32], b)
        o[...] = acc[...]

    found = infer(body, [X], X, TILE, plgpu.SMEM((32, 64), F16), ACC)
    assert found.storages[0] == tiled(SQUARE, 16, 64)


def test_buffers_of_a_ring_are_tiled_as_one_array():
    def body(x, o, ring, loaded, acc):
        @plgpu.loop(0, 4)
        def _(i):
            source = x.at[:, plgpu.ds(i * 64, 64)]
            plgpu.copy_gmem_to_smem(source, ring.at[i], loaded.at[i])
            plgpu.barrier_wait(loaded.at[i])
            plgpu.wgmma(acc, ring.at[i], ring.at[i])

        o[...] = acc[...]

    scratch = plgpu.SMEM((4, 64, 64), F16), plgpu.Barrier(num_barriers=4), ACC
    found = infer(body, [array(64, 256, dtype=F16)], X, *scratch)
    assert found.storages == [tiled((4, 64, 64), 16, 128)]


def test_a_product_is_stored_in_tiles_without_bank_conflicts():
    def body(x, o, a, b, acc, out):
        plgpu.wgmma(acc, a, b)
        out[...] = acc[...].astype(F16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out, o)

    found = infer(body, [X], array(dtype=F16), TILE, TILE, ACC, TILE)
    assert found.storages[2] == tiled(SQUARE, 16, 128)
    assert found.operand("store") == place(Layout.WGMMA, SQUARE)


@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_transforms_of_the_user_are_kept(swizzle):
    def body(x, o, a, b, acc):
        plgpu.wgmma(acc, a, b)
        o[...] = acc[...]

    found = infer(body, [X], X, tiles(swizzle=swizzle), TILE, ACC)
    assert found.storages == [tiled(SQUARE, 16, swizzle), tiled(SQUARE, 16, 128)]


def loaded_and_stored(x, o, a):
    o[...] = a[...]


def test_loads_from_tiles_of_the_user_avoid_bank_conflicts():
    scratch = tiles(dtype=jnp.float32, swizzle=32)
    layout = infer(loaded_and_stored, [X], X, scratch).layout("load")
    assert layout != place(Layout.WG_STRIDED(SQUARE, 4), SQUARE)


def test_a_copy_by_hand_moves_runs_of_bytes_on_both_sides():
    found = infer(loaded_and_stored, [X], array(dtype=F16), tiles(swizzle=64))
    copy = Layout.SMEM_GMEM_COPY(SQUARE, 16, 64)
    assert found.layout("load") == place(copy, SQUARE)


def less_than_a_tile(a):
    return a[3:4, 5:6]


def adjacent_bits(a):
    return plgpu.load(a.bitcast(jnp.int16).reshape(32, 128).at[3, 5]).astype(F16)


@pytest.mark.parametrize("use", [less_than_a_tile, adjacent_bits])
def test_what_needs_rows_keeps_an_array_row_major(use):
    def body(x, o, a):
        value = use(a)
        o[...] = plgpu.load(a, layout=Layout.WGMMA, optimized=False) + value

    found = infer(body, [X], array(dtype=F16), TILE)
    assert found.storages == [SmemLayout(SQUARE, 16)]


def test_arrays_at_one_offset_are_stored_each_in_its_own_way():
    def body(x, o, union, acc):
        first, second = union
        plgpu.wgmma(acc, first, first)
        o[...] = acc[...] + second[...]

    found = infer(body, [X], X, plgpu.RefUnion(TILE, TILE), ACC)
    assert found.storages == [tiled(SQUARE, 16, 128), SmemLayout(SQUARE, 16)]


def test_a_transposed_view_is_loaded_in_a_layout_that_suits_it():
    def body(x, o, a, b, c, acc):
        plgpu.wgmma(acc, b, c)
        o[...] = acc[...] + a.T[...]

    scratch = tiles(dtype=jnp.float32, swizzle=128)
    found = infer(body, [X], X, scratch, TILE, TILE, ACC)
    assert found.layouts("load") == [place(Layout.WGMMA, SQUARE)] * 2
    assert found.moves == []


@pytest.mark.parametrize(("ctas", "fits"), [(2, True), (3, False)])
def test_a_copy_for_a_cluster_falls_into_equal_pieces(ctas, fits):
    def body(x, o, a, loaded):
        plgpu.copy_gmem_to_smem(x, a, loaded, collective_axes="c")
        plgpu.barrier_wait(loaded)

    def found():
        types = [array(dtype=F16)], X, TILE, plgpu.Barrier()
        return infer(body, *types, cluster={"c": ctas})

    if fits:
        assert found().storages == [SmemLayout(SQUARE, 16)]
        return
    with pytest.raises(errors.PallasGpuError, match="in 3 equal pieces"):
        found()


def test_a_part_at_an_unknown_start_is_reached_by_narrow_accesses():
    def body(x, i, o, a):
        o[...] = a[:, plgpu.ds(i[0], 64)]

    types = [X, array(1, dtype=jnp.int32)], X, plgpu.SMEM((64, 96), jnp.float32)
    assert infer(body, *types).storages == [SmemLayout((64, 96), 32)]


@pytest.mark.parametrize(
    ("step", "swizzle"), [(64, 128), (32, 64), (16, 32), (None, 128)]
)
def test_dynamic_starts_of_an_operand_narrow_its_tiles(step, swizzle):
    """A start of which nothing is known is promised to be that of a tile."""

    def body(i, o, a, b, acc):
        start = i[0] if step is None else i[0] * step
        plgpu.wgmma(acc, a.at[:, plgpu.ds(start, 64)], b)
        o[...] = acc[...]

    types = [array(1, dtype=jnp.int32)], X, plgpu.SMEM((64, 128), F16), TILE, ACC
    assert infer(body, *types).storages[0] == tiled((64, 128), 16, swizzle)

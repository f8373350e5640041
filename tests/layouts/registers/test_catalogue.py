# SPDX-License-Identifier: Apache-2.0
"""The named layouts against the hardware's figures and upstream's definitions."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import fragmented_array as upstream
from jax.experimental.pallas import mosaic_gpu

from pallas_gpu.layouts import Layout, Replicated, TiledLayout, Tiling, element_bits
from pallas_gpu.layouts.registers import catalogue
from tests.support.every import every


def test_wgmma_is_the_d_fragment_of_the_ptx_isa():
    coordinates = catalogue.WGMMA.linear((64, 32)).all_coordinates()
    for t in range(128):
        warp, lane = divmod(t, 32)
        registers = [(8 * i, 8 * j) for i in range(2) for j in range(4)]
        for r, (down, right) in enumerate(registers):
            row = 16 * warp + lane // 4 + down
            column = right + 2 * (lane % 4)
            assert coordinates[t, r].tolist() == [[row, column], [row, column + 1]]


def test_wgmma_32bit_is_the_a_fragment_of_the_ptx_isa():
    coordinates = catalogue.WGMMA_32BIT.linear((64, 16)).all_coordinates()
    for t in range(128):
        warp, lane = divmod(t, 32)
        registers = [(8 * i, 4 * j) for i in range(2) for j in range(4)]
        for r, (down, right) in enumerate(registers):
            row = 16 * warp + lane // 4 + down
            assert coordinates[t, r].tolist() == [[row, right + lane % 4]]


def test_mma_fragments_multiply_to_the_accumulator():
    """Lane g*4+i holds A rows g, B columns g, and K pairs i (PTX ISA, mma.m16n8k16)."""
    a = catalogue.mma_lhs(16).linear((64, 16)).all_coordinates()
    b = catalogue.mma_rhs(16).linear((16, 8)).all_coordinates()
    for lane in range(32):
        group, pair = divmod(lane, 4)
        assert a[lane, 0].tolist() == [[group, 2 * pair], [group, 2 * pair + 1]]
        assert b[lane, 0].tolist() == [[2 * pair, group], [2 * pair + 1, group]]


NAMES = {
    "WGMMA": "WGMMA_LAYOUT",
    "WGMMA_ACC_32BIT": "WGMMA_LAYOUT_ACC_32BIT",
    "WGMMA_8BIT": "WGMMA_LAYOUT_8BIT",
    "WGMMA_UPCAST_2X": "WGMMA_LAYOUT_UPCAST_2X",
    "WGMMA_UPCAST_4X": "WGMMA_LAYOUT_UPCAST_4X",
    "WGMMA_TRANSPOSED": "WGMMA_TRANSPOSED_LAYOUT",
    "WGMMA_ROW": "WGMMA_ROW_LAYOUT",
    "WGMMA_COL": "WGMMA_COL_LAYOUT",
    "TCGEN05": "TCGEN05_LAYOUT",
    "TCGEN05_ROW": "TCGEN05_ROW_LAYOUT",
    "TCGEN05_COL": "TCGEN05_COL_LAYOUT",
    "TCGEN05_TRANSPOSED": "TCGEN05_TRANSPOSED_LAYOUT",
    "TMA_INDICES": "TMA_INDICES_LAYOUT",
    "TMA_INDICES_4": "TMA_INDICES_4_LAYOUT",
}


def plain(dims) -> list:
    return [d if isinstance(d, int) else ("replicated", d.times) for d in dims]


@pytest.mark.parametrize("name", NAMES)
def test_a_named_layout_is_written_as_upstream_writes_it(name):
    ours, theirs = Layout[name].to_layout(), getattr(upstream, NAMES[name])
    assert ours.tiling.tiles == theirs.tiling.tiles
    assert plain(ours.warp_dims) == plain(theirs.warp_dims)
    assert plain(ours.lane_dims) == plain(theirs.lane_dims)
    assert ours.vector_dim == theirs.vector_dim


CALLS = [
    *(
        (f"MMA_{part}", (128, 128), (dtype,), {"m_warps": warps} if warps else {})
        for part in ("LHS", "RHS", "ACC")
        for dtype in (jnp.bfloat16, jnp.int8, jnp.float32)
        for warps in (None, 1, 2, 4)
    ),
    ("SMEM_GMEM_COPY", (128, 128), ((128, 128), jnp.bfloat16, 128), {}),
    ("SMEM_GMEM_COPY", (8, 256), ((8, 256), jnp.float32, 64), {}),
    ("TCGEN05_TMEM_NATIVE", (128, 64), (4,), {}),
    ("TCGEN05_M64_COLLECTIVE", (64, 64), (64,), {}),
    ("TCGEN05_M64_COLLECTIVE_NATIVE", (64, 64), (64, 2), {}),
]


@every(CALLS)
def test_a_layout_with_parameters_is_that_of_the_same_call_upstream(
    name, shape, args, kwargs
):
    theirs = mosaic_gpu.Layout[name](*args, **kwargs).to_mgpu()
    dims = theirs.warp_dims, theirs.lane_dims
    warps, lanes = (
        tuple(d if isinstance(d, int) else Replicated(d.times) for d in ds)
        for ds in dims
    )
    tiling = Tiling(theirs.tiling.tiles)
    expected = TiledLayout(tiling, warps, lanes, theirs.vector_dim)
    ours = Layout[name](*args, **kwargs).linear(shape)
    np.testing.assert_array_equal(
        ours.all_coordinates(), expected.linear(shape).all_coordinates()
    )


def test_the_only_number_of_an_accumulators_layout_is_that_of_warps():
    assert Layout.MMA_ACC(2) == Layout.MMA_ACC(jnp.int8, m_warps=2)
    assert Layout.MMA_ACC() == Layout.MMA_ACC(m_warps=4)


def test_mma_fragments_of_single_precision():
    """Lane g*4+i holds A's rows g, g+8 and columns i, i+4 (mma.m16n8k8, .tf32)."""
    a = catalogue.mma_lhs(jnp.float32).linear((64, 8)).all_coordinates()
    b = catalogue.mma_rhs(jnp.float32).linear((8, 8)).all_coordinates()
    for lane in range(32):
        g, i = divmod(lane, 4)
        held = {(g, i), (g + 8, i), (g, i + 4), (g + 8, i + 4)}
        assert set(map(tuple, a[lane].reshape(4, 2).tolist())) == held
        assert b[lane].reshape(2, 2).tolist() == [[i, g], [i + 4, g]]


@pytest.mark.parametrize("m_warps", [1, 2, 4])
@pytest.mark.parametrize("bits", [4, 8, 16, 32])
def test_mma_layouts_cover_their_tiles(m_warps, bits):
    for layout in (
        catalogue.mma_lhs(bits, m_warps),
        catalogue.mma_rhs(bits, m_warps),
        catalogue.mma_acc(m_warps),
    ):
        assert layout.linear(layout.base_tile_shape).num_registers >= 1


@pytest.mark.parametrize("swizzle", [32, 64, 128])
@pytest.mark.parametrize("shape", [(8, 256), (64, 64), (16, 128)])
def test_hand_written_copies_move_at_most_16_bytes_a_thread(shape, swizzle):
    layout = catalogue.smem_gmem_copy(shape, jnp.bfloat16, swizzle)
    assert layout.linear(shape).vector_length * 2 <= 16


def test_parameters_are_given_by_calling():
    assert Layout.WG_STRIDED((256,), vec_size=2) == catalogue.wg_strided((256,), 2)
    assert Layout.WG_SPLAT((8, 8)).shape == (8, 8)
    assert Layout.TILED(catalogue.WGMMA.tiling, (-7,), (-3, -2), -1) == catalogue.WGMMA


@pytest.mark.parametrize(
    "dtype, bits",
    [
        (jnp.bfloat16, 16),
        (jnp.float32, 32),
        (jnp.float8_e4m3fn, 8),
        (jnp.int4, 4),
        (jnp.float4_e2m1fn, 4),
        (np.bool_, 8),
        (np.dtype("int64"), 64),
        (16, 16),
    ],
)
def test_element_widths(dtype, bits):
    assert element_bits(dtype) == bits

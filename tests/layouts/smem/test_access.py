# SPDX-License-Identifier: Apache-2.0
"""Access plans, run on a model of shared memory and of the instructions."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_gpu.layouts import (
    AccessPlan,
    Layout,
    LinearLayout,
    SmemLayout,
    WGStridedLayout,
    plan_access,
)
from pallas_gpu.layouts.registers import catalogue
from pallas_gpu.layouts.smem.access import bit_offsets
from pallas_gpu.layouts.smem.matrix_access import plan_matrix
from pallas_gpu.layouts.smem.swizzle import swizzle_bytes

NOTHING = -1


def expected_memory(layout, smem: SmemLayout, window: tuple[int, ...]) -> np.ndarray:
    """What memory holds when every element lies where SmemLayout says."""
    ids = register_nibbles(layout, smem.itemsize_bits)
    offsets, _ = bit_offsets(layout, smem, window)
    per = smem.itemsize_bits // 4
    nibble = offsets[..., None] // 4 + np.arange(per)
    byte, rest = np.divmod(nibble.reshape(ids.shape), 2)
    # Swizzling moves whole bytes.
    memory = np.full(2 * smem.size_bytes, NOTHING)
    memory[2 * swizzle_bytes(byte, smem.swizzle) + rest] = ids
    return memory


def register_nibbles(layout, bits: int) -> np.ndarray:
    """Ids of what the threads hold: [128, registers, vector * nibbles per element]."""
    coordinates = layout.all_coordinates()
    shape = layout.shape
    flat = np.ravel_multi_index(tuple(np.moveaxis(coordinates, -1, 0)), shape)
    per = bits // 4
    ids = flat[..., None] * per + np.arange(per)
    return ids.reshape(*flat.shape[:2], -1)


def exchange(plan: AccessPlan, values: np.ndarray) -> np.ndarray:
    """Applies the staggers to [128, accesses, ...]."""
    values = values.copy()
    threads = np.arange(128)
    for stagger in plan.staggers:
        rows = threads[(threads >> stagger.thread_bit) & 1 == 1]
        for words in stagger.pairs:
            a, b = (list(plan.words[i]) for i in words)
            values[rows[:, None], a + b] = values[rows[:, None], b + a]
    return values


def places(plan: AccessPlan) -> np.ndarray:
    """Which nibbles each access of each thread touches: [128, accesses, nibbles]."""
    address = plan.addresses()
    if plan.method == "vector":
        assert plan.instructions == tuple((i,) for i in range(len(plan.accesses)))
        assert plan.words == plan.instructions
        return 2 * address[..., None] + np.arange(2 * plan.width_bytes)
    lane = np.arange(128) % 32
    warp = np.arange(128) // 32
    each = 4 if plan.of_bytes else 8
    result = np.zeros((128, len(plan.accesses), each), dtype=np.int64)
    for i, group in enumerate(plan.instructions):
        for matrix, word in enumerate(group):
            if plan.of_bytes:
                byte, half, k = np.arange(4), matrix % 2, lane // 4
                if plan.kind == "load":
                    rows, at = (
                        matrix // 2 * 16 + 4 * (lane % 4)[:, None] + byte,
                        8 * half,
                    )
                else:
                    rows = matrix * 8 + 2 * (lane % 4)[:, None] + byte % 2
                    at = 8 * (byte // 2)
                place = address[warp[:, None] * 32 + rows, i] + k[:, None] + at
                nibbles = 2 * place[..., None] + np.arange(2)
                result[:, list(plan.words[word])] = nibbles.reshape(128, 2, 4)
                continue
            (access,) = plan.words[word]
            if plan.transpose:
                first = address[warp * 32 + matrix * 8 + 2 * (lane % 4), i]
                second = address[warp * 32 + matrix * 8 + 2 * (lane % 4) + 1, i]
                pair = np.stack([first, second], axis=-1) + 2 * (lane // 4)[:, None]
                nibbles = 2 * pair[..., None] + np.arange(4)
            else:
                row = address[warp * 32 + matrix * 8 + lane // 4, i]
                nibbles = 2 * (row + 4 * (lane % 4))[:, None] + np.arange(8)
            result[:, access] = nibbles.reshape(128, 8)
    return result


def run_load(plan: AccessPlan, memory: np.ndarray, like: np.ndarray) -> np.ndarray:
    return exchange(plan, memory[places(plan)]).reshape(like.shape)


def run_store(plan: AccessPlan, values: np.ndarray, size: int) -> np.ndarray:
    memory = np.full(size, NOTHING)
    threads = np.arange(128)
    active = np.ones(128, dtype=bool)
    for bit in plan.predicate_bits:
        active &= (threads >> bit) & 1 == 0
    accesses = values.reshape(128, len(plan.accesses), -1)
    memory[places(plan)[active]] = exchange(plan, accesses)[active]
    return memory


def check(layout, smem: SmemLayout, window=None, **options) -> AccessPlan:
    """Plans a load and a store, runs both, returns the load's plan."""
    window = window or smem.shape
    memory = expected_memory(layout, smem, window)
    values = register_nibbles(layout, smem.itemsize_bits)
    load = plan_access(layout, smem, kind="load", window=window, **options)
    np.testing.assert_array_equal(run_load(load, memory, values), values)
    store = plan_access(layout, smem, kind="store", window=window, **options)
    stored = run_store(store, values, len(memory))
    np.testing.assert_array_equal(stored, memory)
    return load


def tiled(shape: tuple[int, ...], bits: int, swizzle: int) -> SmemLayout:
    return SmemLayout(shape, bits, (8, swizzle * 8 // bits), swizzle)


REGISTER_LAYOUTS = [
    Layout[name].to_layout()
    for name in (
        "WGMMA",
        "WGMMA_ACC_32BIT",
        "WGMMA_8BIT",
        "WGMMA_UPCAST_2X",
        "WGMMA_UPCAST_4X",
        "WGMMA_TRANSPOSED",
        "TCGEN05",
        "TCGEN05_TRANSPOSED",
        "TCGEN05_TMEM_NATIVE",
        "MMA_ACC",
    )
]


@pytest.mark.parametrize("swizzle", [32, 64, 128])
@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("layout", REGISTER_LAYOUTS, ids=str)
def test_the_catalogue_reaches_every_swizzled_ref_without_bank_conflicts(
    layout, bits, swizzle, transposed
):
    linear = layout.linear((128, 128))
    if transposed:
        linear = linear.transpose((1, 0))
    plan = check(linear, tiled((128, 128), bits, swizzle))
    assert plan.conflict_free


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
@pytest.mark.parametrize("layout", REGISTER_LAYOUTS, ids=str)
def test_the_catalogue_reaches_an_untiled_ref_without_bank_conflicts(layout, bits):
    check(layout.linear((128, 128)), SmemLayout((128, 128), bits), optimized=False)


@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_four_bit_elements_travel_in_whole_bytes(swizzle):
    layout = catalogue.WGMMA_UPCAST_4X.linear((64, 256))
    plan = check(layout, tiled((64, 256), 4, swizzle))
    assert plan.method == "matrix"


def test_f32_accumulators_need_one_stagger_on_a_128_byte_swizzle():
    plan = check(catalogue.WGMMA.linear((64, 64)), tiled((64, 64), 32, 128))
    assert (plan.method, plan.width_bytes) == ("vector", 8)
    assert len(plan.staggers) == 1


@pytest.mark.parametrize("transposed", [False, True])
def test_bf16_accumulators_take_four_matrices_at_once(transposed):
    layout = catalogue.WGMMA.linear((64, 64))
    plan = check(
        layout.transpose((1, 0)) if transposed else layout, tiled((64, 64), 16, 128)
    )
    assert plan.method == "matrix"
    assert plan.transpose == transposed
    assert not plan.staggers
    assert {len(group) for group in plan.instructions} == {4}


# name: layout, axes of the array in memory, whether it has no replicas to store.
BYTES = {
    "wgmma": (catalogue.WGMMA_8BIT, (1, 0), True),
    "accumulator": (catalogue.WGMMA, (1, 0), True),
    "tmem": (catalogue.TCGEN05, (1, 0), True),
    "upcast": (catalogue.WGMMA_UPCAST_4X, (1, 0), True),
    "lhs": (catalogue.mma_lhs(8), (1, 0), True),
    "lhs of one warp": (catalogue.mma_lhs(8, 1), (1, 0), False),
    "rhs": (catalogue.mma_rhs(8), (0, 1), False),
}


@pytest.mark.parametrize("swizzle", [32, 64, 128])
@pytest.mark.parametrize("name", BYTES)
def test_bytes_are_transposed_four_registers_at_once(name, swizzle):
    layout, order, stored = BYTES[name]
    linear = layout.linear((128, 128)).transpose(order)
    smem, options = tiled((128, 128), 8, swizzle), {"optimized": False}
    loaded = check(linear, smem, byte_matrices=True, **options)
    store = plan_access(linear, smem, kind="store", byte_matrices=True, **options)
    for plan in (loaded, store) if stored else (loaded,):
        assert plan.of_bytes and {len(group) for group in plan.instructions} == {4}
    assert not plan_access(linear, smem, kind="load").of_bytes
    assert check(linear, smem, byte_matrices=True).conflict_free
    memory = expected_memory(linear, smem, smem.shape)
    values = register_nibbles(linear, 8)
    # The plan that is taken is one of several with other registers in a matrix.
    for plan in plan_matrix(
        bit_offsets(linear, smem, smem.shape)[0], smem, "load", True
    ):
        np.testing.assert_array_equal(run_load(plan, memory, values), values)


def test_one_matrix_of_bytes():
    smem = SmemLayout((16, 64), 8, (8, 64), 64)
    load = check(
        catalogue.WGMMA_8BIT.linear((64, 16)).transpose((1, 0)),
        smem,
        byte_matrices=True,
    )
    assert load.of_bytes and load.instructions == ((0, 1),)
    smem = SmemLayout((8, 64), 8, (8, 64), 64)
    store = plan_access(
        catalogue.WGMMA.linear((64, 8)).transpose((1, 0)),
        smem,
        kind="store",
        byte_matrices=True,
    )
    assert store.of_bytes and store.instructions == ((0,),)


@pytest.mark.parametrize("m_warps", [1, 2, 4])
def test_operands_of_mma_that_several_warps_have_are_loaded_as_matrices(m_warps):
    smem = tiled((64, 64), 16, 128)
    for layout in (catalogue.mma_lhs(16, m_warps), catalogue.mma_rhs(16, m_warps)):
        plan = plan_access(layout.linear((64, 64)), smem, kind="load")
        assert plan.method == "matrix"
        assert {len(group) for group in plan.instructions} == {4}


def test_two_or_one_matrices_are_moved_where_four_do_not_fit():
    layout = Layout.TILED(
        catalogue.Tiling(((32, 8), (8, 8), (2,))), (-5,), (-3, -2), -1
    )
    one = check(layout.linear((32, 8)), SmemLayout((32, 8), 16))
    assert [len(group) for group in one.instructions] == [1]
    pair = check(layout.linear((32, 16)), SmemLayout((32, 16), 16, (8, 16), 32))
    assert [len(group) for group in pair.instructions] == [2]


@pytest.mark.parametrize("columns", [96, 160, 192])
@pytest.mark.parametrize("bits", [16, 32])
def test_a_number_of_column_tiles_that_is_no_power_of_two_is_added(columns, bits):
    smem = tiled((128, columns), bits, 64)
    plan = check(catalogue.WGMMA.linear((128, columns)), smem)
    assert any(plan.thread_add)


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("axis", [0, 1])
def test_row_and_column_vectors_reach_a_plain_ref(axis, bits):
    layout = Layout.WGMMA.reduce(axis).linear((256,))
    plan = check(layout, SmemLayout((256,), bits))
    assert plan.predicate_bits == layout.replication_bits != ()


@pytest.mark.parametrize("shape", [(128, 96), (3, 128), (7, 5, 128), (1024,), (384,)])
@pytest.mark.parametrize("bits", [8, 16, 32])
def test_strided_layouts_reach_a_plain_ref_even_if_not_linear(shape, bits):
    layout = WGStridedLayout.default(shape, bits)
    check(layout, SmemLayout(shape, bits))


def test_a_window_of_a_larger_array_keeps_the_arrays_strides():
    layout = catalogue.WGMMA.linear((64, 64))
    check(layout, tiled((3, 128, 256), 16, 128), window=(1, 64, 64))


def test_a_base_that_is_little_aligned_narrows_the_access():
    layout = WGStridedLayout((512,), 4)
    smem = SmemLayout((512,), 32)
    assert check(layout, smem).width_bytes == 16
    assert check(layout, smem, base_alignment_bytes=4).width_bytes == 4


def test_conflicts_are_planned_on_request():
    layout = catalogue.WGMMA.linear((128, 128)).transpose((1, 0))
    smem = SmemLayout((128, 128), 16)
    assert not check(layout, smem, optimized=False).conflict_free


def test_adding_constants_is_preferred_to_xor():
    plan = plan_access(
        catalogue.WGMMA.linear((128, 128)), tiled((128, 128), 16, 128), kind="load"
    )
    assert len(set(plan.xor)) <= 2


def test_planning_a_large_tile_is_fast():
    layout = catalogue.WGMMA.linear((128, 128))
    layout.all_coordinates()
    tiles = [tiled((rows, 128), 32, 128) for rows in (128, 256, 384, 512)]
    times = [time.perf_counter()]
    for smem in tiles:
        plan_access(layout, smem, kind="load", window=(128, 128))
        times.append(time.perf_counter())
    # 2 to 4 ms on an idle core; the bound leaves room for busy ones.
    assert min(np.diff(times)) < 0.02


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_layout_of_power_of_two_tiles_is_moved_right(data):
    """Random placements of a 64x64 tile: each thread and register bit gets an axis."""
    bits = data.draw(st.sampled_from([8, 16, 32]))
    swizzle = data.draw(st.sampled_from([32, 64, 128]))
    vector_axis = data.draw(st.sampled_from([0, 1]))
    vector_bits = data.draw(st.integers(0, 2))
    steps = [(1 << b, 0) for b in range(6)] + [(0, 1 << b) for b in range(6)]
    vector_steps = [
        (1 << b, 0) if vector_axis == 0 else (0, 1 << b) for b in range(vector_bits)
    ]
    rest = data.draw(st.permutations([s for s in steps if s not in vector_steps]))
    copies = data.draw(st.integers(0, 2))
    thread = data.draw(st.permutations([*rest[: 7 - copies], *[(0, 0)] * copies]))
    origins = [(0, 0)]
    for step in rest[7 - copies :]:
        origins += [(x + step[0], y + step[1]) for x, y in origins]
    layout = LinearLayout.create(
        (64, 64), thread, origins, 1 << vector_bits, vector_axis
    )
    smem = tiled((64, 128), bits, swizzle)
    if smem.tile[1] <= 64:
        check(layout, smem, window=(64, 64), optimized=False)

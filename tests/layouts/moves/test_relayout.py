# SPDX-License-Identifier: Apache-2.0
"""Relayouts, run on a model of registers, of shuffles and of scratch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_gpu.layouts import Layout, LinearLayout, WGStridedLayout
from pallas_gpu.layouts.moves import costs
from pallas_gpu.layouts.moves.binary import binary_layout
from pallas_gpu.layouts.moves.exchange import Exchange, plan_exchanges
from pallas_gpu.layouts.moves.relayout import (
    Rename,
    RowMajor,
    filled,
    plan_relayout,
    scratch_bytes,
)
from pallas_gpu.layouts.moves.shuffle import Network, Shuffle, plan_shuffles
from pallas_gpu.layouts.registers import catalogue
from pallas_gpu.layouts.registers.defaults import default_layout

SHAPE = (128, 64)
THREADS = np.arange(128)
TWO_AXES = {
    name: Layout[name].to_layout().linear(SHAPE)
    for name in (
        "WGMMA",
        "WGMMA_8BIT",
        "WGMMA_UPCAST_2X",
        "WGMMA_UPCAST_4X",
        "WGMMA_TRANSPOSED",
        "WGMMA_ACC_32BIT",
        "TCGEN05",
        "TCGEN05_TRANSPOSED",
        "TCGEN05_TMEM_NATIVE",
        "MMA_ACC",
    )
} | {
    "MMA_LHS 1": catalogue.mma_lhs(16, 1).linear(SHAPE),
    "MMA_LHS 2": catalogue.mma_lhs(8, 2).linear(SHAPE),
    "MMA_RHS 2": catalogue.mma_rhs(16, 2).linear(SHAPE),
    "M64_COLLECTIVE": catalogue.tcgen05_m64_collective(32).linear(SHAPE),
    "M64_NATIVE": catalogue.tcgen05_m64_collective_native(64, 4).linear(SHAPE),
    "COPY": catalogue.smem_gmem_copy(SHAPE, 16, 128).linear(SHAPE),
    "STRIDED 1": WGStridedLayout(SHAPE, 1).linear(),
    "STRIDED 4": WGStridedLayout(SHAPE, 4).linear(),
    "STRIDED 16": WGStridedLayout(SHAPE, 16).linear(),
    "transposed WGMMA": catalogue.WGMMA.linear(SHAPE[::-1]).transpose((1, 0)),
    "transposed STRIDED": WGStridedLayout(SHAPE[::-1], 4).linear().transpose((1, 0)),
}  # fmt: skip
ONE_AXIS = {
    "WGMMA_ROW": catalogue.WGMMA_ROW.linear((256,)),
    "WGMMA_COL": catalogue.WGMMA_COL.linear((256,)),
    "TCGEN05_ROW": catalogue.TCGEN05_ROW.linear((256,)),
    "TCGEN05_COL": catalogue.TCGEN05_COL.linear((256,)),
    "TRANSPOSED_ROW": catalogue.WGMMA_TRANSPOSED.reduce(1).linear((256,)),
    "UPCAST_COL": catalogue.WGMMA_UPCAST_4X.reduce(0).linear((256,)),
    "TMA_INDICES": catalogue.TMA_INDICES.linear((256,)),
    "STRIDED 1": WGStridedLayout((256,), 1).linear(),
    "STRIDED 2": WGStridedLayout((256,), 2).linear(),
    "everywhere": LinearLayout.create((256,), [(0,)] * 7, [(i,) for i in range(256)]),
}


def contents(layout) -> np.ndarray:
    """What every slot of every thread holds: row-major numbers of the elements."""
    coordinates = np.moveaxis(layout.all_coordinates(), -1, 0)
    if len(layout.shape) == 0:
        return np.zeros((128, layout.num_registers, layout.vector_length), int)
    return np.ravel_multi_index(tuple(coordinates), layout.shape)


def gather(held: np.ndarray, sources) -> np.ndarray:
    """Vectors of elements (vector, place in it): [128, vectors, length]."""
    table = np.array(sources)
    return held[:, table[..., 0], table[..., 1]]


def through_network(words: np.ndarray, network: Network) -> np.ndarray:
    index = np.arange(words.shape[1])
    for mask, distance in network.stages:
        odd = np.bitwise_count(THREADS & mask) % 2 == 1
        words = np.where(odd[:, None, None], words[:, index ^ distance], words)
    return words


def run_shuffle(plan: Shuffle, held: np.ndarray, dst) -> np.ndarray:
    sent = through_network(gather(held, plan.packs), plan.send)
    lanes = np.zeros(128, int)
    for bit, column in enumerate(plan.lane_columns):
        lanes ^= (THREADS >> bit & 1) * column
    received = [
        sent[THREADS // 32 * 32 + (lanes ^ shift), source]
        for source, shift in zip(plan.sources, plan.shifts, strict=True)
    ]
    placed = through_network(np.stack(received, axis=1), plan.place)
    return gather(placed, filled(plan.places, dst))


def meets(conditions) -> np.ndarray:
    result = np.ones(128, dtype=bool)
    for mask, odd in conditions:
        result &= (np.bitwise_count(THREADS & mask) % 2 == 1) == odd
    return result


def run_exchange(plan: Exchange, held: np.ndarray, dst, bits: int):
    itemsize = bits // 8
    store, load = plan.store.form.evaluate(), plan.load.form.evaluate()
    width = len(plan.store.units[0][0])
    places = np.arange(width)
    result = np.full((128, dst.num_registers, dst.vector_length), -1)
    for parts in plan.rounds:
        memory = np.full(plan.scratch_bytes // itemsize, -1)
        for i, part in enumerate(parts):
            active = meets([*((1 << b, 0) for b in plan.idle_bits),
                            *plan.store.conditions[part]])  # fmt: skip
            for access, unit in enumerate(plan.store.units[part]):
                at = store[:, access] + i * plan.part_bytes
                assert (at % (width * itemsize) == 0).all()
                values = gather(held, [unit])[:, 0]
                where = at[active, None] // itemsize + places
                assert (memory[where] == -1).all()
                memory[where] = values[active]
        for i, part in enumerate(parts):
            active = meets(plan.load.conditions[part])
            for access, unit in enumerate(plan.load.units[part]):
                at = load[:, access] + i * plan.part_bytes
                values = memory[at[:, None] // itemsize + places]
                for place, (register, element) in enumerate(unit):
                    result[active, register, element] = values[active, place]
    return result


def run(src, dst, bits: int, plan) -> np.ndarray:
    held = contents(src)
    match plan.method:
        case Rename(sources):
            return gather(held, sources)
        case Shuffle():
            return run_shuffle(plan.method, held, dst)
        case Exchange():
            return run_exchange(plan.method, held, dst, bits)
        case RowMajor():  # the emitters of loads and stores are tested elsewhere
            return contents(dst)


def check(src, dst, bits: int, scratch: int | None = None):
    plan = plan_relayout(src, dst, bits, scratch)
    np.testing.assert_array_equal(run(src, dst, bits, plan), contents(dst))
    return plan


BITS = st.sampled_from([8, 16, 32, 64])
PAIRS = st.sampled_from([TWO_AXES, ONE_AXIS]).flatmap(
    lambda layouts: st.tuples(*[st.sampled_from(sorted(layouts))] * 2).map(
        lambda names: (layouts[names[0]], layouts[names[1]])
    )
)


@settings(max_examples=120, deadline=None)
@given(PAIRS, BITS, st.sampled_from([None, 256, 2048, 1 << 16]))
def test_every_element_gets_where_it_belongs(pair, bits, scratch):
    check(*pair, bits, scratch)


@settings(max_examples=80, deadline=None)
@given(PAIRS, st.sampled_from([8, 16, 32]))
def test_every_plan_of_shuffles_is_right(pair, bits):
    src, dst = pair
    for plan in plan_shuffles(binary_layout(src), binary_layout(dst), bits):
        np.testing.assert_array_equal(
            run_shuffle(plan, contents(src), dst), contents(dst)
        )


@settings(max_examples=80, deadline=None)
@given(PAIRS, BITS, st.sampled_from([512, 8192]))
def test_the_way_through_smem_has_no_bank_conflicts(pair, bits, scratch):
    src, dst = pair
    for plan in plan_exchanges(binary_layout(src), binary_layout(dst), bits, scratch):
        result = run_exchange(plan, contents(src), dst, bits)
        np.testing.assert_array_equal(result, contents(dst))
        words = max(len(plan.store.units[0][0]) * bits // 32, 1)
        assert plan.store.wavefronts == plan.load.wavefronts == words


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("layouts", [TWO_AXES, ONE_AXIS], ids=["two axes", "one"])
def test_every_pair_of_the_catalogue(layouts, bits):
    for src, dst in itertools.product(layouts, layouts):
        check(layouts[src], layouts[dst], bits)


# --- what it takes --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("src", "dst", "widths"),
    [
        # 64 elements to a thread, half of which stay where they are.
        ("WGMMA", "WGMMA_TRANSPOSED", (8, 16, 32)),
        ("WGMMA_UPCAST_2X", "WGMMA", (8, 16)),
    ],
    ids=["transposed vectors", "widened data"],
)
def test_moved_vectors_cost_a_shuffle_for_two_words(src, dst, widths):
    for bits in widths:
        plan = check(TWO_AXES[src], TWO_AXES[dst], bits)
        assert isinstance(plan.method, Shuffle)
        assert plan.method.moves == bits
        assert plan.scratch_bytes == 0


@pytest.mark.parametrize(
    ("src", "bits"), [("WGMMA_8BIT", 16), ("WGMMA_UPCAST_4X", 8), ("MMA_LHS 1", 16)]
)
def test_words_of_several_registers_are_not_shuffled(src, bits):
    plan = plan_relayout(TWO_AXES[src], TWO_AXES["WGMMA_TRANSPOSED"], bits)
    assert isinstance(plan.method, Exchange)


def test_regrouping_registers_is_free():
    src, dst = TWO_AXES["WGMMA"], TWO_AXES["WGMMA_ACC_32BIT"]
    plan = check(src, dst, 32)
    assert isinstance(plan.method, Rename)
    assert plan.cost == costs.relayout_cost(src, dst, 32) == 0


def test_a_copy_in_the_own_thread_is_taken_without_a_shuffle():
    src = binary_layout(ONE_AXIS["everywhere"])
    plans = plan_shuffles(src, binary_layout(ONE_AXIS["WGMMA_ROW"]), 32)
    assert [plan.moves for plan in plans] == [0]


def test_only_one_of_many_copies_is_stored():
    plan = check(ONE_AXIS["WGMMA_ROW"], ONE_AXIS["STRIDED 1"], 32)
    assert isinstance(plan.method, Exchange)
    assert plan.method.idle_bits == (0, 1)


def test_warps_that_exchange_nothing_do_not_wait_for_each_other():
    plan = check(TWO_AXES["TCGEN05"], TWO_AXES["TCGEN05_TMEM_NATIVE"], 32)
    assert isinstance(plan.method, Exchange)
    assert plan.method.within_warps
    other = check(TWO_AXES["WGMMA"], TWO_AXES["STRIDED 4"], 32)
    assert not other.method.within_warps


def test_less_scratch_means_more_rounds():
    src, dst = TWO_AXES["WGMMA"], TWO_AXES["STRIDED 4"]
    plans = [check(src, dst, 32, scratch) for scratch in (2048, 8192, 1 << 15)]
    assert [len(plan.method.rounds) for plan in plans] == [16, 4, 1]
    assert [plan.scratch_bytes for plan in plans] == [2048, 8192, 1 << 15]
    assert plans[0].cost > plans[1].cost > plans[2].cost


def test_a_part_is_stored_by_some_warps_and_loaded_by_all():
    plan = check(TWO_AXES["WGMMA"], TWO_AXES["STRIDED 4"], 32, 2048)
    # The warps of WGMMA are bits of the row, which STRIDED has in registers.
    masks = {mask for part in plan.method.store.conditions for mask, _ in part}
    assert masks == {32, 64}
    assert not any(plan.method.load.conditions)


def test_the_scratch_needed_is_what_is_there_or_more():
    src, dst = TWO_AXES["WGMMA"], TWO_AXES["STRIDED 4"]
    needed = plan_relayout(src, dst, 32, 16).scratch_bytes
    assert 16 < needed <= 2048
    assert check(src, dst, 32, needed).scratch_bytes == needed
    assert costs.relayout_cost(src, dst, 32, 0) is None
    in_rounds = [costs.relayout_cost(src, dst, 32, n) for n in (16, 32, needed)]
    assert in_rounds == sorted(in_rounds, reverse=True)
    assert scratch_bytes(src, src, 32, 0) == 0
    assert scratch_bytes(src, dst, 32, 8192) == 8192
    assert 0 < scratch_bytes(src, dst, 32, 0) <= 2048


# --- shapes ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (8,), (4, 3), (10, 6), (3, 128), (3, 4, 32)])
def test_small_and_odd_shapes(shape):
    default = default_layout(shape, 32)
    src = default.linear() if isinstance(default, WGStridedLayout) else default
    zero = (0,) * len(shape)
    everywhere = LinearLayout.create(shape, [zero] * 7, list(np.ndindex(shape)))
    for bits in (8, 32):
        check(src, everywhere, bits)
        check(everywhere, src, bits)


def test_tiles_of_odd_shapes():
    shape = (192, 96)
    names = ("WGMMA", "WGMMA_TRANSPOSED", "WGMMA_UPCAST_4X")
    layouts = [Layout[name].to_layout().linear(shape) for name in names]
    for src, dst in itertools.product(layouts, layouts):
        check(src, dst, 16)


def test_strided_layouts_without_a_linear_form_meet_in_one_row():
    src, dst = (WGStridedLayout((64, 100), vec) for vec in (2, 1))
    plan = plan_relayout(src, dst, 16)
    assert isinstance(plan.method, Exchange)
    row = [WGStridedLayout((6400,), vec).linear() for vec in (2, 1)]
    check(*row, 16)


def test_other_layouts_go_through_rows_in_smem():
    src, dst = catalogue.WGMMA.linear((64, 24)), WGStridedLayout((64, 24), 4)
    for pair in ((src, dst), (dst, src)):
        plan = plan_relayout(*pair, 32)
        assert isinstance(plan.method, RowMajor)
        assert plan.scratch_bytes == 64 * 24 * 4

# SPDX-License-Identifier: Apache-2.0
"""What one tile costs in the Blackwell product, beside upstream's; and the model."""

from __future__ import annotations

import re

import pytest

from benchmarks import blackwell_model as model

SIZE = 4096
STEPS = SIZE // 64
KERNELS = model.candidates(SIZE)
SCALED = model.scaled_candidates(SIZE)
OURS = [name for name in KERNELS if name.startswith("pallas_gpu")]


@pytest.mark.offline
@pytest.mark.parametrize("name", KERNELS)
def test_a_tile_takes_one_instruction_per_16_of_k_and_one_commit_per_step(name):
    counts = KERNELS[name].counts
    assert counts.count("multiply", "tcgen05.mma") == SIZE // 16
    # And one when the accumulator is complete.
    assert counts.count("multiply", "tcgen05.commit") == STEPS + 1
    assert counts.count("load", "cp.async.bulk.tensor") == 2 * STEPS
    assert counts.count("store", "tcgen05.ld") == 8


@pytest.mark.offline
@pytest.mark.parametrize("name", OURS)
def test_the_barriers_of_our_tile(name):
    tile, counts = KERNELS[name].tile, KERNELS[name].counts
    # The first CTA of a pair expects the bytes of both.
    assert counts.expected_bytes == tile.operand_bytes * tile.ctas
    # Each step waits for its buffer; a tile, for its accumulator.
    waits = {role: counts.count(role, "mbarrier.try_wait") for role in counts.roles}
    assert waits == {"load": STEPS, "multiply": STEPS + 1, "store": 1}
    arrivals = {role: counts.count(role, "mbarrier.arrive") for role in counts.roles}
    assert arrivals == {"load": 2 * STEPS, "multiply": 0, "store": 1}


@pytest.mark.offline
@pytest.mark.parametrize("role", ["multiply", "store"])
@pytest.mark.parametrize("name", OURS)
def test_our_roles_execute_no_more_than_upstreams(name, role):
    ours = KERNELS[name].counts
    theirs = KERNELS[name.replace("pallas_gpu", "upstream")].counts
    assert ours.total(role) <= theirs.total(role)


@pytest.mark.offline
@pytest.mark.parametrize("name", KERNELS)
def test_the_tensor_core_is_busy_longer_than_the_schedulers(name):
    kernel = KERNELS[name]
    assert kernel.counts.issue_clocks < kernel.tile.tensor_clocks / 4


def test_the_clocks_of_a_tile():
    one = model.Tile(m=128, n=256, k=64, step_k=64, ctas=1)
    # A product of 128x256x16 takes 128 clocks; its operands have 12 KiB, 8 in pairs.
    assert one.tensor_clocks == 4 * 128
    assert one.read_clocks == 4 * 96
    pair = model.Tile(m=128, n=256, k=64, step_k=64, ctas=2)
    assert pair.tensor_clocks == one.tensor_clocks
    assert pair.read_clocks == 4 * 64
    assert pair.smem_clocks == 2 * (4 * 64 + 512)


def test_the_last_round_of_tiles_leaves_sms_idle():
    tile = model.Tile(m=128, n=256, k=64, step_k=64, ctas=1)
    assert tile.waves(4096, 4096) == 512 / (4 * 148)


# --- scales ---------------------------------------------------------------------------


@pytest.mark.offline
@pytest.mark.parametrize(("name", "bits"), [("mxf8", 8), ("nvf4, pairs", 4)])
def test_a_tile_with_scales_takes_one_instruction_per_32_bytes_of_k(name, bits):
    counts = SCALED[name].counts
    assert counts.count("multiply", "tcgen05.mma") == SIZE * bits // 256
    # A, B and the scales of both, in steps of 128 bytes of K.
    copies = counts.count("load", "cp.async.bulk.tensor")
    assert copies == 4 * SIZE * bits // 1024
    expected = SCALED[name].tile.operand_bytes * SCALED[name].tile.ctas
    assert counts.expected_bytes == expected


@pytest.mark.offline
@pytest.mark.parametrize("name", ["mxf8", "nvf4, pairs"])
def test_half_of_the_accumulator_has_been_read_when_the_next_product_starts(name):
    found = re.findall(
        r"(tcgen05\.ld|mbarrier\.arrive)\.(?!expect_tx)", SCALED[name].ptx()
    )
    loads = [i for i, word in enumerate(found) if word == "tcgen05.ld"]
    inside = [x for x in found[loads[0] : loads[-1]] if x == "mbarrier.arrive"]
    assert len(inside) == 1
    assert found[loads[0] :].index("mbarrier.arrive") == len(loads) // 2


def test_clocks_of_a_tile_with_scales():
    tile = model.Tile(128, 256, 128, 128, 1, bits=8, block=32)
    # Four products of 128x256x32, each as long as one of 16 elements of 16 bits.
    assert tile.tensor_clocks == 4 * 128
    assert tile.operand_bytes == (128 + 256) * (128 + 4)
    pair = model.Tile(128, 256, 128, 128, 2, bits=8, block=32)
    assert pair.operand_bytes == (128 + 128) * 128 + (128 + 256) * 4

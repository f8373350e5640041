# SPDX-License-Identifier: Apache-2.0
"""Blocks that a tile sees, against masks written out; hidden and modified scores."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gpu.ops.flash.masks import (
    Blocks,
    Lengths,
    Mask,
    Scores,
    segment_blocks,
)
from pallas_gpu.ops.folded import minimum
from tests.support import host

LENGTHS = [(1, 1), (7, 12), (12, 7), (16, 16), (1, 13)]
BOUNDS = [(None, None), (None, 0), (0, None), (2, 0), (3, 5), (0, 0), (None, 4)]


def written_out(mask, rows, columns):
    shift = columns - rows if mask.from_end else 0
    away = np.arange(columns)[None, :] - (np.arange(rows)[:, None] + shift)
    seen = np.ones((rows, columns), bool)
    if mask.left is not None:
        seen &= away >= -mask.left
    if mask.right is not None:
        seen &= away <= mask.right
    return seen


def assert_covers(blocks, seen, block, tile):
    """What is seen lies inside; what is called whole is."""
    first, first_whole, end_whole, end = (int(x) for x in blocks)
    assert 0 <= first <= first_whole <= end_whole <= end
    for j in range(-(-seen.shape[1] // block)):
        part = seen[tile, j * block : (j + 1) * block]
        if not first <= j < end:
            assert not part.any()
        if first_whole <= j < end_whole:
            assert part.all() and part.shape[1] == block


@pytest.mark.parametrize("from_end", [False, True])
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_blocks_hold_what_a_tile_sees(lengths, bounds, from_end):
    mask = Mask(*bounds, from_end=from_end)
    seen = written_out(mask, *lengths)
    for size, block in itertools.product((2, 4), (3, 4)):
        for start in range(0, lengths[0], size):
            blocks = mask.blocks(Lengths(*lengths), start, size, block)
            assert_covers(blocks, seen, block, slice(start, start + size))
            at_run_time = Mask(*bounds, from_end=from_end, ragged=True).blocks(
                Lengths(*map(jnp.int32, lengths)), jnp.int32(start), size, block
            )
            assert tuple(map(int, at_run_time)) == blocks
            assert blocks.at_least_one().end > blocks.at_least_one().first


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_transposed_mask_gives_the_tiles_that_see_a_block(lengths, bounds):
    mask = Mask(*bounds, from_end=True)
    seen, other = written_out(mask, *lengths).T, Lengths(*lengths[::-1])
    for start in range(0, lengths[1], 4):
        tiles = mask.transposed.blocks(other, start, 4, 3, only_inside=True)
        assert_covers(tiles, seen, 3, slice(start, start + 4))
        if start + 4 > lengths[1]:
            assert tiles.first_whole == tiles.end_whole


def test_a_tile_behind_the_end_of_its_sequence_sees_nothing():
    blocks = Mask(ragged=True).blocks(Lengths(jnp.int32(3), jnp.int32(9)), 4, 4, 3)
    assert blocks.end == blocks.first
    assert tuple(map(int, blocks.at_least_one())) == (0, 0, 0, 1)


def test_blocks_in_common():
    assert Blocks(0, 1, 5, 6).within(Blocks(2, 2, 4, 9)) == (2, 2, 4, 6)
    assert Blocks(0, 0, 2, 2).within(Blocks(3, 3, 4, 4)) == (3, 3, 3, 3)


@pytest.mark.parametrize("kind", ["sorted", "any"])
def test_blocks_of_segments(kind):
    rng = np.random.default_rng(0)
    rows, columns = rng.integers(0, 4, (2, 14)), rng.integers(0, 4, (2, 23))
    if kind == "sorted":
        rows, columns = np.sort(rows, axis=1), np.sort(columns, axis=1)
    table = segment_blocks(jnp.asarray(rows), jnp.asarray(columns), 4, 3)
    assert table.shape == (2, 4, 4)
    for b, i in np.ndindex(2, 4):
        seen = rows[b][:, None] == columns[b][None, :]
        if i == 3:
            assert len(seen[12:]) > 0
        blocks = Blocks(*np.asarray(table[b, i]))
        # The last block may have fewer columns: its end is the lengths' affair.
        wide = np.pad(seen, ((0, 0), (0, 1)), mode="edge")
        assert_covers(blocks, wide, 3, slice(4 * i, 4 * i + 4))


@pytest.mark.parametrize("bounds", BOUNDS)
def test_scores_that_do_not_exist_are_hidden(bounds):
    mask = Mask(*bounds, from_end=True)
    lengths = Lengths(40, 50)
    seen = np.zeros((64, 64), bool)
    seen[:40, :50] = written_out(mask, 40, 50)
    scores = jnp.ones((16, 24))
    for row, column in itertools.product((0, 16, 32), (0, 24, 40)):
        got = mask.hide(scores, -1, lengths, row, column, hides_rows=True)
        expected = seen[row : row + 16, column : column + 24]
        np.testing.assert_array_equal(got == 1, expected)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_modified_scores_are_exponents_of_two(soft_cap):
    rng = np.random.default_rng(0)
    raw, bias = (host.array(rng.normal(size=(8, 16)), jnp.float32) for _ in "ab")
    scores = Scores(0.25, soft_cap, bias=True, alibi=True)
    got, capped = scores.modified(raw, 5, bias, 0.125, keeps_capped=True)
    natural = raw * 0.25
    if soft_cap is not None:
        natural = soft_cap * jnp.tanh(natural / soft_cap)
        np.testing.assert_allclose(capped, jnp.tanh(raw * 0.25 / soft_cap), rtol=1e-5)
    away = jnp.abs(jnp.arange(8)[:, None] + 5 - jnp.arange(16)[None, :])
    natural = natural + bias - 0.125 * away
    np.testing.assert_allclose(got * scores.factor, natural * np.log2(np.e), rtol=1e-5)


def test_a_bias_hides_as_a_mask_does():
    scores = Scores(sm_scale=0.5, bias=True)
    bias = np.array([[0, -np.inf]], np.float32)
    assert scores.modified(np.ones((1, 2)), 0, bias).tolist() == [[1, scores.hidden]]


def test_bounds_are_of_32_bits_in_kernels_traced_with_x64():
    with jax.enable_x64(True):
        assert minimum(5, jnp.int32(7)).dtype == jnp.int32

# SPDX-License-Identifier: Apache-2.0
"""Ragged products: the order of tiles, and what stays in SMEM meanwhile"""

from __future__ import annotations

import collections
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gpu.ops import RaggedDotConfig, ragged_dot, ragged_dot_general
from pallas_gpu.ops.moe import contracted, hopper
from pallas_gpu.ops.moe.groups import GroupedProblem, Groups
from tests.support import ragged
from tests.support.ragged import ROUNDING, normal

SMALL = RaggedDotConfig(
    tile_m=64, tile_n=64, tile_k=32, stages=2, blocks=3, strip=2, epilogue_n=32
)
CONTRACTED = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


def _places(sizes, strip, columns=3):
    """Returns the group, tile of rows and column of each position."""
    config = dataclasses.replace(SMALL, strip=strip)
    rows = sum(sizes)
    n, dtypes = columns * config.tile_n, (jnp.float16, jnp.float16)
    number = {"groups": len(sizes), "matrices": len(sizes)}
    schedule = hopper.Schedule(GroupedProblem(rows, n, 32, *dtypes, **number), config)
    tiles = [-(-size // config.block_m) for size in sizes]
    ends = (jnp.cumsum(jnp.array(x, jnp.int32)) for x in (sizes, tiles))
    groups = Groups(len(sizes), rows, 0, len(sizes), *ends)
    found = jax.vmap(lambda position: schedule.place(groups, position))(
        jnp.arange(sum(tiles) * columns, dtype=jnp.int32)
    )
    return tiles, list(zip(*(x.tolist() for x in found), strict=True))


@pytest.mark.parametrize(
    ("m", "n", "groups", "strip", "blocks"),
    # Strips of one tile; all SMs have one; strips as wide as they are asked for.
    [(2048, 2048, 1, 1, 128), (1024, 256, 40, 2, 132), (4096, 4096, 8, 16, 132)],
)
def test_strips_leave_a_strip_for_each_block(m, n, groups, strip, blocks):
    dtypes = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.bfloat16)
    p = GroupedProblem(m, n, 8192, *dtypes, groups=groups, matrices=groups)
    schedule = contracted.Schedule(p, RaggedDotConfig())
    assert (schedule.strip, schedule.blocks) == (strip, blocks)


@pytest.mark.parametrize("strip", [1, 2, 3, 1000])
def test_each_tile_is_visited_once_and_those_of_one_matrix_together(strip):
    tiles, places = _places((1, 128, 0, 600, 129, 300), strip)
    expected = collections.Counter(
        (group, row, column)
        for group, number in enumerate(tiles)
        for row, column in itertools.product(range(number), range(3))
    )
    assert collections.Counter(places) == expected
    strips = [(group, row // strip, column) for group, row, column in places]
    # A strip that is left is not visited again.
    runs = [key for key, _ in itertools.groupby(strips)]
    assert len(runs) == len(set(runs))


def test_tiles_of_a_group_differ_by_a_unit_at_most():
    sizes = 1, 64, 1024, 0, 129, 300, 4000
    config = RaggedDotConfig(tile_m=64, consumers=3)
    dtypes = jnp.dtype(jnp.float16), jnp.dtype(jnp.float16)
    rows, number = sum(sizes), len(sizes)
    p = GroupedProblem(rows, 256, 32, *dtypes, groups=number, matrices=number)
    schedule = hopper.Schedule(p, config)
    tiles = [-(-size // config.block_m) for size in sizes]
    ends = (jnp.cumsum(jnp.array(x, jnp.int32)) for x in (sizes, tiles))
    groups = Groups(number, rows, 0, number, *ends)
    start = 0
    for group, (size, count) in enumerate(zip(sizes, tiles, strict=True)):
        places = [schedule.rows_of(groups, group, jnp.int32(i)) for i in range(count)]
        edges = [start, *(int(end) for _, end in places)]
        assert [int(first) for first, _ in places] == edges[:-1]
        start += size
        assert edges[-1] == start
        units = [-(-(b - a) // 64) for a, b in itertools.pairwise(edges)]
        assert max(units, default=0) - min(units, default=0) <= 1


def assert_close(got, expected):
    np.testing.assert_allclose(got, expected, atol=ROUNDING["float16"])


@pytest.mark.parametrize("strip", [2, 100])
def test_a_group_of_several_strips(strip):
    sizes = 3, 600, 40
    a, b = normal(700, 64), normal(3, 64, 136)
    config = dataclasses.replace(SMALL, strip=strip)
    got = ragged_dot(a, b, jnp.array(sizes), config=config)
    assert_close(got, ragged.product(a, b, sizes))


# Of the last step no row, a quarter, half of it and more are loaded; the operand stays
# in SMEM for up to 64 rows, and no longer for 65.
DEPTHS = 5, 8, 9, 0, 16, 17, 32, 64, 65, 100


@pytest.mark.parametrize(
    "changes",
    [{"strip": 1}, {"strip": 2}, {"strip": 100}, {"strip": 3, "tile_k": 16}],
)
def test_strips_of_products_over_rows(changes):
    rows = sum(DEPTHS)
    a, b = normal(rows + 9, 264), normal(rows + 9, 136, seed=1)
    # What is behind the groups does not count, be it infinite.
    a[rows:], b[rows:] = np.nan, np.inf
    config = dataclasses.replace(SMALL, **changes)
    got = ragged_dot_general(a, b, jnp.array(DEPTHS), CONTRACTED, config=config)
    assert_close(got, ragged.contracted(a, b, DEPTHS))


def test_infinities_of_the_next_group_do_not_count():
    sizes = 40, 50
    a, b = normal(90, 64), normal(90, 64, seed=1)
    a[40:], b[40:] = np.inf, np.nan
    got = ragged_dot_general(a, b, jnp.array(sizes), CONTRACTED, config=SMALL)
    assert_close(got[:1], ragged.contracted(a[:40], b[:40], sizes[:1]))

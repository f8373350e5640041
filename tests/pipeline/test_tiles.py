# SPDX-License-Identifier: Apache-2.0
"""`TileSchedule` and `Roles`: each tile once; what the roles run with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.public_calls import top
from tests.support.refusal import refused

# Rows and columns in tiles: neither the clusters nor the strips divide them.
SCHEDULES = {
    "one": plgpu.TileSchedule((1, 1), (8, 8)),
    "strips": plgpu.TileSchedule((33, 50), (8, 8), minor=1, strip=3),
    "rows": plgpu.TileSchedule((33, 50), (8, 8), cluster=(2, 1), strip=2),
    "columns": plgpu.TileSchedule((33, 50), (8, 8), cluster=(1, 2), batch=3),
    "names of axes": plgpu.TileSchedule(
        (33, 50), (8, 8), cluster=(2, 1), axis="sm", cluster_axis="cta"
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_tile_is_visited_once_by_one_cta(name):
    tiles = SCHEDULES[name]
    rows, columns = (n // 8 for n in tiles.extent)
    out = np.zeros((tiles.batch, rows, columns), np.int32)

    def body(o):
        def visit(batch, i, j, number):
            o[batch, i, j] = number + 1

        tiles.for_each(visit)

    clusters = tiles.clusters(6)
    assert clusters == min(6 // int(np.prod(tiles.cluster)), tiles.count)
    # The cluster's first tile has number 0, its next one 1.
    expected = np.zeros_like(out)
    for linear in range(tiles.count):
        for cta in range(int(np.prod(tiles.cluster))):
            batch, within = divmod(linear, int(np.prod(tiles.plane)))
            mi, ni = plgpu.planar_snake(within, tiles.plane, tiles.minor, tiles.strip)
            place = int(mi) * tiles.cluster[0], int(ni) * tiles.cluster[1]
            offset = (cta, 0) if tiles.cluster[0] > 1 else (0, cta)
            at = (batch, *np.add(place, offset))
            assert expected[at] == 0
            expected[at] = linear // clusters + 1
    assert expected.all()
    options = {"grid": {tiles.axis: clusters}}
    if max(tiles.cluster) > 1:
        options["cluster"] = {tiles.cluster_axis: 2}
    everywhere.check(everywhere.kernel(body, out, **options), (), expected)


@pytest.mark.parametrize("two_branches", [False, True])
@pytest.mark.parametrize("registers", [None, (40, 232)])
def test_the_last_warpgroup_produces(registers, two_branches):
    roles = plgpu.Roles(2, registers, two_branches)

    def body(o):
        wg = lax.axis_index("wg")

        def store(what):
            o[wg] = jnp.full((128,), what, jnp.int32)

        roles.run(wg, lambda: store(1), lambda: store(2))

    expected = np.repeat(np.array([[2], [2], [1]], np.int32), 128, axis=1)
    make = everywhere.kernel(body, expected, threads={"wg": roles.num_threads})
    everywhere.check(make, (), expected)


# --- refused --------------------------------------------------------------------------


@refused
def test_a_cluster_along_both_dimensions():
    plgpu.TileSchedule((64, 64), (8, 8), cluster=(2, 2))


@refused
def test_sizes_that_are_not_two():
    plgpu.TileSchedule((64, 64, 64), (8, 8))


@refused
def test_no_consumers():
    plgpu.Roles(0)


@refused
def test_a_block_of_fewer_warpgroups_than_roles():
    def body(o):
        plgpu.Roles(2).run(lax.axis_index("wg"), nothing, nothing)  # HERE

    out = np.zeros((128,), np.float32)
    jax.eval_shape(everywhere.kernel(body, out, threads={"wg": 2})())


def nothing():
    pass


EACH_TILE = "test_each_tile_is_visited_once_by_one_cta"
GOOD = {
    "TileSchedule": top(shape=(64, 64), tile=(8, 8)),
    "Roles": top(consumers=2),
}
EFFECTS = {
    "Roles.registers": "test_the_last_warpgroup_produces",
    "Roles.two_branches": "test_the_last_warpgroup_produces",
    **{
        f"TileSchedule.{name}": EACH_TILE
        for name in ("axis", "batch", "cluster", "cluster_axis", "minor", "strip")
    },
}


@pytest.mark.parametrize("registers", [232, (40, 232, 232)], ids=["one", "three"])
@refused
def test_registers_are_those_of_both_roles(registers):
    plgpu.Roles(consumers=2, registers=registers)  # HERE

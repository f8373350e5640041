# SPDX-License-Identifier: Apache-2.0
"""The shape of a launch."""

from __future__ import annotations

import pytest

from pallas_gpu.types import Mesh
from tests.support.refusal import refused


def test_a_mesh_without_axes_is_one_block_of_one_warpgroup():
    mesh = Mesh()
    assert (mesh.blocks, mesh.warpgroups, mesh.axes) == (1, 1, ())


def test_axes_come_in_the_order_grid_cluster_threads():
    mesh = Mesh(
        grid=(2, 3),
        grid_names=("i", "j"),
        cluster=(2,),
        cluster_names=("c",),
        num_threads=2,
        thread_name="wg",
    )
    assert mesh.axes == (("i", 2), ("j", 3), ("c", 2), ("wg", 2))
    assert (mesh.blocks, mesh.warpgroups) == (12, 2)


def test_one_axis_needs_no_tuple():
    mesh = Mesh(grid=4, grid_names="i")
    assert mesh.axes == (("i", 4),)


def test_equal_meshes_are_one_key():
    assert (
        len({Mesh(grid=[2], grid_names=["i"]), Mesh(grid=(2,), grid_names=("i",))}) == 1
    )


@pytest.mark.parametrize(
    "options",
    [
        {"grid": (-1,), "grid_names": ("i",)},
        {"grid": (True,), "grid_names": ("i",)},
        {"cluster": (-2,), "cluster_names": ("c",)},
        {"grid": (2,)},
        {"cluster_names": ("c",)},
        {"grid": (2, 2), "grid_names": ("i", "i")},
        {"num_threads": 2},
        {"thread_name": "wg"},
        {"num_threads": 9, "thread_name": "wg"},
        {"cluster": (1,) * 4, "cluster_names": tuple("abcd")},
        {"grid": (2**16, 2**16), "grid_names": ("i", "j")},
    ],
    ids=str,
)
@refused
def test_what_a_mesh_refuses(options):
    Mesh(**options)  # HERE

# SPDX-License-Identifier: Apache-2.0
"""The shape of a launch."""

from __future__ import annotations

import pytest

from pallas_gpu import errors
from pallas_gpu.types import Mesh


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
    ("options", "what"),
    [
        ({"grid": (-1,), "grid_names": ("i",)}, "grid needs static sizes"),
        ({"grid": (True,), "grid_names": ("i",)}, "grid needs static sizes"),
        ({"cluster": (-2,), "cluster_names": ("c",)}, "cluster needs positive"),
        ({"grid": (2,)}, "grid and grid_names have different lengths"),
        ({"cluster_names": ("c",)}, "cluster and cluster_names have different lengths"),
        ({"grid": (2, 2), "grid_names": ("i", "i")}, "two axes have the same name"),
        ({"num_threads": 2}, "num_threads and thread_name belong together"),
        ({"thread_name": "wg"}, "num_threads and thread_name belong together"),
        ({"num_threads": 9, "thread_name": "wg"}, "num_threads is out of range"),
        ({"cluster": (1,) * 4, "cluster_names": tuple("abcd")}, "too many axes"),
        ({"grid": (2**16, 2**16), "grid_names": ("i", "j")}, "too many blocks"),
    ],
)
def test_what_a_mesh_refuses(options, what):
    with pytest.raises(errors.ArgumentError, match=what) as info:
        Mesh(**options)
    assert None not in (info.value.expected, info.value.got, info.value.hint)

# SPDX-License-Identifier: Apache-2.0
"""`kernel(mesh=)`: a launch as one object, and the warps of a warpgroup."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.refusal import refused

INTS = jax.ShapeDtypeStruct((8,), jnp.int32)
MESH = plgpu.Mesh(grid=(2,), grid_names=("g",), kernel_name="numbers")
WARPS = plgpu.WarpMesh(axis_name="warp")


def nothing(*_):
    pass


@everywhere.gives([], np.int32([0, 1]).repeat(4), mesh=MESH)
def test_a_mesh_is_the_launch(o):
    g = lax.axis_index("g")
    o[plgpu.ds(4 * g, 4)] = jnp.full((4,), g)


@pytest.mark.parametrize(
    ("options", "name"),
    [({}, "numbers"), ({"name": "mine"}, "mine"), ({"kernel_name": "old"}, "old")],
)
def test_a_mesh_names_the_kernel(options, name):
    kernel = plgpu.kernel(nothing, INTS, mesh=MESH, **options)
    (report,) = plgpu.offline.lower(kernel)
    assert report.name == name


WARP_NUMBERS = np.array([0, 1, 10, 11, 20, 21, 30, 31], np.int32)


@everywhere.gives([], WARP_NUMBERS, plgpu.Barrier())
def test_a_warp_mesh_names_the_index_of_a_warp(o, barrier):
    @plgpu.kernel(mesh=WARPS)
    def in_each_warp(o):
        warp = lax.axis_index("warp")

        @plgpu.loop(0, 2)
        def _(i):
            o[2 * warp + i] = 10 * warp + i

    in_each_warp(o)


def of(mesh, **options):
    return lambda: plgpu.kernel(nothing, mesh=mesh, **options)  # HERE


def over_warps(body, name="warp", **options):
    """A call of a kernel over warps in another kernel."""
    kernel = plgpu.kernel(body, mesh=plgpu.WarpMesh(axis_name=name))

    def body(o):
        kernel()
        lax.axis_index("warp")  # HERE

    return plgpu.kernel(body, INTS, interpret=True, **options)


MISTAKES = {
    "a grid beside a mesh": of(MESH, out_type=INTS, grid=2),
    "cluster_names beside a mesh": of(MESH, out_type=INTS, cluster_names="c"),
    "num_threads beside a mesh": of(MESH, out_type=INTS, num_threads=1),
    "results of a kernel over warps": of(WARPS, out_type=INTS),
    "the axis of warps after the kernel over it": over_warps(lambda: None),
    "two axes of one name": over_warps(lambda: None, "g", grid=2, grid_names="g"),
    "a kernel over warps that returns a value": over_warps(lambda: 1),
    "a kernel over warps outside of a kernel": lambda: of(WARPS)()(),  # HERE
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
@refused
def test_a_mesh_that_does_not_fit_is_refused(mistake):
    mistake()

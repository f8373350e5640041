# SPDX-License-Identifier: Apache-2.0
"""`kernel(mesh=)`: a launch as one object, and the warps of a warpgroup."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import everywhere

INTS = jax.ShapeDtypeStruct((8,), jnp.int32)
MESH = plgpu.Mesh(grid=(2,), grid_names=("g",), kernel_name="numbers")
WARPS = plgpu.WarpMesh(axis_name="warp")


def test_a_mesh_is_the_launch():
    def make(interpret):
        @plgpu.kernel(out_type=INTS, mesh=MESH, interpret=interpret)
        def kernel(o):
            g = lax.axis_index("g")
            o[plgpu.ds(4 * g, 4)] = jnp.full((4,), g)

        return kernel

    everywhere.check(make, [], np.repeat([0, 1], 4))


@pytest.mark.parametrize(
    ("options", "name"),
    [({}, "numbers"), ({"name": "mine"}, "mine"), ({"kernel_name": "old"}, "old")],
)
def test_a_mesh_names_the_kernel(options, name):
    kernel = plgpu.kernel(lambda o: None, INTS, mesh=MESH, **options)
    (report,) = plgpu.offline.lower(kernel)
    assert report.name == name


@pytest.mark.parametrize(
    "given", [{"grid": 2}, {"cluster_names": "c"}, {"num_threads": 1}]
)
def test_axes_are_in_the_mesh_or_beside_it(given):
    (name,) = given
    with pytest.raises(errors.ArgumentError, match=f"{name} is given beside a Mesh"):
        plgpu.kernel(lambda o: None, INTS, mesh=MESH, **given)


def test_a_warp_mesh_names_the_index_of_a_warp():
    def make(interpret):
        def body(o, barrier):
            @plgpu.kernel(mesh=WARPS)
            def in_each_warp(o):
                warp = lax.axis_index("warp")

                @plgpu.loop(0, 2)
                def _(i):
                    o[2 * warp + i] = 10 * warp + i

            in_each_warp(o)

        return plgpu.kernel(
            body, out_type=INTS, scratch_types=[plgpu.Barrier()], interpret=interpret
        )

    everywhere.check(make, [], np.arange(4).repeat(2) * 10 + np.tile([0, 1], 4))


def in_a_kernel(call, **options):
    return plgpu.kernel(lambda o: call(), INTS, interpret=True, **options)()


def test_the_axis_of_warps_ends_with_the_kernel_over_it():
    plain = plgpu.kernel(lambda: None, mesh=WARPS)

    def twice():
        plain()
        lax.axis_index("warp")

    with pytest.raises(errors.AxisNameError, match="no axis named 'warp'"):
        in_a_kernel(twice)


def test_the_axis_of_warps_has_a_name_of_its_own():
    kernel = plgpu.kernel(lambda: None, mesh=plgpu.WarpMesh(axis_name="g"))
    with pytest.raises(errors.ArgumentError, match="two axes have the same name"):
        in_a_kernel(kernel, grid=2, grid_names="g")


def test_a_kernel_over_warps_returns_nothing():
    with pytest.raises(errors.KernelError, match="the function returns a value"):
        in_a_kernel(plgpu.kernel(lambda: 1, mesh=WARPS))


def test_a_kernel_over_warps_is_called_in_a_kernel():
    with pytest.raises(errors.KernelError, match="is called outside a kernel"):
        plgpu.kernel(lambda: None, mesh=WARPS)()


def test_a_kernel_over_warps_has_no_results():
    with pytest.raises(errors.ArgumentError, match="out_type is given beside a Warp"):
        plgpu.kernel(lambda o: None, out_type=INTS, mesh=WARPS)

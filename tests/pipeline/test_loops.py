# SPDX-License-Identifier: Apache-2.0
"""nd_loop and planar_snake visit what they say, in the order upstream does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as upstream

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import everywhere
from tests.support.refusal import refused

_MOST_STEPS = 7 * 7


@pytest.mark.parametrize("shape", [(4, 5), (3, 8), (7, 7), (1, 4)])
@pytest.mark.parametrize("minor_dim", [0, 1])
@pytest.mark.parametrize("tile_width", [1, 2, 3, 8])
def test_planar_snake_walks_as_upstreams(shape, minor_dim, tile_width):
    # Arrays of one size for all shapes: JAX compiles the operations once.
    steps = jnp.arange(_MOST_STEPS) % (shape[0] * shape[1])
    ours = jax.vmap(
        lambda i: jnp.stack(plgpu.planar_snake(i, shape, minor_dim, tile_width))
    )
    theirs = jax.vmap(
        lambda i: jnp.stack(upstream.planar_snake(i, shape, minor_dim, tile_width))
    )
    np.testing.assert_array_equal(ours(steps), theirs(steps))


def visits(grid, sms, tiling=None):
    """For every point of the grid: which instance came when."""

    def body(o_ref):
        sm = lax.axis_index("sm")

        @plgpu.nd_loop(grid, collective_axes="sm", tiling=tiling)
        def _(info):
            i, j = info.index
            o_ref[i, j] = sm * 1000 + info.local_index

    def make(interpret):
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct(grid, jnp.int32),
            grid=(sms,),
            grid_names=("sm",),
            interpret=interpret,
        )

    return make


@pytest.mark.parametrize(
    "grid, sms", [((2, 3), 4), ((4, 4), 2), ((3, 5), 7), ((2, 2), 9)]
)
def test_instances_take_turns(grid, sms):
    steps = np.arange(np.prod(grid))
    expected = (steps % sms * 1000 + steps // sms).reshape(grid)
    everywhere.check(visits(grid, sms), [], expected)


def test_the_sizes_of_a_grid_may_be_values_of_the_kernel():
    def body(n_ref, o_ref):
        @plgpu.nd_loop((n_ref[0], 2), collective_axes="sm")
        def _(info):
            i, j = info.index
            o_ref[i, j] = lax.axis_index("sm") * 1000 + info.local_index

        @plgpu.when(lax.axis_index("sm") == 0)
        def _():
            o_ref[3, 0] = o_ref[3, 1] = -1

    def make(interpret):
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((4, 2), jnp.int32),
            grid=(4,),
            grid_names=("sm",),
            interpret=interpret,
        )

    expected = np.array([[0, 1000], [2000, 3000], [1, 1001], [-1, -1]])
    everywhere.check(make, [jnp.array([3])], expected)


@pytest.mark.parametrize(
    ("error", "grid", "options", "what"),
    [
        (
            errors.ArgumentError,
            lambda n: (n, 2),
            {"tiling": (1, 2)},
            "nd_loop: a tiling of a grid whose size is known at run time only",
        ),
        (
            errors.ArgumentTypeError,
            lambda n: (n * 0.5, 2),
            {},
            "nd_loop: a size of the grid is not an integer",
        ),
        (
            errors.ArgumentTypeError,
            lambda _: (2.5,),
            {},
            "nd_loop: a size of the grid is not an integer",
        ),
    ],
)
def test_sizes_of_a_grid_that_are_refused(error, grid, options, what):
    def body(n_ref, o_ref):
        sizes = grid(n_ref[0])
        plgpu.nd_loop(sizes, collective_axes="sm", **options)(print)  # HERE

    with refused(error, what):
        plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((2,), jnp.int32),
            grid=(2,),
            grid_names=("sm",),
        )(jnp.array([3]))


def test_a_tiling_is_visited_tile_by_tile():
    order = np.array([[0, 1, 4, 5], [2, 3, 6, 7]])
    everywhere.check(visits((2, 4), 1, (2, 2)), [], order)


def test_a_carry_reaches_the_last_step():
    def body(o_ref):
        @plgpu.nd_loop((2, 3), collective_axes="sm", init_carry=jnp.int32(0))
        def total(info, carry):
            return carry + info.index[0] * 10 + info.index[1]

        o_ref[lax.axis_index("sm")] = total

    def make(interpret):
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((2,), jnp.int32),
            grid=(2,),
            grid_names=("sm",),
            interpret=interpret,
        )

    everywhere.check(make, [], np.array([0 + 2 + 11, 1 + 10 + 12]))


def test_a_tiling_that_does_not_divide_is_refused():
    with pytest.raises(plgpu.errors.ArgumentError, match="does not divide the grid"):
        plgpu.nd_loop((4, 6), collective_axes="sm", tiling=(3, 3))


def test_a_plane_has_two_dimensions():
    with pytest.raises(plgpu.errors.ArgumentError, match="invalid strips"):
        plgpu.planar_snake(0, (4, 4), 2, 1)

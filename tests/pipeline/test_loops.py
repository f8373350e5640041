# SPDX-License-Identifier: Apache-2.0
"""nd_loop and planar_snake visit what they say, in the order upstream does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental.pallas import mosaic_gpu as upstream

import pallas_gpu as plgpu
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

    out = jax.ShapeDtypeStruct(grid, jnp.int32)
    return everywhere.kernel(body, out, grid={"sm": sms})


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

    expected = np.array([[0, 1000], [2000, 3000], [1, 1001], [-1, -1]], np.int32)
    everywhere.run(body, [jnp.array([3])], expected, grid={"sm": 4})


def loop(grid, **options):
    """Over a grid that depends on an argument of the kernel."""

    def body(n, o):
        plgpu.nd_loop(grid(n[0]), collective_axes="sm", **options)(print)  # HERE

    call = everywhere.kernel(body, np.zeros(2, np.int32), grid={"sm": 2})(None)
    return lambda: call(jnp.array([3]))


MISTAKES = {
    "a tiling of another rank": loop(lambda n: (n, 2), tiling=(1,)),
    "a tiling that does not divide beside a dynamic size": loop(
        lambda n: (n, 3), tiling=(1, 2)
    ),
    "a tiling that does not divide a dynamic size": loop(
        lambda n: (4, n), tiling=(2, 2)
    ),
    "a dynamic size that is no integer": loop(lambda n: (n * 0.5, 2)),
    "a size that is no integer": loop(lambda _: (2.5,)),
    "more steps than an index counts": loop(lambda _: (2**16, 2**16)),
    "a tiling that does not divide": loop(lambda _: (4, 6), tiling=(3, 3)),
    "a size of a call beyond int32": lambda: plgpu.pallas_call(  # HERE
        print, (), grid=(2**31 + 5,)
    ),
    "a plane of three dimensions": lambda: plgpu.planar_snake(0, (4, 4), 2, 1),  # HERE
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
@refused
def test_grids_that_are_refused(mistake):
    mistake()


def test_a_tiling_is_visited_tile_by_tile():
    order = np.array([[0, 1, 4, 5], [2, 3, 6, 7]])
    everywhere.check(visits((2, 4), 1, (2, 2)), [], order)


def test_a_tiling_may_divide_values_of_the_kernel():
    def body(n_ref, o_ref):
        @plgpu.nd_loop((n_ref[0], n_ref[1]), collective_axes="sm", tiling=(2, 2))
        def _(info):
            o_ref[info.index] = lax.axis_index("sm") + 2 * info.local_index

    order = np.array([[0, 1, 4, 5], [2, 3, 6, 7]], np.int32)
    everywhere.run(body, [np.array(order.shape, np.int32)], order, grid={"sm": 2})


@st.composite
def grids(draw):
    """A grid of some axes, a tiling of it or None, and a number of instances."""
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    tiling = draw(st.none() | st.tuples(*(st.integers(1, 2) for _ in counts)))
    if tiling is not None:
        counts = [n * t for n, t in zip(counts, tiling, strict=True)]
    return tuple(counts), tiling, draw(st.integers(1, 5))


@settings(max_examples=15, deadline=None)
@given(grids(), st.booleans())
def test_all_steps_of_any_grid_are_taken_in_order(grid, traced):
    """Step s is the s-th position, tile by tile, and that of instance s mod n."""
    sizes, tiling, instances = grid

    def body(n_ref, o_ref):
        axes = [n_ref[i] for i in range(len(sizes))] if traced else sizes
        sm = lax.axis_index("sm")

        @plgpu.nd_loop(axes, collective_axes="sm", tiling=tiling, init_carry=sm)
        def last(info, carry):
            # The carry is the number of this step.
            o_ref[info.index] = carry * 10 + info.local_index
            return carry + instances

    kernel = plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct(sizes, jnp.int32),
        grid=(instances,), grid_names=("sm",),
    )  # fmt: skip
    got = np.asarray(kernel(np.array(sizes, np.int32)))
    tiling = tiling or (1,) * len(sizes)
    outer = [n // t for n, t in zip(sizes, tiling, strict=True)]
    order = [
        tuple(o * t + i for o, t, i in zip(a, tiling, b, strict=True))
        for a in np.ndindex(*outer)
        for b in np.ndindex(*tiling)
    ]
    steps = range(len(order))
    assert [got[at] for at in order] == [s * 10 + s // instances for s in steps]


@pytest.mark.parametrize("grid", [(), (0,), (3, 0)])
def test_a_grid_without_steps_returns_the_initial_carry(grid):
    def body(o_ref):
        @plgpu.nd_loop(grid, collective_axes="sm", init_carry=jnp.int32(7))
        def carry(info, carry):
            return carry + 1

        o_ref[0] = carry

    # The grid without axes has one step, at ().
    expected = np.array([7 if grid else 8], np.int32)
    everywhere.run(body, [], expected, grid={"sm": 1})


def test_a_carry_reaches_the_last_step():
    def body(o_ref):
        @plgpu.nd_loop((2, 3), collective_axes="sm", init_carry=jnp.int32(0))
        def total(info, carry):
            return carry + info.index[0] * 10 + info.index[1]

        o_ref[lax.axis_index("sm")] = total

    expected = np.array([0 + 2 + 11, 1 + 10 + 12], np.int32)
    everywhere.run(body, [], expected, grid={"sm": 2})

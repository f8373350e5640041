# SPDX-License-Identifier: Apache-2.0
"""emit_pipeline: steps, buffers, carries, shared outputs, and what it refuses."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import everywhere
from tests.support.entry_kernels import f32, numbers
from tests.support.refusal import refused, refused_by

ROWS = plgpu.BlockSpec((8, 128), lambda i: (i, 0))


def pipelined(step, *, out=None, **options):
    """A kernel that is one pipeline; returns what `everywhere.check` takes."""
    specs = {"in_specs": [ROWS], "out_specs": [ROWS], "grid": (8,)} | options

    def body(*refs):
        plgpu.emit_pipeline(step, **specs)(*refs)

    return everywhere.kernel(body, f32() if out is None else out)


def double(indices, x, o):
    o[...] = x[...] * 2


def add_index(indices, x, o):
    o[...] = x[...] + indices[-1].astype(jnp.float32)


# --- steps and buffers ----------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3, 8, 11])
def test_any_number_of_buffers_gives_the_same_result(depth):
    rows = np.repeat(np.arange(8, dtype=np.float32), 8)[:, None]
    make = pipelined(add_index, max_concurrent_steps=depth)
    everywhere.check(make, [numbers()], numbers() + rows)


def test_the_last_axis_of_the_grid_runs_fastest():
    spec = plgpu.BlockSpec((8, 128), lambda i, j: (i * 2 + j, 0))
    make = pipelined(
        add_index, grid=(4, 2), in_specs=[spec], out_specs=[spec],
        max_concurrent_steps=2,
    )  # fmt: skip
    columns = np.tile(np.repeat([0.0, 1.0], 8), 4)[:, None].astype(np.float32)
    everywhere.check(make, [numbers()], numbers() + columns)


@pytest.mark.parametrize("count", [1, 3, 8])
def test_a_grid_may_have_a_size_that_is_known_at_run_time_only(count):
    def body(x, n, o):
        pipeline = plgpu.emit_pipeline(
            double, grid=(n[0],), in_specs=[ROWS], out_specs=[ROWS],
            max_concurrent_steps=4,
        )  # fmt: skip
        o[...] = jnp.zeros(o.shape, o.dtype)
        plgpu.commit_gmem()
        pipeline(x, o)

    expected = np.where(np.arange(64)[:, None] < 8 * count, numbers() * 2, 0)
    everywhere.run(body, [numbers(), np.int32([count])], expected)


@everywhere.gives([numbers()], np.full((64, 128), 7, np.float32))
def test_a_grid_without_steps_returns_the_first_carry(x, o):
    carry = plgpu.emit_pipeline(
        lambda _, x, carry: carry + 1, grid=(0,), in_specs=[ROWS],
        init_carry=jnp.int32(7),
    )(x)  # fmt: skip
    o[...] = jnp.full((64, 128), carry, jnp.float32)


@everywhere.gives([numbers()], numbers() * np.float32([1, 2]).repeat(32)[:, None])
def test_parts_of_arrays_are_pipelined_like_arrays(x, o):
    half = plgpu.ds(32, 32)
    o[plgpu.ds(0, 32)] = x[plgpu.ds(0, 32)]
    plgpu.emit_pipeline(
        double, grid=(4,), in_specs=[ROWS], out_specs=[ROWS], max_concurrent_steps=2
    )(x.at[half], o.at[half])


def test_a_block_that_no_axis_changes_is_copied_once():
    scale = plgpu.BlockSpec((8, 128), lambda i: (0, 0))

    def step(_, x, y, o):
        o[...] = x[...] * y[...]

    make = pipelined(step, in_specs=[ROWS, scale], max_concurrent_steps=2)
    factors = numbers(8, 128)
    everywhere.check(make, [numbers(), factors], numbers() * np.tile(factors, (8, 1)))
    jaxpr = str(jax.make_jaxpr(make(None))(numbers(), factors))
    # One copy of the factors; one that fills and one that refills the rows' buffers.
    assert jaxpr.count("copy_gmem_to_smem[") == 3


def test_squeezed_dimensions_are_dropped_and_gmem_is_passed_whole():
    spec = plgpu.BlockSpec((None, 128), lambda i: (i, 0))
    whole = plgpu.BlockSpec(memory_space=plgpu.GMEM)

    def step(indices, x, table, o):
        o[...] = x[...] + table[indices[0]]

    make = pipelined(
        step, grid=(64,), in_specs=[spec, whole], out_specs=[spec],
        max_concurrent_steps=3,
    )  # fmt: skip
    everywhere.check(make, [numbers(), numbers()], numbers() * 2)


def test_blocks_over_the_edge_are_zeros_and_store_what_lies_inside():
    make = pipelined(double, out=f32(60, 128), max_concurrent_steps=2)
    everywhere.check(make, [numbers(60, 128)], numbers(60, 128) * 2)


TABLE = np.array([3, 1, 0, 2, 7, 6, 4, 5], np.int32)


@everywhere.gives([numbers(), TABLE], numbers() * 2)
def test_an_index_map_reads_a_table_for_its_own_steps_only(x, table, o):
    """The blocks of inputs and outputs are in the order of a table in GMEM."""
    spec = plgpu.BlockSpec((8, 128), lambda i: (table[i], 0))
    plgpu.emit_pipeline(
        double, grid=(8,), in_specs=[spec], out_specs=[spec], max_concurrent_steps=2
    )(x, o)


@everywhere.gives([numbers(), np.zeros(1, np.int32)], numbers())
def test_an_output_of_a_grid_without_steps_keeps_its_contents(x, n, o):
    """The number of steps is known at run time only, and zero."""
    o[...] = x[...]
    plgpu.commit_gmem()
    shared = plgpu.BlockSpec((8, 128), lambda i: (0, 0))
    specs = {"in_specs": [ROWS], "out_specs": [shared]}
    plgpu.emit_pipeline(double, grid=(n[0],), **specs)(x, o)


# --- carries and shared outputs -------------------------------------------------------


SUMS = np.cumsum(numbers().reshape(8, 8, 128).sum(1), 0)


@everywhere.gives([numbers()], SUMS.repeat(8, 0))
def test_a_carry_passes_from_step_to_step(x, o):
    def step(_, x, o, carry):
        carry = carry + jnp.sum(x[...], axis=0)
        o[...] = jnp.broadcast_to(carry[None], (8, 128))
        return carry

    plgpu.emit_pipeline(
        step, grid=(8,), in_specs=[ROWS], out_specs=[ROWS],
        max_concurrent_steps=2, init_carry=jnp.zeros((128,), jnp.float32),
    )(x, o)  # fmt: skip


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_output_that_consecutive_steps_share_is_stored_when_it_is_complete(depth):
    """The output's block depends on the outer axis; the inner one accumulates."""

    def step(indices, x, o):
        @plgpu.when(indices[1] == 0)
        def _():
            o[...] = jnp.zeros(o.shape, o.dtype)

        o[...] += x[...]

    make = pipelined(
        step, grid=(2, 4), out=f32(16, 128), max_concurrent_steps=depth,
        in_specs=[plgpu.BlockSpec((8, 128), lambda i, j: (i * 4 + j, 0))],
        out_specs=[plgpu.BlockSpec((8, 128), lambda i, j: (i, 0))],
    )  # fmt: skip
    expected = numbers().reshape(2, 4, 8, 128).sum(1).reshape(16, 128)
    everywhere.check(make, [numbers()], expected)


def test_the_last_store_of_a_block_wins():
    """Every block of the output is stored twice, with other blocks in between."""

    def step(indices, x, o):
        o[...] = x[...] + indices[0].astype(jnp.float32)

    make = pipelined(
        step, grid=(2, 8), max_concurrent_steps=3,
        in_specs=[plgpu.BlockSpec((8, 128), lambda i, j: (j, 0))],
        out_specs=[plgpu.BlockSpec((8, 128), lambda i, j: (j, 0))],
    )  # fmt: skip
    everywhere.check(make, [numbers()], numbers() + 1)


RETURNING = {
    "a sum": ((4, 5), lambda i, j: i + j),
    "multiples with a gap too small": ((3, 3), lambda i, j: i * 2 + j),
    "a dependency of no effect": ((2, 8), lambda i, j: i * 0 + j),
    "overlapping elements": ((15, 1), lambda i, j: i * 4),
}


@pytest.mark.parametrize("name", RETURNING)
def test_stores_of_the_same_elements_are_ordered(name):
    """The blocks of different steps overlap, though the index depends on all axes."""
    grid, index = RETURNING[name]
    rows = plgpu.Element(8) if name == "overlapping elements" else 8
    step_of = {}
    for n, (i, j) in enumerate(np.ndindex(grid)):
        start = index(i, j) * (1 if name == "overlapping elements" else 8)
        step_of |= dict.fromkeys(range(start, start + 8), n)

    def step(indices, o):
        n = indices[0] * grid[1] + indices[1]
        o[...] = jnp.full(o.shape, n.astype(jnp.float32))

    block = plgpu.BlockSpec((rows, 128), lambda i, j: (index(i, j), 0))
    make = pipelined(
        step, grid=grid, out=f32(len(step_of), 128), max_concurrent_steps=3,
        in_specs=[], out_specs=[block],
    )  # fmt: skip
    expected = np.array([step_of[row] for row in range(len(step_of))], np.float32)
    everywhere.check(make, [], np.repeat(expected[:, None], 128, axis=1))


@pytest.mark.parametrize(
    ("index", "overlaps"),
    [
        (lambda i, j: (i, j), False),
        (lambda i, j: (i * 4 + j, 0), False),
        (lambda i, j: (j * 2 + i, 0), False),
        (lambda i, j: (15 - i * 4 - j, 0), False),
        (lambda i, j: (i * 3 + j, 0), True),
        (lambda i, j: (i + j, j), False),
        (lambda i, j: (i + j, i + j), True),
    ],
)
def test_a_store_waits_for_earlier_ones_only_where_blocks_may_overlap(index, overlaps):
    def step(indices, o):
        o[...] = jnp.zeros(o.shape, o.dtype)

    make = pipelined(
        step, grid=(2, 4), out=f32(128, 1024), max_concurrent_steps=3,
        in_specs=[], out_specs=[plgpu.BlockSpec((8, 128), index)],
    )  # fmt: skip
    (equation,) = jax.make_jaxpr(make(None))().eqns
    waits = re.findall(r"wait_smem_to_gmem\[n=(\d)", str(equation.params["jaxpr"]))
    assert waits == ["0" if overlaps else "2", "0"]


BLOCKS_SUM = numbers().reshape(8, 8, 128).sum(0)


def add_up(indices, x, o):
    """Accumulates in the block of the output, from the first index 0 on."""

    @plgpu.when(indices[0] == 0)
    def _():
        o[...] = jnp.zeros(o.shape, o.dtype)

    o[...] += x[...]


@everywhere.gives([numbers(), np.ones(1, np.int32)], BLOCKS_SUM)
def test_a_last_axis_of_one_step_at_run_time_shares_the_block_of_the_axis_before(
    x, n, o
):
    plgpu.emit_pipeline(
        add_up, grid=(8, n[0]), max_concurrent_steps=2,
        in_specs=[plgpu.BlockSpec((8, 128), lambda i, j: (i, 0))],
        out_specs=[plgpu.BlockSpec((8, 128), lambda i, j: (j, 0))],
    )(x, o)  # fmt: skip


def test_an_output_that_all_steps_share_is_stored_once():
    one = plgpu.BlockSpec((8, 128), lambda i: (0, 0))
    make = pipelined(add_up, out=BLOCKS_SUM, out_specs=[one], max_concurrent_steps=2)
    everywhere.check(make, [numbers()], BLOCKS_SUM)


TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def product(a, b, o, *, buffers=3, delay=1):
    def spec(index_map):
        return plgpu.BlockSpec(
            (64, 64), index_map, transforms=TRANSFORMS, delay_release=delay
        )

    def scoped(acc):
        def step(_, a_block, b_block):
            plgpu.wgmma(acc, a_block, b_block)
            plgpu.wgmma_wait(1)

        plgpu.emit_pipeline(
            step, grid=(4,), max_concurrent_steps=buffers,
            in_specs=[spec(lambda k: (0, k)), spec(lambda k: (k, 0))],
        )(a, b)  # fmt: skip
        o[...] = acc[...]

    plgpu.run_scoped(scoped, plgpu.ACC((64, 64)))


def test_delay_release_keeps_a_buffer_for_products_in_flight():
    rng = np.random.default_rng(0)
    a = rng.integers(-4, 5, (64, 256)).astype(np.float16)
    b = rng.integers(-4, 5, (256, 64)).astype(np.float16)
    everywhere.run(product, [a, b], a.astype(np.float32) @ b.astype(np.float32))


def test_a_buffer_released_too_early_is_a_race():
    """Without delay_release the product still reads what the next copy overwrites."""
    body = functools.partial(product, buffers=2, delay=0)
    a = np.ones((64, 256), np.float16)
    with pytest.raises(errors.RaceError) as info:
        everywhere.emulate(body, [a, a.T], f32(64, 64), detect_races=True)
    assert "delay_release=1" in info.value.hint


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_carry_may_hold_references(steps):
    a = np.random.default_rng(0).integers(-4, 5, (64, 256)).astype(np.float16)
    block = plgpu.BlockSpec((64, 64), lambda k: (0, k), transforms=TRANSFORMS)

    def body(a, o):
        def step(_, block, carry):
            acc, (count, sums) = carry
            plgpu.wgmma(acc, block, block)
            plgpu.wgmma_wait(0)
            sums[...] += jnp.ones((1, 128), jnp.float32)
            return acc, (count + 1, sums)

        def scoped(acc, sums):
            sums[...] = jnp.zeros((1, 128), jnp.float32)
            acc, (count, sums) = plgpu.emit_pipeline(
                step, grid=(steps,), in_specs=[block], max_concurrent_steps=2,
                init_carry=(acc, (jnp.int32(0), sums)),
            )(a)  # fmt: skip
            sums[...] += count.astype(jnp.float32)
            o[...] = acc[...] + sums[0, 0]

        plgpu.run_scoped(scoped, plgpu.ACC((64, 64)), plgpu.SMEM((1, 128), jnp.float32))

    blocks = a.astype(np.float32).reshape(64, 4, 64)[:, :steps]
    expected = np.einsum("ikj,jkl->il", blocks, blocks) + 2 * steps
    make = everywhere.kernel(body, f32(64, 64))
    everywhere.check(make, [a], expected)


# --- refusals -------------------------------------------------------------------------


def rows(index_map=lambda i: (i, 0), **options):
    return [plgpu.BlockSpec((8, 128), index_map, **options)]


def returning(_, x, o):  # HERE
    o[...] = x[...]
    return 1


# Options of a pipeline that doubles blocks of rows.
MISTAKES = {
    "no buffer": {"max_concurrent_steps": 0},
    "a negative number of buffers": {"max_concurrent_steps": -1},
    "a number of buffers that is no integer": {"max_concurrent_steps": 1.5},
    "a bool for a number of buffers": {"max_concurrent_steps": True},
    "no number of buffers": {"max_concurrent_steps": None},
    "a block of a cluster": {"in_specs": rows(collective_axes=("c",))},
    "a block in TMEM": {"in_specs": rows(memory_space=plgpu.TMEM)},
    "an index map of two axes": {"in_specs": rows(lambda i, j: (i, 0))},  # HERE
    "a spec too many": {"out_specs": [ROWS, ROWS]},
    "a body that returns a value": {"body": returning},
}


@pytest.mark.parametrize("options", MISTAKES.values(), ids=MISTAKES)
@refused
def test_a_pipeline_that_does_not_fit_its_arrays_is_refused(options):
    options = {"body": double, "in_specs": [ROWS], "out_specs": [ROWS]} | options
    options = {"max_concurrent_steps": 2, "grid": (8,)} | options
    body = lambda x, o: plgpu.emit_pipeline(**options)(x, o)  # noqa: E731  # HERE
    jax.eval_shape(plgpu.kernel(body, f32()), numbers())


@pytest.mark.parametrize("steps", [1, 8])
@refused
def test_a_carried_reference_stays_the_same(steps):
    def step(_, x, carry):
        return carry[::-1]

    def body(x, o, first, second):  # HERE
        plgpu.emit_pipeline(  # HERE
            step, grid=(steps,), in_specs=[ROWS], init_carry=(first, second)
        )(x)

    tile = plgpu.SMEM((8, 128), jnp.float32)
    jax.eval_shape(everywhere.kernel(body, f32(), tile, tile)(), numbers())


@refused
def test_delay_release_needs_more_buffers():
    options = {"grid": (8,), "in_specs": rows(delay_release=2)}
    plgpu.emit_pipeline(double, max_concurrent_steps=2, **options)  # HERE


@refused_by(everywhere.emulate, [numbers()], f32(), threads={"wg": 2})
def test_several_warpgroups_are_refused(x, o):
    plgpu.emit_pipeline(double, grid=(8,), in_specs=[ROWS], out_specs=[ROWS])(x, o)


def test_the_pipeline_is_one_loop_whatever_its_length():
    """The trace does not grow with the number of steps or of buffers."""

    def size(steps, depth):
        rows = plgpu.BlockSpec((8, 128), lambda i: (i, 0))
        x = jax.ShapeDtypeStruct((8 * steps, 128), jnp.float32)
        make = pipelined(
            double, out=x, grid=(steps,), in_specs=[rows], out_specs=[rows],
            max_concurrent_steps=depth,
        )  # fmt: skip
        return str(jax.make_jaxpr(make(None))(x)).count("\n")

    assert size(8, 2) == size(64, 6)


def test_positions_are_scalars_of_the_kernel():
    seen = []

    def step(indices, x, o):
        seen.append(indices)
        o[...] = x[...]

    jax.eval_shape(pipelined(step)(None), numbers())
    (((i,)),) = seen
    assert isinstance(i, jax.core.Tracer)
    assert i.dtype == jnp.int32
    assert i.shape == ()


@pytest.mark.parametrize(
    ("index_map", "compared"),
    [
        (lambda i: (2 * i + lax.axis_index("sm"), 0), False),
        (lambda i: (jnp.minimum(i, 2) + lax.axis_index("sm"), 0), True),
    ],
)
def test_an_output_is_compared_with_its_last_block_only_if_it_may_be_the_same(
    index_map, compared
):
    spec = plgpu.BlockSpec((8, 128), index_map)

    def body(o_ref):
        def step(_, o):
            o[...] = jnp.zeros((8, 128), jnp.float32)

        plgpu.emit_pipeline(step, grid=(4,), out_specs=[spec])(o_ref)

    kernel = everywhere.kernel(body, f32(), grid={"sm": 2})(None)
    assert ("ne " in str(jax.make_jaxpr(kernel)())) == compared


EFFECTS = {
    "emit_pipeline.in_specs": "test_the_last_axis_of_the_grid_runs_fastest",
    "emit_pipeline.out_specs": "test_an_output_that_all_steps_share_is_stored_once",
    "emit_pipeline.max_concurrent_steps": "test_delay_release_needs_more_buffers",
    "emit_pipeline.init_carry": "test_a_carry_passes_from_step_to_step",
}

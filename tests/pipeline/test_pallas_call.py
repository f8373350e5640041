# SPDX-License-Identifier: Apache-2.0
"""pallas_call: grids, block specs, edges, and what it refuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.entry_kernels import f32, numbers
from tests.support.refusal import refused

ROWS = plgpu.BlockSpec((32, 128), lambda i: (i, 0))


def add_one(x, o):  # HERE
    o[...] = x[...] + 1  # HERE


IN_ROWS = {"grid": 2, "in_specs": [ROWS], "out_specs": ROWS}


def check(body, args, expected, **options):
    """Compares the results of a call, which have the types of those expected."""
    got = plgpu.pallas_call(body, expected, **options)(*args)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def check_add_one(array, spec, grid, out_spec=None):
    specs = {"in_specs": [spec], "out_specs": out_spec or spec}
    check(add_one, [array], array + 1, grid=grid, **specs)


# --- what a body sees -----------------------------------------------------------------


TILED = (plgpu.TilingTransform((8, 32)),)
SWIZZLED = (*TILED, plgpu.SwizzleTransform(128))

# Of the array, then of the blocks: shape, and index map, grid, transforms.
BLOCKS = {
    "a squeezed dimension in the middle": (
        (64, 3, 128), (32, None, 128), lambda i, j: (i, j, 0), (2, 3)
    ),
    "Blocked counts blocks": (
        (64, 128), (plgpu.Blocked(32), 128), lambda i: (i, 0), 2
    ),
    "TMA cannot carry it": ((8, 3), (4, 3), lambda i: (i, 0), 2),
    "transforms": ((64, 128), (32, 128), lambda i: (i, 0), 2, SWIZZLED),
    "tiled, over the edge": (
        (50, 100), (32, 64), lambda i, j: (i, j), (2, 2), SWIZZLED
    ),
    "tiled, and TMA cannot carry it": (
        (8, 33), (8, 32), lambda i, j: (i, j), (1, 2), TILED
    ),
    "an index map with a call": (
        (64, 128), (32, 128), lambda i: (jnp.remainder(i, 2), 0), 2
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_those_of_the_index_map(name):
    shape, block, index_map, grid, *transforms = BLOCKS[name]
    spec = plgpu.BlockSpec(block, index_map, transforms=sum(transforms, ()))
    check_add_one(numbers(*shape), spec, grid)


@settings(max_examples=10)
@given(st.integers(1, 300), st.sampled_from([32, 128]))
def test_a_1d_block_over_the_edge_stores_only_what_lies_inside(n, block):
    spec = plgpu.BlockSpec((block,), lambda i: (i,))
    array = numbers(4 * n)
    check_add_one(array, spec, -(-array.size // block))


@settings(max_examples=10)
@given(st.integers(1, 70), st.integers(1, 40))
def test_a_2d_block_over_the_edge_stores_only_what_lies_inside(rows, columns):
    spec = plgpu.BlockSpec((32, 64), lambda i, j: (i, j))
    array = numbers(rows, 4 * columns)
    check_add_one(array, spec, (-(-rows // 32), -(-4 * columns // 64)))


def test_a_block_over_the_edge_holds_zeros_there():
    def body(x, o):
        o[...] = jnp.full(4, x[...].sum())

    spec = plgpu.BlockSpec((128,), lambda i: (i,))
    one = plgpu.BlockSpec((4,), lambda i: (i,))
    expected = np.float32([128, 128, 44]).repeat(4)
    ones = np.ones(300, np.float32)
    check(body, [ones], expected, grid=3, in_specs=[spec], out_specs=one)


@pytest.mark.parametrize("gone", [None, plgpu.Squeezed(), plgpu.Squeezed])
def test_a_squeezed_dimension_is_not_seen(gone):
    shapes = []

    def body(x, o):
        shapes.append((x.shape, o.shape))
        o[...] = x[...] + 1

    array = numbers(3, 64, 128)
    spec = plgpu.BlockSpec((gone, 64, 128), lambda i: (i, 0, 0))
    check(body, [array], array + 1, grid=3, in_specs=[spec], out_specs=spec)
    assert set(shapes) == {((64, 128), (64, 128))}


def test_element_counts_elements():
    shifted = plgpu.BlockSpec((plgpu.Element(32), 128), lambda i: (i * 32 - 4, 0))
    padded = np.concatenate([np.zeros((4, 128), np.float32), numbers()])
    check(add_one, [numbers()], padded[:64] + 1, **IN_ROWS | {"in_specs": [shifted]})


@pytest.mark.parametrize("spec", [None, plgpu.BlockSpec(memory_space=plgpu.GMEM)])
def test_no_spec_and_a_gmem_spec_give_the_whole_array(spec):
    def body(x, o):
        o[...] = x[plgpu.ds(plgpu.program_id(0) * 32, 32)] + 1

    check(body, [numbers()], numbers() + 1, **IN_ROWS | {"in_specs": [spec]})


@pytest.mark.parametrize("rows", [1, None, 8, 24])
@pytest.mark.parametrize("names_it", [True, False])
def test_a_block_in_gmem_is_accessed_there(rows, names_it):
    """The last of 24 rows is over the edge: the body masks what is outside."""

    def body(x, o):
        row = plgpu.program_id(0) * 24 + jnp.arange(24)
        mask = (row < 64)[:, None] if rows == 24 else None
        plgpu.store(o, plgpu.load(x, mask=mask) * 2, mask=mask)

    named, other = (plgpu.GMEM, None) if names_it else (None, plgpu.GMEM)
    spec = plgpu.BlockSpec((rows, 128), lambda i: (i, 0), memory_space=named)

    def make(interpret):
        return plgpu.pallas_call(
            body, f32(), grid=plgpu.cdiv(64, rows or 1), in_specs=[spec],
            out_specs=spec, interpret=interpret,
            compiler_params=plgpu.CompilerParams(block_memory_space=other),
        )  # fmt: skip

    everywhere.check(make, [numbers()], numbers() * 2)
    both = np.stack([numbers(), numbers() + 1])
    np.testing.assert_array_equal(jax.vmap(make(True))(both), both * 2)


def test_a_number_may_be_the_argument_of_a_grid_without_positions():
    whole = plgpu.BlockSpec(memory_space=plgpu.GMEM)
    out = jax.ShapeDtypeStruct((), jnp.float32)
    call = plgpu.pallas_call(lambda a, o: None, out, grid=(0,), in_specs=[whole],
                             out_specs=whole, input_output_aliases={0: 0})  # fmt: skip
    assert call(3.0) == 3.0


def test_a_scalar_argument_is_a_reference_without_dimensions():
    def body(x, s, o):
        o[...] = x[...] * s[...]

    for scale in (np.float32(2), 2.0):
        check(body, [numbers(), scale], numbers() * 2)


def test_program_ids_and_sizes_of_the_grid():
    def body(o):
        i, j = plgpu.program_id(0), plgpu.program_id(1)
        value = 100 * plgpu.num_programs(1) + 10 * i + j
        o[...] = jnp.full((8, 128), value, jnp.int32)

    spec = plgpu.BlockSpec((8, 128), lambda i, j: (i, j))
    expected = 300 + 10 * np.arange(2)[:, None] + np.arange(3)
    expected = expected.repeat(8, 0).repeat(128, 1).astype(np.int32)
    check(body, [], expected, grid=(2, 3), out_specs=spec)


@pytest.mark.parametrize("named", [True, False])
def test_scratch_follows_the_blocks(named):
    def body(x, o, tile):
        tile[...] = x[...]
        o[...] = tile[...] + 1

    tile = plgpu.SMEM((32, 128), jnp.float32)
    scratch = {"tile": tile} if named else [tile]
    check(body, [numbers()], numbers() + 1, scratch_shapes=scratch, **IN_ROWS)


def test_a_grid_spec_stands_for_its_parts():
    check(add_one, [numbers()], numbers() + 1, grid_spec=plgpu.GridSpec(**IN_ROWS))


def test_several_results_keep_their_structure():
    def body(x, o, p):
        o[...] = x[...] + 1
        p[...] = x[...] * 2

    expected = [numbers() + 1, numbers() * 2]
    check(body, [numbers()], expected, **IN_ROWS | {"out_specs": [ROWS, ROWS]})


@pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.float16, jnp.bfloat16, jnp.int32, jnp.int8, jnp.bool_]
)
def test_blocks_of_every_dtype_travel(dtype):
    def copy(x, o):
        o[...] = x[...]

    array = (numbers() % 2).astype(dtype)
    check(copy, [array], array, **IN_ROWS)


# --- refusals -------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -1, 1.5, "all"])
@refused
def test_a_block_has_positive_sizes(size):
    plgpu.BlockSpec((32, size))  # HERE


def test_an_error_of_an_index_map_is_its_own():
    def index_map(i):
        raise TypeError("mine")

    spec = plgpu.BlockSpec((32, 128), index_map)
    call = plgpu.pallas_call(add_one, f32(), grid=2, in_specs=[spec], out_specs=ROWS)
    with pytest.raises(TypeError, match=r"^mine"):
        call(numbers())


def rows(index_map=lambda i: (i, 0), shape=(32, 128), **options):
    return plgpu.BlockSpec(shape, index_map, **options)


def only_rows(i, j):  # HERE
    return i, 0


TILES = [plgpu.TilingTransform((8, 32))]
WHOLE = plgpu.BlockSpec((64, 128))
# What is given in place of the specs and the grid of two blocks of rows.
MISTAKES = {
    "a spec too many": {"in_specs": [ROWS, ROWS]},
    "a spec that is a shape": {"out_specs": (32, 128)},
    "a block of fewer dimensions": {"in_specs": [rows(lambda i: (i,), (32,))]},
    "an index map of two axes": {"in_specs": [rows(lambda i, j: (i, j))]},  # HERE
    "an index for one dimension": {"out_specs": rows(lambda i: i)},  # HERE
    "a tiling that does not divide": {
        "in_specs": [rows(shape=(30, 128), transforms=TILES)]
    },
    "a block in GMEM with padding": {
        "in_specs": [
            rows(shape=(plgpu.Element(32, (0, 8)), 128), memory_space=plgpu.GMEM)
        ]
    },
    "a block in TMEM": {"in_specs": [rows(memory_space=plgpu.TMEM)]},
    "a block in registers": {"in_specs": [rows(memory_space=plgpu.REGS)]},
    "unknown semantics": {
        "compiler_params": plgpu.CompilerParams(dimension_semantics=["serial"])
    },
    "a delay of all buffers": {
        "in_specs": [rows(delay_release=2)],
        "compiler_params": plgpu.CompilerParams(
            dimension_semantics=["arbitrary"], max_concurrent_steps=2
        ),
    },
    "a result of several CTAs without a spec": {"grid": (2, 3), "out_specs": None},
    "one block of several CTAs": {"grid": (2, 3), "out_specs": WHOLE},
    "rows of several CTAs": {"grid": (2, 3), "out_specs": rows(only_rows)},
}  # fmt: skip


@pytest.mark.parametrize("given", MISTAKES.values(), ids=MISTAKES)
@refused
def test_specs_that_do_not_fit_the_call_are_refused(given):
    options = {"grid": 2, "out_specs": ROWS} | given
    plgpu.pallas_call(add_one, f32(), **options)(numbers())  # HERE


@refused
def test_specs_have_the_structure_of_the_arrays():
    specs = [[ROWS, ROWS], ROWS]
    call = plgpu.pallas_call(add_one, f32(), **IN_ROWS | {"in_specs": specs})
    call(numbers(), {"p": numbers(), "q": numbers()})  # HERE


@pytest.mark.parametrize("make", [np.array, jnp.array, list], ids=["np", "jnp", "list"])
@refused
def test_an_index_map_does_not_close_over_an_array(make):
    table = make([1, 0])
    spec = rows(lambda i: (table[i], 0))  # HERE
    check(add_one, [numbers()], numbers(), **IN_ROWS | {"in_specs": [spec]})


@pytest.mark.parametrize("body", [lambda x, o: x[...], lambda x: None])  # HERE
@refused
def test_a_body_takes_its_references_and_returns_nothing(body):
    plgpu.pallas_call(body, f32())(numbers())


def test_an_index_map_closes_over_numbers():
    first, second = 1, jnp.int32(1)
    spec = plgpu.BlockSpec((32, 128), lambda i: (first - i * second, 0))
    check_add_one(numbers(), spec, grid=2)


# --- blocks of results under a parallel grid ------------------------------------------


def test_an_axis_of_size_one_needs_no_index():
    spec = plgpu.BlockSpec((32, 128), only_rows)
    check_add_one(numbers(), spec, (2, 1))
    check(add_one, [numbers()], numbers() + 1, grid=(1, 1))


def test_ctas_may_store_parts_of_a_whole_result_in_gmem():
    def body(x, o):
        i = plgpu.program_id(0)
        o[i] = x[i] * 2

    whole = plgpu.BlockSpec(memory_space=plgpu.GMEM)
    check(body, [numbers(4, 128)], 2 * numbers(4, 128), grid=4, out_specs=whole)


@refused
def test_blocks_of_an_array_with_64_bit_indices_are_refused():
    spec = plgpu.BlockSpec((1024,), lambda i: (i,))
    array = jax.ShapeDtypeStruct((2**33,), jnp.int8)

    def body(x, o):
        o[...] = x[...]

    specs = {"in_specs": [spec], "out_specs": spec}
    call = plgpu.pallas_call(body, array, grid=2**23, interpret=True, **specs)
    jax.eval_shape(call, array)

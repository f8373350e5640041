# SPDX-License-Identifier: Apache-2.0
"""Block dimensions with padding or of bounded slices, blocks outside of the array."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import everywhere
from tests.support.entry_kernels import f32, numbers
from tests.support.refusal import refused, refused_by

ROWS = plgpu.BlockSpec((8, 128), lambda i: (i, 0))


def stencil(interpret=None, semantics="parallel"):
    """Each row and its two neighbours, added."""

    def body(x, o):
        o[...] = x[0:8] + x[1:9] + x[2:10]

    padded = plgpu.BlockSpec(
        (plgpu.Element(10, padding=(1, 1)), 128), lambda i: (i * 8, 0)
    )
    return plgpu.pallas_call(
        body, f32(), grid=8, in_specs=[padded], out_specs=ROWS, interpret=interpret,
        compiler_params=plgpu.CompilerParams(dimension_semantics=(semantics,)),
    )  # fmt: skip


@pytest.mark.parametrize("semantics", ["parallel", "arbitrary"])
def test_the_padding_of_an_element_dimension_holds_zeros(semantics):
    x = np.pad(numbers(), ((1, 1), (0, 0)))
    expected = x[:-2] + x[1:-1] + x[2:]
    everywhere.check(lambda interpret: stencil(interpret, semantics), [numbers()],
                     expected)  # fmt: skip


def test_a_result_is_not_stored_to_its_padding():
    def body(x, o):
        o[...] = x[...] + 1

    padded = plgpu.BlockSpec(
        (plgpu.Element(8, padding=(0, 4)), 128), lambda i: (i * 8, 0)
    )
    call = plgpu.pallas_call(
        body, f32(28, 128), grid=4, in_specs=[ROWS], out_specs=padded
    )
    expected = numbers(32, 128)[:28] + 1
    np.testing.assert_array_equal(call(numbers(32, 128)), expected)


def test_padding_of_blocks_that_tma_cannot_copy_is_zero():
    x = numbers(8, 3) + 1

    def body(x, o):
        o[...] = x[...]

    def make(interpret):
        padded = (plgpu.Element(4, padding=(2, 2)), 3)
        return plgpu.pallas_call(
            body,
            f32(8, 4, 3),
            grid=8,
            in_specs=[plgpu.BlockSpec(padded, lambda i: (i, 0))],
            out_specs=plgpu.BlockSpec((None, 4, 3), lambda i: (i, 0, 0)),
            interpret=interpret,
        )

    wide = np.pad(x, ((2, 2), (0, 0)))
    everywhere.check(make, [x], np.stack([wide[i : i + 4] for i in range(8)]))


def ragged(interpret=None):
    """Sums of groups of rows, of different sizes."""
    starts = [0, 5, 5, 12, 16]

    def body(offsets, x, o):
        i = plgpu.program_id(0)
        row = plgpu.broadcasted_iota(jnp.int32, (8, 128), 0)
        inside = row < offsets[i + 1] - offsets[i]
        o[...] = jnp.where(inside, x[...], 0.0).sum(0).reshape(1, 128)

    def group(i, offsets):
        return plgpu.ds(offsets[i], offsets[i + 1] - offsets[i]), 0

    call = plgpu.pallas_call(
        body, f32(4, 128), interpret=interpret,
        grid_spec=plgpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(4,),
            in_specs=[plgpu.BlockSpec((plgpu.BoundedSlice(8), 128), group)],
            out_specs=plgpu.BlockSpec((1, 128), lambda i, _: (i, 0)),
        ),
    )  # fmt: skip
    return call, np.array(starts, np.int32)


def test_a_bounded_slice_starts_where_the_index_map_says():
    _, starts = ragged()
    x = numbers(16, 128)
    expected = np.stack([x[a:b].sum(0) for a, b in itertools.pairwise(starts)])
    everywhere.check(lambda interpret: ragged(interpret)[0], [starts, x], expected)


@pytest.mark.parametrize("index", [3, plgpu.ds(0, 9), plgpu.ds(0, 8, 2)])
@refused
def test_a_bounded_slice_gets_a_slice_of_its_size(index):
    def body(x, o):
        pass

    index_map = lambda i: (index, 0)  # noqa: E731  # HERE
    spec = plgpu.BlockSpec((plgpu.BoundedSlice(8), 128), index_map)
    call = plgpu.pallas_call(body, f32(), grid=8, in_specs=[spec], out_specs=ROWS)
    call(numbers())


@pytest.mark.parametrize(
    "fields",
    [
        {"block_shape": (plgpu.BoundedSlice(8), 128)},
        {"block_shape": (plgpu.Element(8, padding=(1, 0)), 128)},
        {"oob_fill_mode": plgpu.OOBFillMode.ZEROS},
        {"delay_release": 1},
        {"collective_axes": ("c",)},
    ],
)
@refused
def test_fields_without_effect_on_a_result_are_refused(fields):
    def body(x, o):  # HERE
        pass

    whole = {"block_shape": (8, 128), "index_map": lambda i: (i, 0)}
    spec = plgpu.BlockSpec(**(whole | fields))
    call = plgpu.pallas_call(body, f32(), grid=8, in_specs=[ROWS], out_specs=spec)
    call(numbers())


@pytest.mark.parametrize(
    "field",
    [{"delay_release": 1}, {"oob_fill_mode": plgpu.OOBFillMode.ZEROS},
     {"transforms": (plgpu.TilingTransform((8, 32)),)}],
    ids=lambda field: next(iter(field)),
)  # fmt: skip
@refused
def test_fields_of_blocks_have_no_effect_on_an_array_in_gmem(field):
    def body(x, o):  # HERE
        pass

    whole = plgpu.BlockSpec(memory_space=plgpu.GMEM, **field)
    call = plgpu.pallas_call(body, f32(), grid=8, in_specs=[whole], out_specs=ROWS)
    call(numbers())


def test_vmap_over_blocks_with_padding_and_bounded_slices():
    x = np.stack([numbers(), numbers() + 1])
    padded = np.pad(x, ((0, 0), (1, 1), (0, 0)))
    expected = padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]
    np.testing.assert_array_equal(jax.jit(jax.vmap(stencil()))(x), expected)
    call, starts = ragged()
    got = jax.vmap(call, in_axes=(None, 0))(starts, x[:, :16])
    for k in range(2):
        parts = [x[k, a:b].sum(0) for a, b in itertools.pairwise(starts)]
        np.testing.assert_array_equal(got[k], np.stack(parts))


@refused_by(
    lambda body: plgpu.pallas_call(
        body, f32(), grid=8, in_specs=[ROWS], out_specs=ROWS
    )(numbers(32, 128))
)
def test_a_block_entirely_outside_of_an_argument_is_found_with_a_line(x, o):
    o[...] = x[...]


def test_a_block_entirely_outside_holds_zeros_where_the_spec_says_so():
    def body(x, o):
        o[...] = x[...] + 1

    zeros = plgpu.BlockSpec(
        (8, 128), lambda i: (i, 0), oob_fill_mode=plgpu.OOBFillMode.ZEROS
    )
    call = plgpu.pallas_call(body, f32(), grid=8, in_specs=[zeros], out_specs=ROWS)
    expected = np.pad(numbers(32, 128), ((0, 32), (0, 0))) + 1
    np.testing.assert_array_equal(call(numbers(32, 128)), expected)


# --- grids ----------------------------------------------------------------------------


def add_up(x, o):
    @plgpu.when(plgpu.program_id(0) == 0)
    def _():
        o[...] = jnp.zeros(o.shape, o.dtype)

    o[...] += x[...] * jnp.float32(plgpu.num_programs(0))


def over(size, interpret=None):
    return plgpu.pallas_call(
        add_up, f32(8, 128), grid=(size,), in_specs=[ROWS], interpret=interpret,
        out_specs=plgpu.BlockSpec((8, 128), lambda i: (0, 0)),
        compiler_params=plgpu.CompilerParams(
            dimension_semantics=("arbitrary",), max_concurrent_steps=2
        ),
    )  # fmt: skip


def test_the_size_of_a_sequential_axis_may_be_traced():
    def make(interpret):
        return lambda n, x: over(n, interpret)(x)

    expected = numbers().reshape(8, 8, 128)[:5].sum(0) * 5
    everywhere.check(lambda i: jax.jit(make(i)), [np.int32(5), numbers()], expected)


def test_vmap_over_the_size_of_a_sequential_axis():
    call = jax.vmap(lambda n, x: over(n)(x), in_axes=(0, None))
    got = call(jnp.array([2, 8]), numbers())
    for n, result in zip((2, 8), got, strict=True):
        expected = numbers().reshape(8, 8, 128)[:n].sum(0) * n
        np.testing.assert_array_equal(result, expected)


def test_the_size_of_a_parallel_axis_is_static():
    def body(x, o):  # HERE
        pass

    def call(n, x):
        return plgpu.pallas_call(
            body, f32(), grid=n, in_specs=[ROWS], out_specs=ROWS
        )(x)  # fmt: skip

    with pytest.raises(errors.UnsupportedError, match="parallel grid axis") as caught:
        jax.jit(call)(8, numbers())
    assert "'arbitrary'" in caught.value.hint


@pytest.mark.parametrize("grid", [(), 1, (1,), [1, 1]])
def test_a_grid_may_have_any_number_of_axes(grid):
    def body(x, o):
        o[...] = x[...] + 1

    got = plgpu.pallas_call(body, f32(), grid=grid)(numbers())
    np.testing.assert_array_equal(got, numbers() + 1)


@pytest.mark.parametrize("semantics", ["parallel", "arbitrary"])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_a_grid_without_positions_launches_nothing(semantics, transform):
    def body(x, o):
        o[...] = x[...]

    call = plgpu.pallas_call(
        body, f32(), grid=(0,), in_specs=[ROWS], out_specs=ROWS,
        compiler_params=plgpu.CompilerParams(dimension_semantics=(semantics,)),
    )  # fmt: skip
    np.testing.assert_array_equal(transform(call)(numbers()), np.zeros((64, 128)))


def test_the_body_over_a_grid_without_positions_is_checked():
    def body(x, o):
        return x[...]

    call = plgpu.pallas_call(body, f32(), grid=0, in_specs=[ROWS], out_specs=ROWS)
    with pytest.raises(errors.KernelError, match="the body returns a value"):
        call(numbers())


def test_arrays_without_elements_are_no_work():
    def body(x, o):
        o[...] = x[...]

    call = plgpu.pallas_call(body, f32(0, 128), grid=0, in_specs=[ROWS],
                             out_specs=ROWS)  # fmt: skip
    assert call(numbers(0, 128)).shape == (0, 128)


@pytest.mark.parametrize(("grid", "text"), [(-1, "negative"), (1.5, "not an integer")])
def test_sizes_of_a_grid_are_integers(grid, text):
    with pytest.raises(errors.ArgumentError if grid == -1 else errors.ArgumentTypeError,
                       match=text):  # fmt: skip
        plgpu.pallas_call(lambda x, o: None, f32(), grid=grid)

# SPDX-License-Identifier: Apache-2.0
"""Block dimensions with padding or of bounded slices, blocks outside of the array."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from tests.support import effects as see
from tests.support import everywhere
from tests.support import public_calls as calls
from tests.support.entry_kernels import f32, numbers
from tests.support.refusal import refused, refused_by

ROWS = plgpu.BlockSpec((8, 128), lambda i: (i, 0))


def add_one(x, o):  # HERE
    o[...] = x[...] + 1


def called(body=add_one, out=None, *, inside=ROWS, result=ROWS, grid=8, **options):
    """A call with one argument."""
    out = f32() if out is None else out
    options |= {"in_specs": [inside], "out_specs": result}
    return plgpu.pallas_call(body, out, grid=grid, **options)  # HERE


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
    rows = plgpu.Element(8, padding=(0, 4))
    padded = plgpu.BlockSpec((rows, 128), lambda i: (i * 8, 0))
    got = called(out=f32(28, 128), grid=4, result=padded)(numbers(32, 128))
    np.testing.assert_array_equal(got, numbers(32, 128)[:28] + 1)


def test_padding_of_blocks_that_tma_cannot_copy_is_zero():
    x = numbers(8, 3) + 1
    padded = (plgpu.Element(4, padding=(2, 2)), 3)
    specs = {
        "inside": plgpu.BlockSpec(padded, lambda i: (i, 0)),
        "result": plgpu.BlockSpec((None, 4, 3), lambda i: (i, 0, 0)),
    }
    wide = np.pad(x, ((2, 2), (0, 0)))
    expected = np.stack([wide[i : i + 4] for i in range(8)]) + 1
    make = lambda interpret: called(out=expected, interpret=interpret, **specs)  # noqa: E731
    everywhere.check(make, [x], expected)


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
    index_map = lambda i: (index, 0)  # noqa: E731  # HERE
    spec = plgpu.BlockSpec((plgpu.BoundedSlice(8), 128), index_map)
    called(inside=spec)(numbers())


ZEROS = {"oob_fill_mode": plgpu.OOBFillMode.ZEROS}
FIELDS = {
    "a bounded slice of a result": {"block_shape": (plgpu.BoundedSlice(8), 128)},
    "padding of a result": {"block_shape": (plgpu.Element(8, padding=(1, 0)), 128)},
    "a fill mode of a result": ZEROS,
    "a delay of a result": {"delay_release": 1},
    "a cluster of a result": {"collective_axes": ("c",)},
    "a delay in GMEM": {"delay_release": 1},
    "a fill mode in GMEM": ZEROS,
    "transforms in GMEM": {"transforms": (plgpu.TilingTransform((8, 32)),)},
}


@pytest.mark.parametrize("name", FIELDS)
@refused
def test_fields_without_effect_on_a_result_or_in_gmem_are_refused(name):
    if name.endswith("GMEM"):
        spec = plgpu.BlockSpec(memory_space=plgpu.GMEM, **FIELDS[name])
        called(inside=spec)(numbers())
    fields = {"block_shape": (8, 128), "index_map": lambda i: (i, 0)} | FIELDS[name]
    called(result=plgpu.BlockSpec(**fields))(numbers())


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


@refused
def test_a_block_entirely_outside_of_an_argument_is_found_with_a_line():
    called()(numbers(32, 128))


def test_a_block_entirely_outside_holds_zeros_where_the_spec_says_so():
    zeros = plgpu.BlockSpec((8, 128), lambda i: (i, 0), **ZEROS)
    expected = np.pad(numbers(32, 128), ((0, 32), (0, 0))) + 1
    np.testing.assert_array_equal(called(inside=zeros)(numbers(32, 128)), expected)


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


@refused
def test_the_size_of_a_parallel_axis_is_static():
    jax.jit(lambda n, x: called(grid=n)(x))(8, numbers())


@pytest.mark.parametrize("grid", [(), 1, (1,), [1, 1]])
def test_a_grid_may_have_any_number_of_axes(grid):
    got = plgpu.pallas_call(add_one, f32(), grid=grid)(numbers())
    np.testing.assert_array_equal(got, numbers() + 1)


@pytest.mark.parametrize("semantics", ["parallel", "arbitrary"])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_a_grid_without_positions_launches_nothing(semantics, transform):
    params = plgpu.CompilerParams(dimension_semantics=(semantics,))
    call = called(grid=(0,), compiler_params=params)
    np.testing.assert_array_equal(transform(call)(numbers()), np.zeros((64, 128)))


@refused_by(lambda body: called(body, grid=0)(numbers()))
def test_the_body_over_a_grid_without_positions_is_checked(x, o):
    return x[...]


def test_arrays_without_elements_are_no_work():
    assert called(out=f32(0, 128), grid=0)(numbers(0, 128)).shape == (0, 128)


@pytest.mark.parametrize("grid", [-1, 1.5])
@refused
def test_sizes_of_a_grid_are_integers(grid):
    called(grid=grid)


CALL = functools.partial(plgpu.pallas_call, see.exp, calls.OUT)


def block(*shape, **fields):
    """A block spec whose index map counts the first dimension."""
    return plgpu.BlockSpec(shape, lambda i: (i, 0), **fields)


def over_the_edge(mode):
    """A block over the array's edge, in the emulator."""
    spec = block(48, 128, oob_fill_mode=mode)
    params = plgpu.InterpretParams(partial_results=True)
    k = plgpu.pallas_call(
        calls.nothing, calls.OUT, grid=2, in_specs=[spec], out_specs=see.WHOLE,
        interpret=params,
    )  # fmt: skip
    return see.outcome(lambda: k(numbers()).shape)


EFFECTS = {
    "pallas_call.grid_spec": lambda: see.grid_specs({"grid": 1}, {"grid": 2}),
    "pallas_call.grid": lambda: see.block_calls({"grid": 1}, {"grid": 2}),
    "pallas_call.in_specs": lambda: see.specs(ROWS, block(16, 128)),
    "pallas_call.out_specs": lambda: see.block_calls(
        *({"grid": 2, "out_specs": spec} for spec in (ROWS, block(16, 128)))
    ),
    "pallas_call.scratch_shapes": lambda: see.block_calls(
        *({"scratch_shapes": [plgpu.SMEM((n, 128), jnp.float32)]} for n in (64, 8)),
        body=lambda *_: None,
    ),
    "pallas_call.input_output_aliases": "tests/pipeline/test_aliases.py::"
    "test_what_the_body_does_not_store_keeps_its_value",
    "pallas_call.num_threads": "tests/pipeline/test_num_threads.py::"
    "test_the_memory_warpgroup_is_added_for_a_sequential_axis_and_keeps_few_registers",
    "pallas_call.thread_name": "tests/pipeline/test_num_threads.py::"
    "test_all_warpgroups_run_the_body_at_each_step",
    "pallas_call.debug": lambda: see.printed(CALL),
    "pallas_call.interpret": lambda: see.interpreted(CALL),
    "pallas_call.name": lambda: see.block_calls({"name": "a"}, {"name": "b"}),
    "pallas_call.compiler_params": lambda: see.block_calls(
        {}, see.params(approx_math=True), body=see.exp
    ),
    "BlockSpec.block_shape": lambda: see.specs(block(8, 128), block(16, 128)),
    "BlockSpec.index_map": lambda: see.specs(plgpu.BlockSpec((8, 128)), ROWS),
    "BlockSpec.transforms": lambda: see.specs(
        ROWS, block(8, 128, transforms=(plgpu.TilingTransform((8, 32)),))
    ),
    "BlockSpec.delay_release": "tests/pipeline/test_emit_pipeline.py::"
    "test_delay_release_keeps_a_buffer_for_products_in_flight",
    "BlockSpec.collective_axes": "tests/pipeline/test_warp_specialized.py::"
    "test_a_cluster_shares_a_block_by_multicast",
    "BlockSpec.oob_fill_mode": lambda: [
        over_the_edge(plgpu.OOBFillMode.ZEROS),
        over_the_edge(plgpu.OOBFillMode.PROMISE_IN_BOUNDS),
    ],
    "BlockSpec.memory_space": lambda: see.specs(
        ROWS, block(8, 128, memory_space=plgpu.GMEM)
    ),
    "GridSpec.grid": lambda: see.grid_specs({"grid": 1}, {"grid": 8}),
    "GridSpec.in_specs": lambda: see.grid_specs(
        {"grid": 8}, {"grid": 8, "in_specs": [ROWS]}
    ),
    "GridSpec.out_specs": lambda: see.grid_specs(
        {"grid": 8}, {"grid": 8, "out_specs": ROWS}
    ),
    "GridSpec.scratch_shapes": lambda: see.grid_specs(
        {}, {"scratch_shapes": [plgpu.Barrier()]}
    ),
    **{
        f"PrefetchScalarGridSpec.{field}": "tests/pipeline/test_scalar_prefetch.py"
        for field in ("grid", "in_specs", "out_specs", "scratch_shapes")
    },
    "Element.padding": "",
}

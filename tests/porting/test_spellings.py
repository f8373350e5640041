# SPDX-License-Identifier: Apache-2.0
"""Upstream's spellings mean the same here; their values equal upstream's."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import everywhere

F16, F32, I32 = jnp.float16, jnp.float32, jnp.int32
X = np.arange(64 * 128, dtype=np.float32).reshape(64, 128)
OUT = jax.ShapeDtypeStruct((64, 128), F32)
TILE = plgpu.SMEM((64, 128), F32)


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("align_to", [(5, 4), (8, 4), (0, 4), (7, 1)]),
        ("cdiv", [(5, 4), (8, 4), (0, 4)]),
        ("next_power_of_2", [(0,), (1,), (5,), (8,), (2**40 + 1,)]),
        ("strides_from_shape", [((),), ((3,),), ((2, 3, 4),)]),
    ],
)
def test_integers_are_those_of_upstream(name, calls):
    for arguments in calls:
        assert getattr(plgpu, name)(*arguments) == getattr(pl, name)(*arguments)


@pytest.mark.parametrize("arguments", [(None,), (3,), (1, 2), (1, 2, 3)])
def test_dslice_is_ds(arguments):
    assert plgpu.dslice(*arguments) == pl.dslice(*arguments)
    assert plgpu.Slice is pl.Slice


def test_slices_transposes_and_promised_multiples_select_parts():
    index = np.array([8], np.int32)

    def body(x, index, o, t):
        start = plgpu.multiple_of(index[0], 8)
        o[...] = x[plgpu.Slice(start, 8), plgpu.dslice(128)]
        t[...] = plgpu.transpose_ref(x.at[0:64, 0:64], (1, 0))[...]

    everywhere.run(body, [X, index], [X[8:16], X[:, :64].T])


def test_a_promise_is_checked_by_the_emulator():
    def body(index, o):
        o[...] = jnp.full((64, 128), plgpu.multiple_of(index[0], (2, 3)), F32)

    kernel = plgpu.kernel(body, out_type=OUT, interpret=True)
    assert kernel(jnp.array([12]))[0, 0] == 12
    with pytest.raises(ValueError, match="multiple_of: the value is not a multiple"):
        kernel(jnp.array([8]))


@pytest.mark.parametrize(("x", "fits"), [(12, True), (9, False)])
def test_a_promise_of_a_static_index_is_checked_when_traced(x, fits):
    if fits:
        assert plgpu.multiple_of(x, 4) == x
        return
    with pytest.raises(errors.ArgumentError, match="not a multiple"):
        plgpu.multiple_of(x, 4)


def lowered(index):
    """The module of a kernel that reads a part of an array from an index."""

    def body(start, x, o):
        o[...] = x[plgpu.ds(index(start[0]), 512)]

    out = jax.ShapeDtypeStruct((512,), F32)
    types = jax.ShapeDtypeStruct((1,), I32), jax.ShapeDtypeStruct((4096,), F32)
    (report,) = plgpu.offline.lower(plgpu.kernel(body, out_type=out), *types)
    return report.mlir


def test_accesses_are_wider_from_a_promised_multiple():
    wide = "llvm.load %[0-9]+ : !llvm.ptr -> vector<4xf32>"
    assert re.search(wide, lowered(lambda start: plgpu.multiple_of(start, 8)))
    assert not re.search(wide, lowered(lambda start: start))


@everywhere.gives([X], X)
def test_scratch_around_a_function_follows_its_arguments(x, o):
    @plgpu.with_scoped(TILE, barrier=plgpu.Barrier())
    def copied(x, tile, barrier):
        plgpu.copy_gmem_to_smem(x, tile, barrier)
        plgpu.barrier_wait(barrier)
        return tile[...]

    o[...] = copied(x)


def test_a_space_declares_an_array_like_another():
    assert plgpu.SMEM.like(X) == TILE
    assert plgpu.MemorySpace.SMEM.like(OUT) == TILE
    with pytest.raises(TypeError, match=r"SMEM.like: shape_dtype_like is not an array"):
        plgpu.SMEM.like(3)


@pytest.mark.parametrize("shape", [1, (1,), (1, 1), ()])
def test_an_array_of_one_barrier_needs_no_index(shape):
    def body(x, o, tile, barrier, arrived):
        plgpu.copy_gmem_to_smem(x, tile, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.barrier_arrive(arrived)
        plgpu.barrier_wait(arrived.at[0:1] if arrived.ndim else arrived)
        o[...] = tile[...]

    barrier = plgpu.Barrier(num_barriers=shape)
    everywhere.run(body, [X], X, TILE, barrier, barrier)


def test_accumulators_have_upstreams_older_names():
    assert plgpu.WGMMAAccumulatorRef is plgpu.ACC
    assert plgpu.wgmma_accumulator_deref is plgpu.wgmma_accumulator_load


def test_block_specs_have_upstreams_names_of_constants():
    def body(x, whole, scale, o):
        assert (x.shape, whole.shape, scale.shape) == ((128,), (64, 128), (64, 128))
        o[...] = x[...] + whole[0] + scale[1]

    row = plgpu.BlockSpec((plgpu.squeezed, 128), lambda i: (i, 0))
    call = plgpu.pallas_call(
        body,
        out_shape=OUT,
        grid=(64,),
        in_specs=[row, plgpu.no_block_spec, plgpu.BlockSpec(memory_space=plgpu.ANY)],
        out_specs=row,
        interpret=True,
    )
    np.testing.assert_array_equal(call(X, X, X), X + X[0] + X[1])


def test_empty_arrays_have_the_shapes_and_types_asked_for():
    like = {"a": OUT, "b": jnp.zeros((3,), I32)}
    for made in (plgpu.empty_like(like), plgpu.empty_ref_like(like)):
        assert jax.tree.map(lambda x: (x.shape, x.dtype.name), made) == {
            "a": ((64, 128), "float32"),
            "b": ((3,), "int32"),
        }
    assert plgpu.empty((0, 4), F16).shape == (0, 4)
    assert isinstance(plgpu.empty_ref_like(OUT), jax.Ref)


# --- launches -------------------------------------------------------------------------


def first_row(x, *outs):
    for out in outs:
        out[0] = x[0]


@pytest.mark.parametrize(
    "out_type",
    [OUT, (OUT,), [OUT, OUT], (OUT, OUT), [], {"a": OUT, "b": OUT}, [(OUT, OUT), OUT]],
)
def test_results_come_in_the_container_of_their_types(out_type):
    seen = []

    def body(x, *outs):
        seen.append([jax.tree.structure(out) for out in outs])

    make = [m.kernel(body, out_type=out_type) for m in (mosaic_gpu, plgpu)]
    theirs, ours = (jax.eval_shape(kernel, OUT) for kernel in make)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("grid", [(0,), (3, 0)])
def test_an_empty_grid_launches_nothing(grid, jit):
    names = ("i", "j")[: len(grid)]

    def body(x, o):
        o[...] = x[...] * jax.lax.axis_index("i")

    kernel = plgpu.kernel(body, out_type=[OUT], grid=grid, grid_names=names)
    (result,) = (jax.jit(kernel) if jit else kernel)(X)
    np.testing.assert_array_equal(result, np.zeros_like(X))
    assert "pallas_gpu_kernel" not in str(jax.make_jaxpr(kernel)(X))


def test_an_empty_grid_hides_no_mistake():
    kernel = plgpu.kernel(lambda x, o: x[64], out_type=OUT, grid=0, grid_names="i")
    with pytest.raises(errors.OutOfBoundsError):
        kernel(X)


def test_an_empty_grid_leaves_references_as_they_are():
    ref = jax.new_ref(jnp.asarray(X))

    def body(x):
        x[...] = x[...] + 1

    plgpu.kernel(body, out_type=(), grid=0, grid_names="i")(ref)
    np.testing.assert_array_equal(ref[...], X)


def test_empty_arrays_are_arguments_and_results():
    none = jax.ShapeDtypeStruct((0, 8), F32)

    def body(x, empty, o, nothing):
        assert empty.shape == nothing.shape == (0, 8)
        o[...] = x[...]

    kernel = plgpu.kernel(body, out_type=[OUT, none], interpret=True)
    o, nothing = kernel(X, np.zeros((0, 8), np.float32))
    np.testing.assert_array_equal(o, X)
    assert nothing.shape == (0, 8)
    assert plgpu.kernel(body, out_type=none)(X).shape == (0, 8)

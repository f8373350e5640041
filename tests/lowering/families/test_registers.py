# SPDX-License-Identifier: Apache-2.0
"""Loads, stores, layouts, reductions and broadcasts, against NumPy."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.refusal import refused
from tests.support.semantics import BOTH, Lane, Warpgroup, under

pytestmark = pytest.mark.smoke

RNG = np.random.default_rng(0)
SHAPE = (64, 128)
X = RNG.standard_normal(SHAPE).astype(np.float32)
WGMMA, WGMMA_8BIT = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA_8BIT
LAYOUTS = [None, WGMMA]


def tiled(dtype, swizzle=128):
    if swizzle is None:
        return ()
    columns = swizzle * 8 // (jnp.dtype(dtype).itemsize * 8)
    return (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle))


def make_kernel(body, out_shape, dtype=jnp.float32, **options):
    return everywhere.kernel(body, jax.ShapeDtypeStruct(out_shape, dtype), **options)


def loaded(ref, layout=WGMMA):
    return plgpu.load(ref, layout=layout, optimized=False)


@pytest.mark.parametrize("swizzle", [128, 64, 32, None])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.int32])
def test_a_tile_survives_the_way_through_smem(dtype, swizzle):
    """x -> SMEM by TMA -> registers -> SMEM -> GMEM by TMA."""
    x = (X * 10).astype(dtype)
    layout = None
    if swizzle is not None:
        layout = WGMMA_8BIT if dtype == jnp.int8 else WGMMA

    def body(x_ref, o_ref, a, b, barrier):
        plgpu.copy_gmem_to_smem(x_ref, a, barrier)
        plgpu.barrier_wait(barrier)
        b[...] = plgpu.load(a, layout=layout)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(b, o_ref)
        plgpu.wait_smem_to_gmem(0)

    tile = plgpu.SMEM(SHAPE, dtype, transforms=tiled(dtype, swizzle))
    everywhere.run(body, [x], x, tile, tile, plgpu.Barrier())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_a_transposed_reference_reads_transposed(dtype):
    x = jnp.asarray(RNG.standard_normal((64, 64)), dtype)

    def body(x_ref, o_ref, a, barrier):
        plgpu.copy_gmem_to_smem(x_ref, a, barrier)
        plgpu.barrier_wait(barrier)
        o_ref[...] = plgpu.load(a.T, layout=WGMMA, optimized=False)

    tile = plgpu.SMEM((64, 64), dtype, transforms=tiled(dtype))
    everywhere.run(body, [x], x.T, tile, plgpu.Barrier())


BYTES = ["int8", "uint8", "float8_e4m3fn", "float8_e5m2"]


def transposing(dtype, layout):
    """x, transposed by threads twice: by a load, and by a store to another array."""

    def body(x, transposed, again, a, b, barrier):
        plgpu.copy_gmem_to_smem(x, a, barrier)
        plgpu.barrier_wait(barrier)
        value = plgpu.load(a.T, layout=layout, optimized=False)
        transposed[...] = value
        plgpu.store(b.T, (), value, optimized=False)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(b, again)
        plgpu.wait_smem_to_gmem(0)

    tile = plgpu.SMEM((128, 128), dtype, transforms=tiled(dtype))
    scratch = (tile, tile, plgpu.Barrier())
    result = jax.ShapeDtypeStruct((128, 128), dtype)
    return lambda target: everywhere.kernel(
        body, (result, result), *scratch, target=target
    )


@pytest.mark.parametrize("layout", ["WGMMA_8BIT", "WGMMA", "TCGEN05"])
@pytest.mark.parametrize("dtype", BYTES)
def test_bytes_are_transposed_on_blackwell(dtype, layout):
    x = np.random.default_rng(0).integers(-8, 8, (128, 128)).astype(dtype)
    make = transposing(dtype, getattr(plgpu.Layout, layout))("sm_100a")
    everywhere.check(make, [x], (x.T, x), on_gpu=False)


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (
            "sm_100a",
            {
                "ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8": 8,
                "stmatrix.sync.aligned.m16n8.x4.trans.shared.b8": 8,
            },
        ),
        ("sm_90a", {"ld.shared.b8": 128, "st.shared.b8": 128}),
    ],
)
def test_instructions_that_transpose_bytes(target, expected, semantics):
    """128 elements of each thread, 16 for each of the matrix instructions."""
    x = jax.ShapeDtypeStruct((128, 128), jnp.float8_e4m3fn)
    make = transposing(x.dtype, WGMMA_8BIT)(target)
    (report,) = plgpu.offline.compile(under(semantics, make(None)), x, target=target)
    pattern = r"\b(?:ldmatrix|stmatrix|ld\.shared|st\.shared)[.\w]*b8\b"
    assert dict(Counter(re.findall(pattern, report.ptx))) == expected
    assert report.resources.spill_store_bytes == 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("op", [jnp.sum, jnp.max, jnp.min])
def test_a_reduction_over_one_axis(op, axis, layout):
    def body(x_ref, o_ref):
        x = loaded(x_ref, layout)
        o_ref[...] = jnp.broadcast_to(op(x, axis=axis, keepdims=True), SHAPE) + 0 * x

    expected = np.broadcast_to(op(X, axis=axis, keepdims=True), SHAPE)
    everywhere.run(body, [X], expected, atol=3e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", [jnp.sum, jnp.max])
def test_a_full_reduction_gives_a_scalar(op, layout):
    def body(x_ref, o_ref):
        o_ref[...] = jnp.broadcast_to(op(loaded(x_ref, layout)), SHAPE)

    expected = np.full(SHAPE, op(X))
    everywhere.run(body, [X], expected, atol=2e-4)


def test_row_vectors_are_stored_and_loaded():
    def body(x_ref, rows_ref, scaled_ref):
        x = loaded(x_ref)
        rows_ref[...] = x.sum(axis=1)
        row = plgpu.load(rows_ref, layout=WGMMA.reduce(1), optimized=False)
        scaled_ref[...] = x * row[:, None]

    sums = np.asarray(X).sum(1)
    expected = (sums, np.asarray(X) * sums[:, None])
    everywhere.run(body, [X], expected, atol=2e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32])
@pytest.mark.parametrize("dimension", [0, 1])
def test_iota_counts_along_its_dimension(dimension, dtype, layout):
    def body(o_ref):
        o_ref[...] = plgpu.broadcasted_iota(dtype, SHAPE, dimension, layout=layout)

    expected = lax.broadcasted_iota(dtype, SHAPE, dimension)
    everywhere.run(body, [], expected)


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8, jnp.uint32])
def test_an_index_of_any_type_names_its_row(dtype):
    """200 in eight bits, whose first is set, is no negative number."""
    x = jnp.arange(256 * 128, dtype=jnp.float32).reshape(256, 128)
    row = 100 if dtype == jnp.int8 else 200

    def body(x_ref, o_ref):
        def copied(i, _):
            o_ref[i] = x_ref[dtype(row) + i.astype(dtype)]

        lax.fori_loop(0, 4, copied, None)
        o_ref[4] = x_ref[dtype(row)]

    expected = jnp.concatenate([x[row : row + 4], x[row : row + 1]])
    everywhere.run(body, [x], expected)


@everywhere.gives([X], lambda x: np.asarray(x)[16:48, :64], grid={"i": 2})
def test_parts_of_references_nest(x_ref, o_ref):
    i = lax.axis_index("i")
    part = x_ref.at[plgpu.ds(16, 32)].at[plgpu.ds(i * 16, 16), 0:64]
    o_ref[plgpu.ds(i * 16, 16)] = part[...]


@refused
def test_mixed_layouts_are_an_error_that_names_both_under_lane():
    def body(x_ref, o_ref):
        strided = plgpu.load(x_ref, layout=plgpu.Layout.WG_STRIDED(SHAPE, vec_size=1))
        o_ref[...] = strided + loaded(x_ref)  # HERE

    everywhere.run(body, [X], X + X, semantics=[Warpgroup])
    plgpu.offline.lower(under(Lane, make_kernel(body, SHAPE)(None)), X)


STRIDED = plgpu.Layout.WG_STRIDED(SHAPE, vec_size=4)


def cast_kernel(layout, dtype, **params):
    """A kernel whose array is loaded in WGMMA layout, cast, and takes part in a sum."""

    def body(x_ref, o_ref):
        x = loaded(x_ref)
        other = loaded(x_ref, layout)
        o_ref[...] = plgpu.layout_cast(x, layout) + other

    options = plgpu.CompilerParams(**params)
    return make_kernel(body, SHAPE, dtype, compiler_params=options)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.int8])
@pytest.mark.parametrize("layout", [plgpu.Layout.WGMMA_TRANSPOSED, STRIDED])
def test_a_layout_cast_moves_data_between_threads(layout, dtype):
    x = (X * 10).astype(dtype)
    everywhere.check(cast_kernel(layout, dtype), [x], x + x)


def test_bools_and_rows_are_cast_to_other_layouts():
    x = jnp.concatenate([X, -X])
    strided = plgpu.Layout.WG_STRIDED(x.shape, vec_size=4)

    def body(x_ref, o_ref):
        x = loaded(x_ref)
        positive = plgpu.layout_cast(x > 0, strided)
        positive = plgpu.layout_cast(positive, WGMMA)
        sums = plgpu.layout_cast(x.sum(axis=1), plgpu.Layout.TCGEN05_ROW)
        sums = plgpu.layout_cast(sums, plgpu.Layout.WGMMA_ROW)
        o_ref[...] = jnp.where(positive, 1.0, 0.0) * sums[:, None]

    expected = np.where(x > 0, np.float32(1), 0) * np.asarray(x).sum(1)[:, None]
    everywhere.run(body, [x], expected, atol=2e-4)


@pytest.mark.parametrize("semantics", BOTH)
def test_a_layout_cast_without_scratch_says_how_much_it_takes(semantics):
    make = cast_kernel(STRIDED, jnp.float32, reduction_scratch_bytes=0)
    errors = plgpu.errors.OutOfResources, plgpu.errors.LayoutError
    with pytest.raises(errors) as info:
        plgpu.offline.lower(under(semantics, make(None)), X)
    text = str(info.value)
    needed = int(re.search(r"reduction_scratch_bytes=(\d+)", text)[1])
    assert "test_registers.py" in text
    enough = cast_kernel(STRIDED, jnp.float32, reduction_scratch_bytes=needed)
    plgpu.offline.lower(under(semantics, enough(None)), X)


def test_default_layouts_of_different_types_meet():
    def body(x_ref, h_ref, i_ref, o_ref):
        o_ref[...] = x_ref[...] + h_ref[...] + i_ref[...].astype(jnp.float32)

    half = X.astype(jnp.float16)
    small = jnp.asarray(RNG.integers(-9, 9, SHAPE), jnp.int8)
    expected = np.asarray(X) + np.asarray(half, np.float32) + np.asarray(small)
    everywhere.run(body, [X, half, small], expected, atol=1e-5)


@everywhere.gives([X], lambda x: np.asarray(x)[:, :64] + np.asarray(x)[:, 64:])
def test_slices_and_transposes_of_register_arrays(x_ref, o_ref):
    x = loaded(x_ref)
    o_ref[...] = x[:, :64] + x[:, 64:]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("op", [jnp.max, jnp.min])
@pytest.mark.parametrize("columns", [512, 500])
def test_an_extremum_of_converted_numbers_is_found_before_the_conversion(
    op, columns, dtype
):
    rng = np.random.default_rng(columns)
    x = rng.standard_normal((8, columns))
    special = (np.nan, np.inf, -np.inf, 6e4, -6e4, 1e-7, -1e-7)
    for row, value in enumerate(special):
        x[row, rng.integers(columns)] = value
    x = jnp.asarray(x, dtype)

    def body(x_ref, o_ref):
        x = x_ref[...].astype(jnp.float32)
        o_ref[...] = x - op(x, axis=1, keepdims=True)

    wide = np.asarray(x, np.float32)
    with np.errstate(invalid="ignore"):
        # NumPy's: XLA's on a CPU loses a NaN.
        expected = wide - getattr(np, op.__name__)(wide, axis=1, keepdims=True)
    make = make_kernel(body, x.shape)
    everywhere.check(make, [x], expected)
    (report,) = plgpu.offline.lower(under(Warpgroup, make(None)), x)
    name = {jnp.bfloat16: "bf16", jnp.float16: "f16"}[dtype]
    assert re.search(rf"arith\.(max|min)imumf .*x{name}>", report.mlir)


ROWS = {
    "sum": (jnp.sum, jnp.uint16),
    "max": (jnp.max, jnp.int32),
    "min": (jnp.min, jnp.float32),
    "argmax": (jnp.argmax, jnp.bfloat16),
    "any": (jnp.any, jnp.bool_),
}


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", ROWS)
def test_a_row_that_a_warp_holds_is_reduced_by_one_instruction(name, target):
    op, dtype = ROWS[name]
    x = np.round(4000 * RNG.standard_normal((8, 128))).astype(np.int32)
    x = jnp.asarray(x > 9500 if name == "any" else x, dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        x = x.at[1, 7].set(np.nan).at[2, 31].set(-np.nan).at[3].set(-np.inf)
    # XLA's minimum on a CPU loses a NaN.
    expected = getattr(np, name)(np.asarray(x), axis=1).astype(op(x, axis=1).dtype)

    def body(x_ref, o_ref):
        o_ref[...] = op(x_ref[...], axis=1)

    make = make_kernel(body, (8,), expected.dtype, target=target)
    everywhere.check(make, [x], expected, on_gpu=target == "sm_90a")
    (report,) = plgpu.offline.compile(make(None), x, target=target)
    # Each warp holds two rows; `argmax` reduces positions as well.
    count = 4 if name == "argmax" else 2
    of_warps = re.findall(r"(?:redux|vote)\.sync\S+", report.ptx)
    assert len(of_warps) == count
    assert "shfl.sync.bfly" not in report.ptx
    has_floats = any(".NaN.f32" in instruction for instruction in of_warps)
    assert has_floats == (target == "sm_100a" and jnp.issubdtype(dtype, jnp.floating))


@pytest.mark.parametrize(
    ("op", "count"), [(jnp.any, 0), (jnp.any, 1), (jnp.all, 1023), (jnp.all, 1024)]
)
def test_a_bool_of_all_threads_takes_a_barrier_and_no_memory(op, count):
    x = RNG.permutation(1024) < count

    def body(x_ref, o_ref):
        o_ref[...] = jnp.broadcast_to(op(x_ref[...]), (128,))

    make = make_kernel(body, (128,), jnp.bool_)
    everywhere.check(make, [x], np.full(128, op(x)))
    (report,) = plgpu.offline.compile(make(None), x)
    assert report.ptx.count("barrier.cta.red.and.pred") == 1
    assert "st.shared" not in report.ptx


@pytest.mark.parametrize("size", [8, 12, 64])
@pytest.mark.parametrize("op", [np.max, np.sum])
def test_copies_of_elements_do_not_hinder_an_extremum(op, size):
    x = RNG.integers(-99, 99, (2, size)).astype(np.float32)
    x[1, size // 2] = np.nan

    def body(x_ref, o_ref, i_ref):
        for row in range(2):
            found = getattr(jnp, op.__name__)(x_ref[row])
            o_ref[row] = jnp.broadcast_to(found, (128,))
            found = getattr(jnp, op.__name__)(x_ref[0].astype(jnp.int32))
            i_ref[row] = jnp.broadcast_to(found, (128,))

    types = [jax.ShapeDtypeStruct((2, 128), t) for t in (jnp.float32, jnp.int32)]
    make = everywhere.kernel(body, types)
    rows = np.broadcast_to(op(x, axis=1)[:, None], (2, 128))
    numbers = np.full((2, 128), op(x[0].astype(np.int32)))
    everywhere.check(make, [x], [rows, numbers])
    (report,) = plgpu.offline.compile(make(None), x)
    is_whole = size == 64 if op is np.sum else size in (8, 64)
    assert ("redux" in report.ptx) == is_whole


@pytest.mark.parametrize(
    ("layout", "shape", "dtype"),
    [
        (plgpu.TMEMLayout.SCALES_LAYOUT, (128, 4), np.uint8),
        (plgpu.TMEMLayout.M64_COLLECTIVE_LAYOUT(64), (64, 64), np.float32),
        (plgpu.TMEMLayout.M64_COLLECTIVE_LAYOUT(64, 2), (64, 64), np.float16),
    ],
    ids=str,
)
def test_threads_load_what_their_lanes_of_tensor_memory_hold(layout, shape, dtype):
    x = (np.arange(np.prod(shape)) % 251).astype(dtype).reshape(shape)

    def body(x_ref, o_ref, tile):
        tile[...] = x_ref[...]
        o_ref[...] = plgpu.load(tile, layout=layout, optimized=False)

    out = jax.ShapeDtypeStruct(shape, dtype)
    everywhere.check(everywhere.kernel(body, out, plgpu.SMEM(shape, dtype)), [x], x)

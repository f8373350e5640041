# SPDX-License-Identifier: Apache-2.0
"""Copies to GMEM that combine: what NumPy computes, whichever CTA comes first."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import types
from tests.support import everywhere
from tests.support.entry_kernels import run
from tests.support.refusal import refused, refused_by
from tests.support.semantics import BOTH, under

I32, F32 = jnp.int32, jnp.float32
SHAPE = (16, 32)
RNG = np.random.default_rng(0)
CASES = [(op, dtype) for op, row in types.REDUCTIONS.items() for dtype in row.elements]


def unsigned(x):
    return x.view(f"uint{8 * x.itemsize}")


def signed(x):
    return x.view(f"int{8 * x.itemsize}")


def increment(old, new):
    old, new = unsigned(old), unsigned(new)
    return np.where(old >= new, 0, old + 1)


def decrement(old, new):
    old, new = unsigned(old), unsigned(new)
    return np.where((old == 0) | (old > new), new, old - 1)


FUNCTIONS = {
    "add": np.add,
    "min": np.fmin,
    "max": np.fmax,
    "umin": lambda a, b: np.minimum(unsigned(a), unsigned(b)),
    "umax": lambda a, b: np.maximum(unsigned(a), unsigned(b)),
    "smin": lambda a, b: np.minimum(signed(a), signed(b)),
    "smax": lambda a, b: np.maximum(signed(a), signed(b)),
    "inc": increment,
    "dec": decrement,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def numbers(dtype, shape=SHAPE):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        x = RNG.integers(info.min, info.max, shape, dtype, endpoint=True)
        return np.where(RNG.integers(0, 2, shape) == 1, x % 5, x).astype(dtype)
    x = (RNG.integers(-40, 40, shape) / 2).astype(dtype)
    x.flat[::7] = np.nan
    return x


def in_place(body, dtype, shape=SHAPE, transforms=(), **options):
    """Returns `make` for a kernel that updates its first argument."""
    tile = plgpu.SMEM(shape, dtype, transforms=transforms)
    return everywhere.in_place(body, (), tile, plgpu.Barrier(), **options)


def fetch(x, tile, full):
    plgpu.copy_gmem_to_smem(x, tile, full)
    plgpu.barrier_wait(full)


def combine(tile, state, op="add"):
    plgpu.copy_smem_to_gmem(tile, state, reduction_op=op)
    plgpu.wait_smem_to_gmem(0)


def reduce(op, source=lambda x: x):
    """A body that copies (a part of) its input over the state."""

    def body(state, x, tile, full):
        fetch(source(x), tile, full)
        combine(tile, state, op)

    return body


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_a_copy_combines_its_elements_with_those_in_gmem(op, dtype):
    old, new = numbers(dtype), numbers(dtype)
    with np.errstate(all="ignore"):
        expected = FUNCTIONS[op](old, new).astype(old.dtype, copy=False)
    with jax.enable_x64(True):
        make = in_place(reduce(op), old.dtype)
        everywhere.check(make, [old, new], expected.view(old.dtype))


GRID = {"grid": (3,), "grid_names": ("i",)}


def part(x):
    return x.at[lax.axis_index("i")]


@pytest.mark.parametrize(
    ("op", "dtype"), [("add", "float32"), ("max", "int32"), ("xor", "uint32")]
)
def test_ctas_combine_into_the_same_elements_at_once(op, dtype):
    old, new = numbers(dtype), numbers(dtype, (3, *SHAPE))
    expected = old
    for x in new:
        expected = FUNCTIONS[op](expected, x)
    make = in_place(reduce(op, part), old.dtype, **GRID)
    everywhere.check(make, [old, new], expected)
    for seed in range(4):
        got = make(plgpu.InterpretParams(seed=seed, asynchrony="random"))(old, new)
        np.testing.assert_array_equal(got, expected)


@everywhere.gives(
    [numbers("int32", (20, 32)), numbers("int32", (32, 32))],
    lambda old, new: old + new[:20],
    I32,
    by=in_place,
    grid={"i": 2},
)
def test_what_lies_beyond_the_array_is_dropped(state, x, tile, full):
    rows = plgpu.ds(16 * lax.axis_index("i"), 16)
    fetch(x.at[rows], tile, full)
    combine(tile, state.at[rows])


TILES = plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)


@pytest.mark.parametrize(
    ("shape", "transforms"),
    [((8, 65), ()), ((4, 257), ()), ((64, 64), TILES)],
    ids=["a box of rows of 260 bytes", "adjacent bytes", "tiles"],
)
def test_what_is_stored_otherwise_is_combined(shape, transforms):
    old, new = numbers("int32", shape), numbers("int32", shape)
    make = in_place(reduce("add"), I32, shape, transforms)
    everywhere.check(make, [old, new], old + new)


@pytest.mark.parametrize("predicate", [False, True])
def test_a_skipped_copy_combines_nothing(predicate):
    def body(state, x, tile, full):
        fetch(x, tile, full)
        chosen = jnp.bool_(predicate)
        plgpu.copy_smem_to_gmem(tile, state, chosen, reduction_op="add")
        plgpu.wait_smem_to_gmem(0)

    old, new = numbers("int32"), numbers("int32")
    expected = old + new if predicate else old
    everywhere.check(in_place(body, I32), [old, new], expected)


# --- what the emulator reports --------------------------------------------------------


def emulate(body, dtype, *arguments, **options):
    make = in_place(body, dtype, **options)
    return make(plgpu.InterpretParams(seed=0))(*arguments)


X = np.ones(SHAPE, np.float32)
XS = np.ones((3, *SHAPE), np.float32)


@refused_by(emulate, F32, X, XS, **GRID)
def test_a_copy_without_a_reduction_races_with_one_that_has_it(state, x, tile, full):
    fetch(part(x), tile, full)

    @plgpu.when(lax.axis_index("i") == 0)
    def _():
        plgpu.copy_smem_to_gmem(tile, state)

    @plgpu.when(lax.axis_index("i") > 0)
    def _():
        plgpu.copy_smem_to_gmem(tile, state, reduction_op="add")

    plgpu.wait_smem_to_gmem(0)


@refused_by(emulate, F32, X, XS, **GRID)
def test_a_load_races_with_a_reduction(state, x, tile, full):
    fetch(part(x), tile, full)
    combine(tile, state)
    tile[...] = state[...]


@refused_by(emulate, F32, X, X)
def test_a_reduction_of_a_copy_races_with_an_atomic_of_threads(state, x, tile, full):
    fetch(x, tile, full)
    plgpu.copy_smem_to_gmem(tile, state, reduction_op="add")
    plgpu.atomic_add(state, 1.0)
    plgpu.wait_smem_to_gmem(0)


@refused_by(emulate, F32, X, X)
def test_a_reduction_needs_a_fence_after_stores(state, x, tile, full):
    tile[...] = jnp.ones(SHAPE, F32)
    combine(tile, state)


@refused
def test_a_reduction_into_a_result_that_nobody_has_initialized_is_reported():
    def body(x, o, tile, full):
        fetch(x, tile, full)
        plgpu.copy_smem_to_gmem(tile, o, reduction_op="add")  # HERE
        plgpu.wait_smem_to_gmem(0)

    scratch = plgpu.SMEM(SHAPE, F32), plgpu.Barrier()
    everywhere.emulate(body, [X], X, *scratch, partial_results=True)


@everywhere.gives([X], lambda x: x + 2, plgpu.SMEM(SHAPE, F32), plgpu.Barrier())
def test_a_result_that_the_same_warpgroup_has_stored_is_initialized(x, o, tile, full):
    fetch(x, tile, full)
    o[...] = jnp.full(SHAPE, 2, F32)
    plgpu.commit_gmem()
    combine(tile, o)


# --- what is refused, what is emitted -------------------------------------------------


@refused_by(run, scratch_types=(plgpu.SMEM((64, 128), F32), plgpu.Barrier()))
def test_reductions_are_those_of_the_elements(x, o, tile, full):
    plgpu.copy_smem_to_gmem(tile, o, reduction_op="max")  # HERE


@refused_by(everywhere.emulate, [], X.astype(np.int8), plgpu.SMEM(SHAPE, jnp.int8))
def test_no_reduction_takes_narrow_integers(o, tile):
    plgpu.copy_smem_to_gmem(tile, o, reduction_op="add")  # HERE


@refused_by(run, scratch_types=(plgpu.SMEM((64, 128), F32),))
def test_a_reduction_has_a_name(x, o, tile):
    plgpu.copy_smem_to_gmem(tile, o, reduction_op="sum")  # HERE


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
def test_the_instruction_reduces(semantics):
    make = in_place(reduce("smax"), I32)
    x = X.astype(np.int32)
    (report,) = plgpu.offline.compile(under(semantics, make(None)), x, x)
    assert "cp.reduce.async.bulk.tensor.2d.global.shared::cta.max" in report.ptx


# --- rows, which need no tensor map ---------------------------------------------------

ROWS = [
    ("add", "bfloat16"), ("add", "float64"), ("add", "int64"), ("smax", "uint32"),
    ("min", "float16"), ("inc", "uint32"), ("xor", "uint64"), ("umin", "int32"),
]  # fmt: skip
BULK = "cp.reduce.async.bulk.global.shared::cta.bulk_group"


@pytest.mark.parametrize(("op", "dtype"), ROWS)
def test_a_row_is_combined_without_a_tensor_map(op, dtype):
    old, new = numbers(dtype, (4, 32)), numbers(dtype, (32,))
    expected = old.copy()
    with np.errstate(all="ignore"):
        row = FUNCTIONS[op](old[2], new).astype(old.dtype, copy=False)
    expected[2] = row.view(old.dtype)

    def body(state, x, n, tile, full):
        fetch(x, tile, full)
        combine(tile, state.at[n[0]], op)

    with jax.enable_x64(True):
        make = in_place(body, old.dtype, (32,))
        everywhere.check(make, [old, new, np.array([2], np.int32)], expected)


def test_ctas_add_float64_at_dynamic_starts_and_whole_rows():
    old, new = numbers("float64", (8, 16)), numbers("float64", (3, 4, 16))
    expected = old.copy()
    for i in range(3):
        expected[2 * i : 2 * i + 4] += new[i]

    def body(state, x, tile, full):
        fetch(part(x), tile, full)
        rows = plgpu.ds(2 * lax.axis_index("i"), 4)
        combine(tile, state.at[rows])

    with jax.enable_x64(True):
        make = in_place(body, old.dtype, (4, 16), **GRID)
        everywhere.check(make, [old, new], expected)


def float64_sum(start, sizes):
    """A kernel that adds a tile to a part of an (8, 16) array of float64."""

    def body(state, n, tile):
        tile[...] = jnp.ones(sizes, tile.dtype)
        plgpu.commit_smem()
        first = n[0] if start is None else start[0]
        where = plgpu.ds(first, sizes[0]), plgpu.ds((start or (0, 0))[1], sizes[1])
        combine(tile, state.at[where])

    make = everywhere.in_place(body, (), plgpu.SMEM(sizes, jnp.float64))
    return make, np.zeros((8, 16)), np.array([6], np.int32)


@pytest.mark.parametrize(
    ("start", "sizes"),
    [((0, 2), (4, 8)), ((6, 0), (4, 16)), (None, (4, 16))],
    ids=["columns", "rows beyond the edge", "a start that is not known"],
)
@refused
def test_float64_is_added_to_adjacent_elements_alone(start, sizes):
    with jax.enable_x64(True):
        make, *args = float64_sum(start, sizes)
        make(True)(*args)


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
def test_every_reduction_of_rows_assembles(semantics):
    dtypes = sorted({dtype for _, dtype in CASES})

    def body(*refs):
        states, tiles = refs[: len(dtypes)], refs[len(dtypes) :]
        for op, dtype in CASES:
            i = dtypes.index(dtype)
            plgpu.copy_smem_to_gmem(tiles[i], states[i], reduction_op=op)
        plgpu.wait_smem_to_gmem(0)

    with jax.enable_x64(True):
        made = [np.dtype(getattr(ml_dtypes, name, name)) for name in dtypes]
        kernel = plgpu.kernel(
            body,
            out_type=[jax.ShapeDtypeStruct((32,), dtype) for dtype in made],
            scratch_types=[plgpu.SMEM((32,), dtype) for dtype in made],
        )
        (report,) = plgpu.offline.compile(under(semantics, kernel))
    assert report.ptx.count(BULK) == len(CASES)
    for suffix in ("add.f64", "add.noftz.bf16", "min.f16", "max.s64", "xor.b64"):
        assert f"{BULK}.{suffix} " in report.ptx

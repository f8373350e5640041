# SPDX-License-Identifier: Apache-2.0
"""Atomic operations, as NumPy computes them one element after the other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from pallas_gpu.primitives.atomics import TYPES
from tests.support import effects as see
from tests.support import everywhere
from tests.support.entry_kernels import f32, run
from tests.support.everywhere import check
from tests.support.refusal import refused, refused_by

CASES = [(name, dtype) for name, dtypes in TYPES.items() for dtype in dtypes]
FUNCTIONS = {
    "atomic_add": lambda old, x: (old + x).astype(old.dtype),
    "atomic_max": np.maximum,
    "atomic_min": np.minimum,
    "atomic_and": np.bitwise_and,
    "atomic_or": np.bitwise_or,
    "atomic_xor": np.bitwise_xor,
    "atomic_xchg": lambda old, x: x,
}
RNG = np.random.default_rng(0)
SHAPE = (16, 64)


def numbers(dtype, shape=SHAPE):
    if np.dtype(dtype).kind in "iu":
        return RNG.integers(0, 50, shape).astype(dtype)
    # Halves of integers: every sum is exact.
    return (RNG.integers(-40, 40, shape) / 2).astype(dtype)


def in_gmem(body, shapes=(), **options):
    """Returns `make` for a kernel that updates its first argument in place."""
    out = tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)
    return everywhere.in_place(body, out, **options)


def call(name, ref, idx, value, **options):
    if name == "atomic_cas":
        compare, value = value
        return plgpu.atomic_cas(ref.at[idx], compare, value, **options)
    return getattr(plgpu, name)(ref.at[idx], value, **options)


def updated(name, old, x):
    if name == "atomic_cas":
        return np.where(old == x[0], x[1], old)
    return FUNCTIONS[name](old, x)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_elements_are_updated_and_the_old_ones_returned(name, dtype):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    state = numbers(dtype)
    x = numbers(dtype)
    compare = np.where(RNG.integers(0, 2, SHAPE) == 1, state, x).astype(dtype)
    mask = RNG.integers(0, 3, SHAPE) > 0
    values = (compare, x) if name == "atomic_cas" else x

    def body(ref, x, compare, mask, old):
        value = (compare[...], x[...]) if name == "atomic_cas" else x[...]
        old[...] = call(name, ref, (), value, mask=mask[...])

    expected = np.where(mask, updated(name, state, values), state)
    with jax.enable_x64(True):
        make = in_gmem(body, [(SHAPE, dtype)])
        check(make, [state, x, compare, mask], (expected, np.where(mask, state, 0)))


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_smem_is_updated_without_old_elements(name, dtype):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    state, x = numbers(dtype), numbers(dtype)
    compare = np.where(RNG.integers(0, 2, SHAPE) == 1, state, x).astype(dtype)
    values = (compare, x) if name == "atomic_cas" else x

    def body(state, x, compare, o, s):
        s[...] = state[...]
        value = (compare[...], x[...]) if name == "atomic_cas" else x[...]
        call(name, s, (), value)
        o[...] = s[...]

    with jax.enable_x64(True):
        expected = updated(name, state, values)
        everywhere.run(body, [state, x, compare], expected, plgpu.SMEM(SHAPE, dtype))


def test_a_histogram_in_a_swizzled_array():
    bins = RNG.integers(0, 64, (4, 512)).astype(np.int32)
    transforms = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))

    def body(counts, bins, s):
        s[...] = jnp.zeros((8, 64), jnp.int32)
        found = bins[lax.axis_index("i")]
        plgpu.atomic_add(s.at[found // 8 % 8, found], 1)
        plgpu.atomic_add(counts, jnp.sum(s[...], axis=0))

    scratch = [plgpu.SMEM((8, 64), jnp.int32, transforms=transforms)]
    make = in_gmem(body, grid={"i": 4}, scratch_types=scratch)
    expected = np.bincount(bins.reshape(-1), minlength=64)
    warpgroup = (plgpu.LoweringSemantics.Warpgroup,)
    zeros = np.zeros(64, np.int32)
    check(make, [zeros, bins], (expected,), semantics=warpgroup, executed=warpgroup)


def test_rows_are_scattered_and_added():
    rows = RNG.integers(0, 16, 64).astype(np.int32)
    x = numbers(np.float32, (64, 32))
    expected = np.zeros((16, 32), np.float32)
    np.add.at(expected, rows, x)

    def body(sums, x, rows):
        index = plgpu.load(rows, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        value = plgpu.load(x, layout=plgpu.Layout.WGMMA)
        plgpu.atomic_add(sums.at[index], value)

    check(in_gmem(body), [np.zeros((16, 32), np.float32), x, rows], (expected,))


@pytest.mark.parametrize("shape", [(1,), (3,), (16,), (5, 7), (100,)])
@pytest.mark.parametrize("used", [False, True])
def test_replicated_elements_are_updated_once(shape, used):
    state = numbers(np.int32, shape)

    def body(ref, o):
        value = lax.broadcasted_iota(jnp.int32, shape, 0) + 1
        old = plgpu.atomic_add(ref, value)
        o[...] = old if used else value

    steps = np.broadcast_to(
        np.arange(1, shape[0] + 1).reshape((-1,) + (1,) * (len(shape) - 1)), shape
    ).astype(np.int32)
    make = in_gmem(body, [(shape, np.int32)])
    check(make, [state], (state + steps, state if used else steps))


def test_replicated_elements_are_exchanged_once():
    state = numbers(np.int32, (5,))

    def body(ref, o):
        # Twice in one element, the second would see the first.
        plgpu.atomic_cas(ref, ref[...], ref[...] + 1)
        plgpu.atomic_xchg(ref.at[0], 77)
        o[...] = ref[...]

    expected = state + 1
    expected[0] = 77
    no_scratch = plgpu.CompilerParams(reduction_scratch_bytes=0)
    make = in_gmem(body, [((5,), np.int32)], compiler_params=no_scratch)
    check(make, [state], (expected, expected))


@everywhere.gives(
    [np.array([1, 2], np.int32)],
    lambda *_: (
        np.array([6, 7], np.int32),
        np.repeat(np.array([[100], [207]], np.int32), 128, 1),
    ),
    [((2, 128), np.int32)],
    by=in_gmem,
    grid={"i": 2},
)
def test_single_elements_return_the_old_one_in_all_threads(ref, o):
    i = lax.axis_index("i")
    first = plgpu.atomic_add(ref.at[i], 5)
    second = plgpu.atomic_max(ref.at[i], 7, mask=i > 0)
    o[i] = jnp.full((128,), first * 100 + second)


@everywhere.gives(
    [np.zeros(2, np.int32)],
    lambda *_: (np.array([15, 15]), np.arange(4)),
    [((4,), np.int32)],
    by=in_gmem,
)
def test_a_warp_updates_an_element(ref, o):
    @plgpu.warp_map
    def _(warp):
        old = plgpu.atomic_add(ref.at[0], 1 << warp)
        plgpu.atomic_or(ref.at[1], 1 << warp)
        o[warp] = old * 0 + warp


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_halves_that_are_adjacent_are_packed(dtype, first):
    state, x = numbers(dtype, (8, 130)), numbers(dtype, (8, 128))

    def body(ref, x):
        plgpu.atomic_add(ref.at[np.s_[:, first : first + 128]], x[...])

    expected = state.copy()
    expected[:, first : first + 128] += x
    make = in_gmem(body)
    check(make, [state, x], (expected,))
    (report,) = plgpu.offline.lower(make(None), state, x)
    # A pair that does not start at a multiple of four bytes has no instruction.
    assert ("f16x2" in report.mlir) == (first % 2 == 0)


@pytest.mark.parametrize(("start", "word"), [(0, "add.v2.f32"), (1, "add.f32")])
def test_adjacent_floats_in_gmem_are_added_together(start, word):
    state, x = numbers(np.float32, (64, 18)), numbers(np.float32, (64, 16))

    def body(ref, x):
        part = ref.at[np.s_[:, start : start + 16]]
        plgpu.atomic_add(part, plgpu.load(x, layout=plgpu.Layout.WGMMA))

    expected = state.copy()
    expected[:, start : start + 16] += x
    make = in_gmem(body)
    check(make, [state, x], (expected,))
    (report,) = plgpu.offline.lower(make(None), state, x)
    assert f"red.relaxed.gpu.global.{word} " in report.mlir


@pytest.mark.parametrize("sem", ["relaxed", "acquire", "release"])
def test_an_or_with_nothing_is_a_load(sem):
    """Of several rows, of one element, and under a mask."""
    state = numbers(np.int32, (4, 40))
    above = (0 * state + np.arange(40) > 7).astype(np.int32)

    def body(ref, above, o, first):
        o[...] = plgpu.atomic_or(ref, 0, mask=above[...] > 0, sem=sem)
        first[0] = plgpu.atomic_or(ref.at[1, 2], 0, sem=sem)

    make = in_gmem(body, [(state.shape, state.dtype), ((1,), state.dtype)])
    check(make, [state, above], (state, state * above, state[1, 2:3]))
    (report,) = plgpu.offline.lower(make(None), state, above)
    assert (f"ld.{sem}.gpu.global.b32" in report.mlir) == (sem != "release")
    assert ("atom." in report.mlir) == (sem == "release")


def test_views_are_updated():
    def body(ref):
        plgpu.atomic_add(ref.reshape(-1).at[plgpu.ds(0, 512, 2)], 1.0)
        plgpu.atomic_xor(ref.bitcast(jnp.int32).at[np.s_[0:8]], -(2**31))

    state = numbers(np.float32)
    expected = state.copy()
    expected.reshape(-1)[::2] += 1
    expected[:8] = -expected[:8]
    check(in_gmem(body), [state], (expected,))


SPECIAL = np.array(
    [0.0, -0.0, 1.5, -1.5, np.inf, -np.inf, np.nan, 1e-42, -1e-42], np.float32
)


@pytest.mark.parametrize("name", ["atomic_max", "atomic_min"])
def test_floats_are_ordered_as_integers(name):
    x, y = (a.reshape(-1).copy() for a in np.meshgrid(SPECIAL, SPECIAL))
    x = np.where(np.isnan(x), np.float32(1), x)  # a NaN in memory has a rule of its own

    def body(ref, y):
        call(name, ref, (), y[...])
        # Once a NaN, always a NaN.
        call(name, ref, (), 0.0 * y[...] + 1)

    fn = np.maximum if name == "atomic_max" else np.minimum
    with np.errstate(invalid="ignore"):
        expected = fn(fn(x, y), 0 * y + 1)
    check(in_gmem(body), [x, y], (expected,))


# --- order ----------------------------------------------------------------------------


@everywhere.gives(
    [np.zeros(128, np.int32)],
    lambda *_: (28 + 8 * np.arange(128),),
    by=in_gmem,
    grid={"i": 8},
)
def test_atomics_of_several_blocks_do_not_race(ref):
    plgpu.atomic_add(ref, lax.axis_index("i") + lax.iota(jnp.int32, 128))


def in_two(first, second):
    """Runs one function in each of two warpgroups, on SMEM."""

    def body(o, s, b):
        wg = lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def _():
            s[...] = jnp.zeros(128, jnp.int32)
            plgpu.barrier_arrive(b)
            first(s, o)

        @plgpu.when(wg == 1)
        def _():
            plgpu.barrier_wait(b)
            second(s, o)

    out, scratch = np.zeros(128, np.int32), plgpu.SMEM((128,), jnp.int32)
    options = {"threads": {"wg": 2}, "partial_results": True}
    return everywhere.emulate(body, [], out, scratch, plgpu.Barrier(), **options)


def add(s, o):
    plgpu.atomic_add(s, 1)


def read(s, o):
    o[...] = s[...]


def write(s, o):
    s[...] = jnp.full(128, 3, jnp.int32)


def test_two_atomics_do_not_race():
    in_two(add, add)


@pytest.mark.parametrize("other", [read, write])
@pytest.mark.parametrize("atomic_first", [True, False])
def test_an_atomic_races_with_a_plain_access(other, atomic_first):
    pair = (add, other) if atomic_first else (other, add)
    with pytest.raises(errors.RaceError, match="without an order between"):
        in_two(*pair)


def test_the_order_of_a_sum_depends_on_the_seed():
    def body(ref, x):
        plgpu.atomic_add(ref.at[jnp.zeros(256, jnp.int32)], x[...])

    x = (RNG.standard_normal(256) * 10.0 ** RNG.integers(-3, 6, 256)).astype(np.float32)
    runs = (in_gmem(body)(plgpu.InterpretParams(seed=seed)) for seed in range(8))
    found = {float(run(np.zeros(1, np.float32), x)[0]) for run in runs}
    assert len(found) > 1
    np.testing.assert_allclose(sorted(found), x.astype(np.float64).sum(), rtol=1e-3)


# --- refusals -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("atomic_max", jnp.float16),
        ("atomic_min", jnp.bfloat16),
        ("atomic_add", jnp.int8),
        ("atomic_or", jnp.float32),
        ("atomic_xchg", jnp.float16),
        ("atomic_cas", jnp.int8),
        ("atomic_add", jnp.bool_),
    ],
)
@refused
def test_there_is_an_instruction_for_the_type(name, dtype):
    def body(x, o, s):
        value = (0, 1) if name == "atomic_cas" else (1,)
        getattr(plgpu, name)(s, *value)  # HERE

    run(body, scratch_types=[plgpu.SMEM((64, 128), dtype)])


@refused_by(run)
def test_an_accumulator_has_no_atomics(x, o):
    def scoped(acc):
        plgpu.atomic_add(acc, 1.0)  # HERE

    plgpu.run_scoped(scoped, plgpu.ACC((64, 128)))


@refused_by(run)
def test_an_input_is_not_updated(x, o):
    o[...] = x[...]
    plgpu.atomic_add(x, 1.0)  # HERE


@refused_by(run)
def test_fresh_memory_is_not_updated(x, o):
    plgpu.atomic_add(o, x[...])  # HERE


def test_the_hints_for_fresh_memory_work():
    x = numbers(jnp.float32)
    like = f32(*x.shape)
    call = plgpu.pallas_call(
        lambda x, _, o: add_to(o, x), like, grid=4, input_output_aliases={1: 0}
    )
    np.testing.assert_array_equal(call(x, np.zeros_like(x)), 4 * x)
    ref = jax.new_ref(jnp.zeros(x.shape))
    plgpu.kernel(lambda x, o: add_to(o, x), (), grid=(4,), grid_names=("i",))(x, ref)
    np.testing.assert_array_equal(ref[...], 4 * x)


def add_to(o, x):
    plgpu.atomic_add(o, x[...])


@refused_by(run)
def test_an_index_out_of_bounds_is_not_updated(x, o):
    o[...] = x[...]
    plgpu.atomic_add(o.at[lax.iota(jnp.int32, 64) + 1], 1.0)  # HERE


@pytest.mark.parametrize("name", FUNCTIONS)
@refused_by(run)
def test_an_index_as_in_triton_is_told_its_place(x, o, *, name):
    getattr(plgpu, name)(o, (0,), x[0], mask=True)


FLOATS = ("atomic_add", "atomic_max", "atomic_min", "atomic_xchg")
INTEGERS = ("atomic_and", "atomic_or", "atomic_xor")
GOOD = {
    **dict.fromkeys(FLOATS, lambda e: {"ref": e.o, "val": 0.0}),
    **dict.fromkeys(INTEGERS, lambda e: {"ref": e.n, "val": 0}),
    "atomic_cas": lambda e: {"ref": e.o, "cmp": 0.0, "val": 1.0},
}
EFFECTS = {
    **{f"{name}.optimized": see.HINT for name in (*FLOATS[:3], *INTEGERS)},
    **{f"{name}.sem": ["acq_rel"] for name in GOOD},
    **{f"{name}.scope": ["sys"] for name in GOOD},
    **{
        f"{name}.mask": [lambda e: e.o[...] > 0, lambda e: e.o[...] > 1]
        for name in (*FLOATS, "atomic_cas")
    },
    **{
        f"{name}.mask": [lambda e: e.n[...] > 0, lambda e: e.n[...] > 1]
        for name in INTEGERS
    },
}

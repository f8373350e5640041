# SPDX-License-Identifier: Apache-2.0
"""Unions in TMEM: what one member wrote the others read as bits, or it is reported."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.layouts import TmemLayout
from tests.support import everywhere
from tests.support.refusal import refused, refused_by
from tests.support.tensor_products import start_copies, storage

BF16, F16, F32, I32 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.int32
X = np.random.default_rng(0).normal(size=(128, 32)).astype(np.float32)
NATIVE = plgpu.Layout.TCGEN05_TMEM_NATIVE


def stored(x, member, packing=2):
    """Stores a whole argument to an array in TMEM."""
    member[...] = plgpu.load(x, layout=NATIVE(packing), optimized=False)


def run(body, *args, out=X, scratch):
    """Runs a kernel that has a union, in the emulator."""
    everywhere.emulate(body, args or [X], out, scratch, target="sm_100a", seed=1)


def gives(expected, union, *args):
    return everywhere.gives(
        args or [X], expected, union, target="sm_100a", on_gpu=False
    )


def two():
    return plgpu.RefUnion(*(plgpu.TMEM((128, 32), d) for d in (F32, I32)))


WHOLE, HALF = plgpu.TMEM((128, 32), F32), plgpu.TMEM((128, 16), F32)
HALVES = plgpu.RefUnion(WHOLE, (HALF, HALF))


@pytest.mark.parametrize(("dtype", "columns"), [(I32, 32), (BF16, 64), (jnp.int8, 128)])
def test_another_member_has_the_bits_of_a_column(dtype, columns):
    halves = np.concatenate([X, 2 * X], axis=1).astype(ml_dtypes.bfloat16)
    x = halves.view(np.float32)
    bits = x.view(np.dtype(dtype))  # the first of several is the lowest, as in memory
    narrow = plgpu.TMEM((128, columns), dtype, packed=None if dtype == I32 else True)

    @gives(bits, plgpu.RefUnion(WHOLE, narrow), x)
    def test(x, o, union):
        words, parts = union
        stored(x, words)
        o[...] = parts[...]

    test()


@gives(np.concatenate([X[:, :16], X[:, :16] + 1], axis=1), HALVES, X, X[:, :16] + 1)
def test_an_alternative_of_two_arrays_overwrites_a_half_each(x, y, o, union):
    whole, (_, right) = union
    stored(x, whole)
    stored(y, right)
    o[...] = whole[...]


def half_lane(dtype):
    return plgpu.TMEM((64, 32), dtype, layout=TmemLayout.half_lane(32))


@gives(X[:64].view(np.int32), plgpu.RefUnion(half_lane(F32), half_lane(I32)), X[:64])
def test_members_of_64_rows_in_halves_of_the_lanes(x, o, union):
    words, whole = union
    words[...] = plgpu.load(x, layout=plgpu.Layout.WGMMA, optimized=False)
    o[...] = whole[...]


@gives(
    X + np.repeat(np.float32([0, 1]), 16),
    plgpu.RefUnion(WHOLE, plgpu.TMEM((2, 128, 16), F32)),
)
def test_matrices_of_an_array_are_columns_behind_each_other(x, o, union):
    whole, pair = union
    stored(x, whole)
    pair[1] = pair[1] + 1
    o[...] = whole[...]


E8M0, E4M3 = jnp.float8_e8m0fnu, jnp.float8_e4m3fn
# Scales of four blocks of K of 128 rows, in the bytes of a word for each row.
EXPONENTS = np.random.default_rng(2).integers(125, 130, (128, 4)).astype(np.uint8)
WORDS = EXPONENTS.view(np.int32).reshape(4, 32).T  # [row % 32, row / 32]


def scaled_by_a_union(words_of_lanes):
    """A product whose scales of a are those words, and its operands."""
    rng = np.random.default_rng(3)
    a, b = (
        rng.integers(-3, 4, (rows, 128)).astype(jnp.dtype(E4M3)) for rows in (128, 16)
    )
    ones = np.full((1, 1, 32, 16), 1).astype(jnp.dtype(E8M0))
    tiles = storage(E4M3)
    scales = TmemLayout.scales()

    def body(
        a, b, w, ones, o, a_smem, b_smem, sb_smem, acc, union, sb, loaded, done
    ):  # fmt: skip
        words, sa = union
        start_copies(loaded, (a, a_smem), (b, b_smem), (ones, sb_smem))
        value = plgpu.load(w, layout=NATIVE(2), optimized=False)
        plgpu.async_store_tmem(words, value)
        plgpu.commit_tmem()
        plgpu.barrier_wait(loaded)
        plgpu.async_copy_scales_to_tmem(sb_smem, sb)
        plgpu.tcgen05_mma(
            acc, a_smem, b_smem.T, done, a_scale=sa, b_scale=sb, accumulate=False
        )
        plgpu.barrier_wait(done)
        o[...] = acc[...]

    make = everywhere.kernel(
        body,
        jax.ShapeDtypeStruct((128, 16), F32),
        plgpu.SMEM((128, 128), E4M3, transforms=tiles),
        plgpu.SMEM((16, 128), E4M3, transforms=tiles),
        plgpu.SMEM((1, 1, 32, 16), E8M0),
        plgpu.TMEM((128, 16), F32),
        plgpu.RefUnion(
            plgpu.TMEM((128, 4), I32), plgpu.TMEM((128, 4), E8M0, layout=scales)
        ),
        plgpu.TMEM((128, 4), E8M0, layout=scales),
        plgpu.Barrier(num_arrivals=3),
        plgpu.Barrier(orders_tensor_core=True),
        target="sm_100a",
    )
    held = np.repeat(2.0 ** (EXPONENTS.astype(np.float64) - 127), 32, axis=1)
    product = (a.astype(np.float64) * held) @ b.astype(np.float64).T
    return make, (a, b, words_of_lanes, ones), product.astype(np.float32)


def test_scales_are_in_the_lanes_of_all_copies():
    make, operands, product = scaled_by_a_union(np.tile(WORDS, (4, 1)))
    everywhere.check(make, operands, product, on_gpu=False)


# --- what is reported -----------------------------------------------------------------


@pytest.mark.parametrize("lane", [5, 70])
@refused
def test_copies_that_differ_have_no_value(lane):
    words = np.tile(WORDS, (4, 1))
    words[lane, 1] ^= 1
    make, operands, _ = scaled_by_a_union(words)
    make(plgpu.InterpretParams(seed=1))(*operands)


NARROW = plgpu.TMEM((128, 32), F16, packed=False)


@refused_by(run, X, X.astype(np.float16), scratch=plgpu.RefUnion(WHOLE, NARROW))
def test_a_column_with_one_narrow_element_has_no_word(x, half, o, union):
    words, narrow = union
    stored(x, words)
    stored(half, narrow)
    o[...] = words[...]  # HERE


@refused_by(run, scratch=HALVES)
def test_what_nobody_wrote_has_no_value_in_any_member(x, o, union):
    whole, (left, _) = union
    left[...] = plgpu.load(x.at[:, :16], layout=NATIVE(2), optimized=False)
    o[...] = whole[...]  # HERE


def in_turn(x, o, union, stored, loaded, *, mistake=None):
    """A warpgroup stores to a member, another one loads the other member."""
    words, bits = union
    value = plgpu.load(x, layout=NATIVE(2), optimized=False)

    @plgpu.when(lax.axis_index("wg") == 0)
    def _():
        plgpu.async_store_tmem(words, value)
        if mistake != "the store is not committed":
            plgpu.commit_tmem()
        plgpu.barrier_arrive(stored)
        plgpu.barrier_wait(loaded)
        plgpu.async_store_tmem(words, value + 1)
        plgpu.commit_tmem()

    @plgpu.when(lax.axis_index("wg") == 1)
    def _():
        plgpu.barrier_wait(stored)
        found = plgpu.async_load_tmem(bits, layout=NATIVE(2))
        if mistake != "the load is not waited for":
            plgpu.wait_load_tmem()
        plgpu.barrier_arrive(loaded)
        o[...] = found


ORDERS = plgpu.Barrier(orders_tensor_core=True)
TWO_WARPGROUPS = {"threads": {"wg": 2}, "target": "sm_100a"}


@everywhere.gives(
    [X], X.view(np.int32), two(), ORDERS, ORDERS, **TWO_WARPGROUPS, on_gpu=False
)
def test_members_are_ordered_as_one_array(x, o, union, stored, loaded):
    in_turn(x, o, union, stored, loaded)


@pytest.mark.parametrize(
    "mistake", ["the store is not committed", "the load is not waited for"]
)
@refused_by(
    everywhere.emulate, [X], X.view(np.int32), two(), ORDERS, ORDERS, **TWO_WARPGROUPS
)
def test_accesses_to_two_members_wait_for_each_other(
    x, o, union, stored, loaded, *, mistake
):
    in_turn(x, o, union, stored, loaded, mistake=mistake)


def test_accesses_of_a_warpgroup_to_two_members_are_in_order():
    def body(x, o, union):
        words, bits = union
        value = plgpu.load(x, layout=NATIVE(2), optimized=False)
        plgpu.async_store_tmem(words, value)
        loaded = plgpu.async_load_tmem(bits, layout=NATIVE(2))
        plgpu.async_store_tmem(words, value + 1)
        plgpu.commit_tmem()
        o[...] = loaded

    out, options = X.view(np.int32), {"target": "sm_100a", "asynchrony": "late"}
    np.testing.assert_array_equal(
        everywhere.emulate(body, [X], out, two(), **options), out
    )

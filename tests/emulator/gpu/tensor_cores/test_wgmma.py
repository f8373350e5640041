# SPDX-License-Identifier: Apache-2.0
"""wgmma in the emulator: what it computes, and what it reports."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import host
from tests.support.refusal import refused, refused_by

F16, F32 = jnp.float16, jnp.float32
ASYNCHRONY = ("eager", "late", "random")


def tiles(shape, dtype, swizzle=128):
    """SMEM stored as the tensor core reads it."""
    elements = swizzle // jnp.dtype(dtype).itemsize
    transforms = (
        plgpu.TilingTransform((8, elements)),
        plgpu.SwizzleTransform(swizzle),
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def load_both(a, b, sa, sb, barrier):
    plgpu.copy_gmem_to_smem(a, sa, barrier)
    plgpu.copy_gmem_to_smem(b, sb, barrier)
    plgpu.barrier_wait(barrier)


def run_body(body, a, b, out_dtype=F32, out=None, **options):
    """Runs `body(sa, sb, o)` with both operands in SMEM; `b` is stored (N, K)."""

    def full(a_ref, b_ref, o, sa, sb, barrier):
        load_both(a_ref, b_ref, sa, sb, barrier)
        body(sa, sb, o)

    out = out or (a.shape[0], b.shape[0])
    return plgpu.kernel(
        full,
        out_type=jax.ShapeDtypeStruct(out, out_dtype),
        scratch_types=[
            tiles(a.shape, a.dtype),
            tiles(b.shape, b.dtype),
            plgpu.Barrier(num_arrivals=2),
        ],
        **options,
    )(a, b)


def product(a, b, acc_dtype=F32, **options):
    """a @ b.T on the emulated tensor core, all of K in one call."""

    def body(sa, sb, o):
        def scope(acc):
            plgpu.wgmma(acc, sa, sb.T)
            return acc[...]

        shape = (a.shape[0], b.shape[0])
        o[...] = plgpu.run_scoped(scope, plgpu.ACC(shape, acc_dtype))

    return np.asarray(run_body(body, a, b, acc_dtype, **options))


def normal(seed, shape, dtype):
    return host.array(np.random.default_rng(seed).standard_normal(shape), dtype)


def exact(a, b):
    return np.asarray(a, np.float64) @ np.asarray(b, np.float64).T


# --- arithmetic -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_products_of_16_bit_types_are_summed_in_float32(dtype):
    a, b = normal(0, (64, 128), dtype), normal(1, (64, 128), dtype)
    # 128 terms of size about 1: float32 rounds each sum by 2**-24 of it.
    np.testing.assert_allclose(product(a, b), exact(a, b), atol=2e-5)


def test_float32_operands_lose_all_but_ten_bits_of_mantissa():
    x = np.float32(1 + 2.0**-10 + 2.0**-11)
    a = jnp.zeros((64, 32)).at[0, 0].set(x)
    b = jnp.zeros((8, 32)).at[0, 0].set(1.0)
    assert product(a, b)[0, 0] == 1 + 2.0**-10


def test_int8_is_exact_and_wraps_modulo_two_to_the_32():
    a = jnp.full((64, 128), -128, jnp.int8)
    start = np.int32(2**31 - 1)

    def body(sa, sb, o):
        def scope(acc):
            acc[...] = jnp.full((64, 64), start)
            plgpu.wgmma(acc, sa, sb.T)
            return acc[...]

        o[...] = plgpu.run_scoped(scope, plgpu.ACC((64, 64), jnp.int32))

    got = np.asarray(run_body(body, a, a[:64], jnp.int32))
    want = (int(start) + 128 * 128 * 128 + 2**31) % 2**32 - 2**31
    assert np.all(got == want)


def test_float8_keeps_fourteen_bits_below_the_largest_product():
    a = jnp.zeros((64, 128)).at[0, :3].set([256.0, 1.0, 2.0**-6])
    b = jnp.zeros((64, 128)).at[0, :3].set([64.0, 1.0, 1.0])
    got = product(a.astype(jnp.float8_e4m3fn), b.astype(jnp.float8_e4m3fn))
    # The unit is 2**14 * 2**-13 = 2: neither 1 nor 1/64 is a whole unit.
    assert got[0, 0] == 2.0**14
    # The same terms in another instruction of K = 32 meet the sum of 2**14 there.
    a, b = jnp.roll(a.at[0, 0].set(0), 40, 1).at[0, 0].set(256.0), b
    b = jnp.roll(b.at[0, 0].set(0), 40, 1).at[0, 0].set(64.0)
    got = product(a.astype(jnp.float8_e4m3fn), b.astype(jnp.float8_e4m3fn))
    assert got[0, 0] == 2.0**14


def test_float8_without_small_terms_is_exact():
    values = np.random.default_rng(3).choice([-2.0, -1.0, 0.5, 1.0], (64, 128))
    a = jnp.asarray(values, jnp.float8_e4m3fn)
    b = jnp.asarray(values[::-1], jnp.float8_e5m2)
    np.testing.assert_array_equal(product(a, b), exact(a, b))


def test_float8_errors_are_those_of_thirteen_bits_of_fraction():
    a = normal(4, (64, 256), jnp.float8_e4m3fn)
    b = normal(5, (64, 256), jnp.float8_e4m3fn)
    error = np.abs(product(a, b) - exact(a, b)).max()
    # 256 truncations of less than 2**-13 of a value below 64, and one after each step.
    assert 1e-4 < error < 264 * 64 * 2.0**-13


def test_infinity_and_nan_go_through_float8():
    a = jnp.zeros((64, 128), jnp.float8_e5m2).at[0, 0].set(jnp.inf)
    b = jnp.ones((64, 128), jnp.float8_e5m2).at[1, 0].set(0.0)
    got = product(a, b)
    assert got[0, 0] == np.inf
    assert np.isnan(got[0, 1])
    assert got[1, 0] == 0


def test_a_float16_accumulator_is_rounded_after_each_instruction():
    a = jnp.ones((64, 64), F16).at[0, 0].set(2048.0)
    b = jnp.ones((64, 64), F16).at[:, 1:].set(2.0**-4)
    got = product(a, b, F16)
    # 2048 + 15/16 rounds to 2048, in float16's steps of 2; so does each of three + 1.
    assert got[0, 0] == 2048
    assert got[1, 0] == 1 + 63 / 16


# --- operands -------------------------------------------------------------------------


def test_operands_may_be_transposed_and_parts():
    a, b = normal(6, (128, 64), F16), normal(7, (128, 128), F16)

    def body(sa, sb, o):
        def scope(acc):
            plgpu.wgmma(acc, sa.T, sb.at[:, 64:])
            return acc[...]

        o[...] = plgpu.run_scoped(scope, plgpu.ACC((64, 64)))

    got = run_body(body, a, b, out=(64, 64))
    want = np.asarray(a, np.float64).T @ np.asarray(b, np.float64)[:, 64:]
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_a_register_operand_is_taken_when_the_product_is_issued():
    a, b = normal(8, (64, 64), F16), normal(9, (64, 64), F16)

    def body(sa, sb, o):
        def scope(acc):
            x = plgpu.load(sa, layout=plgpu.Layout.WGMMA)
            plgpu.wgmma(acc, x * 2, sb.T)
            sa[...] = jnp.zeros((64, 64), F16)
            return acc[...]

        o[...] = plgpu.run_scoped(scope, plgpu.ACC((64, 64)))

    options = {"interpret": plgpu.InterpretParams(asynchrony="late")}
    got = run_body(body, a, b, **options)
    np.testing.assert_allclose(got, 2 * exact(a, b), atol=4e-5)


def test_products_add_to_parts_of_an_accumulator():
    a, b = normal(10, (64, 64), F16), normal(11, (128, 64), F16)

    def body(sa, sb, o):
        def scope(acc):
            for n in (0, 64):
                part = plgpu.ds(n, 64)
                plgpu.wgmma(acc.at[:, part], sa, sb.at[part].T)
            return acc[...]

        o[...] = plgpu.run_scoped(scope, plgpu.ACC((64, 128)))

    np.testing.assert_allclose(run_body(body, a, b), exact(a, b), atol=2e-5)


def test_run_state_starts_from_a_value_and_returns_the_last_one():
    a, b = normal(12, (64, 64), F16), normal(13, (64, 64), F16)

    def body(sa, sb, o):
        def add(acc):
            plgpu.wgmma(acc, sa, sb.T)

        start = plgpu.ACC.init(jnp.full((64, 64), 3.0, F32))
        o[...] = plgpu.run_state(add)(start)

    np.testing.assert_allclose(run_body(body, a, b), 3 + exact(a, b), atol=2e-5)


def test_every_warpgroup_has_its_own_accumulator():
    a, b = normal(14, (128, 64), F16), normal(15, (64, 64), F16)

    def body(a_ref, b_ref, o, sa, sb, barrier):
        rows = plgpu.ds(lax.axis_index("wg") * 64, 64)

        @plgpu.when(lax.axis_index("wg") == 0)
        def _():
            plgpu.copy_gmem_to_smem(a_ref, sa, barrier)
            plgpu.copy_gmem_to_smem(b_ref, sb, barrier)

        plgpu.barrier_wait(barrier)

        def scope(acc):
            plgpu.wgmma(acc, sa.at[rows], sb.T)
            return acc[...]

        o[rows] = plgpu.run_scoped(scope, plgpu.ACC((64, 64)))

    got = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((128, 64), F32),
        scratch_types=[
            tiles((128, 64), F16),
            tiles((64, 64), F16),
            plgpu.Barrier(num_arrivals=2),
        ],
        num_threads=2,
        thread_name="wg",
        interpret=plgpu.InterpretParams(detect_races=True),
    )(a, b)
    np.testing.assert_allclose(got, exact(a, b), atol=2e-5)


# --- mistakes -------------------------------------------------------------------------

SQUARES = (normal(16, (64, 64), F16), normal(17, (64, 64), F16))


def failing(inner, asynchrony="random"):
    """Runs `inner(acc, sa, sb, o)` and returns the text of the error."""

    def body(sa, sb, o):
        def scope(acc):
            inner(acc, sa, sb, o)

        plgpu.run_scoped(scope, plgpu.ACC((64, 64)))

    with pytest.raises(errors.PallasGpuError) as caught:
        run_body(body, *SQUARES, interpret=plgpu.InterpretParams(asynchrony=asynchrony))
    return caught.value, str(caught.value)


@pytest.mark.parametrize("asynchrony", ASYNCHRONY)
def test_overwriting_an_operand_before_the_wait_is_a_race(asynchrony):
    def inner(acc, sa, sb, o):
        plgpu.wgmma(acc, sa, sb.T)
        sb[...] = jnp.zeros((64, 64), F16)
        o[...] = acc[...]

    error, text = failing(inner, asynchrony)
    assert isinstance(error, errors.RaceError)
    assert "is written while the wgmma may still read it" in text
    assert "wgmma_wait" in text
    assert text.count("test_wgmma.py") >= 2, "both lines are named"


@pytest.mark.parametrize("asynchrony", ASYNCHRONY)
def test_copying_over_an_operand_before_the_wait_is_a_race(asynchrony):
    def body(a_ref, b_ref, o, sa, sb, barrier):
        load_both(a_ref, b_ref, sa, sb, barrier)

        def scope(acc):
            plgpu.wgmma(acc, sa, sb.T)
            load_both(a_ref, b_ref, sa, sb, barrier)
            return acc[...]

        o[...] = plgpu.run_scoped(scope, plgpu.ACC((64, 64)))

    run = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 64), F32),
        scratch_types=[
            tiles((64, 64), F16),
            tiles((64, 64), F16),
            plgpu.Barrier(num_arrivals=2),
        ],
        interpret=plgpu.InterpretParams(asynchrony=asynchrony),
    )
    with pytest.raises(errors.RaceError, match="the wgmma may still read it"):
        run(*SQUARES)


def test_a_wait_that_leaves_one_group_frees_the_operands_of_the_older_ones():
    def inner(acc, sa, sb, o):
        upper, lower = (plgpu.ds(n, 32) for n in (0, 32))
        plgpu.wgmma(acc.at[:, 0:32], sa, sb.at[upper].T)
        plgpu.wgmma(acc.at[:, 32:64], sa, sb.at[lower].T)
        plgpu.wgmma_wait(1)
        sb[upper] = jnp.zeros((32, 64), F16)
        sb[lower] = jnp.zeros((32, 64), F16)

    _, text = failing(inner)
    assert "[32:64, 0:64]" in text
    assert "may still read it" in text


def test_an_operand_that_threads_wrote_needs_commit_smem():
    def inner(acc, sa, sb, o):
        sa[...] = sa[...] * 2
        plgpu.wgmma(acc, sa, sb.T)

    error, text = failing(inner)
    assert isinstance(error, errors.RaceError)
    assert "the wgmma reads SMEM float16[64, 64]" in text
    assert "call commit_smem()" in text


def test_an_operand_whose_copy_nobody_waited_for_is_a_race():
    def body(a_ref, b_ref, o, sa, sb, barrier):
        plgpu.copy_gmem_to_smem(a_ref, sa, barrier)
        plgpu.copy_gmem_to_smem(b_ref, sb, barrier)

        def scope(acc):
            plgpu.wgmma(acc, sa, sb.T)

        plgpu.run_scoped(scope, plgpu.ACC((64, 64)))

    run = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 64), F32),
        scratch_types=[
            tiles((64, 64), F16),
            tiles((64, 64), F16),
            plgpu.Barrier(num_arrivals=2),
        ],
    )
    with pytest.raises(errors.RaceError, match="read before the copy from input 0"):
        run(*SQUARES)


@refused_by(
    lambda body: plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 64), F32),
        scratch_types=[tiles((64, 64), F16)],
    )()
)
def test_an_operand_that_nobody_wrote_is_an_uninitialised_read(o, sa):
    def scope(acc):
        plgpu.wgmma(acc, sa, sa)

    plgpu.run_scoped(scope, plgpu.ACC((64, 64)))


@pytest.mark.parametrize("asynchrony", ASYNCHRONY)
def test_reading_an_accumulator_in_flight_is_an_error(asynchrony):
    def inner(acc, sa, sb, o):
        plgpu.wgmma(acc, sa, sb.T)
        o[...] = plgpu.wgmma_accumulator_load(acc, wait_n=None)

    error, text = failing(inner, asynchrony)
    assert isinstance(error, errors.RaceError)
    assert "is read while a wgmma may still add to it" in text
    assert "wgmma_wait(0)" in text
    assert text.count("test_wgmma.py") >= 2, "both lines are named"


def test_an_accumulator_may_be_read_while_another_is_in_flight():
    a, b = SQUARES

    def body(sa, sb, o):
        def scope(first, second):
            plgpu.wgmma(first, sa, sb.T)
            plgpu.wgmma(second, sa, sb.T)
            o[...] = plgpu.wgmma_accumulator_load(first, wait_n=1)
            plgpu.wgmma_wait(0)

        plgpu.run_scoped(scope, plgpu.ACC((64, 64)), plgpu.ACC((64, 64)))

    np.testing.assert_allclose(run_body(body, a, b), exact(a, b), atol=2e-5)


def test_a_kernel_may_not_end_with_a_product_nobody_waited_for():
    def inner(acc, sa, sb, o):
        plgpu.wgmma(acc, sa, sb.T)

    error, text = failing(inner)
    assert isinstance(error, errors.KernelError)
    assert "freed while the wgmma may still read it" in text
    assert "wgmma_wait" in text


# --- register counts ------------------------------------------------------------------


def with_registers(*counts):
    def body(o):
        for i, (n, action) in enumerate(counts):

            @plgpu.when(lax.axis_index("wg") == i)
            def _(n=n, action=action):
                plgpu.set_max_registers(n, action=action)
                o[...] = jnp.zeros(4)

    plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((4,), F32),
        num_threads=len(counts),
        thread_name="wg",
    )()


def test_registers_that_fit_have_no_effect():
    with_registers((40, "decrease"), (232, "increase"), (232, "increase"))


@refused
def test_registers_of_all_warpgroups_have_to_fit_the_file():
    with_registers((56, "decrease"), (240, "increase"), (240, "increase"))


def test_optimization_barrier_is_the_identity():
    def body(x, o):
        o[...] = lax.optimization_barrier(x[...])

    run = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((128,), F32))
    np.testing.assert_array_equal(run(jnp.arange(128.0)), np.arange(128.0))


def test_a_start_inside_of_a_tile_is_an_error_also_when_it_is_dynamic():
    def inner(acc, sa, sb, o):
        @plgpu.loop(0, 2)
        def _(k):
            part = plgpu.ds(k * 4, 32)
            plgpu.wgmma(acc.at[:, 0:32], sa, sb.at[part].T)
            plgpu.wgmma_wait(0)

    error, text = failing(inner)
    assert isinstance(error, errors.LayoutError)
    assert "from inside a tile" in text and "starts (4, 0)" in text

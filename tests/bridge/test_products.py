# SPDX-License-Identifier: Apache-2.0
"""Matrix products of blocks and of values: operands of any type and order."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

import pallas_gpu as plgpu
from tests.support.lockstep import kernels as in_lockstep
from tests.support.received import with_our_kernel
from tests.support.refusal import refused

RNG = np.random.default_rng(0)
# float32 is read as tf32, 10 bits of mantissa; sums of 8-bit floats have 13 bits.
TYPES = {"bfloat16": 1e-5, "float32": 1e-2, "int8": 0.0, "float8_e4m3fn": 2e-4}
OF_ROWS = (((1,), (1,)), ((), ()))


def call(body, out, *args, **options):
    return pl.pallas_call(
        body, out_shape=out, compiler_params=plgpu.CompilerParams(), **options
    )(*args)


def numbers(dtype, *shape):
    if dtype == "int8":
        return jnp.asarray(RNG.integers(-8, 8, shape), jnp.int8)
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def everywhere(function, *args):
    """Results of the emulator, and of the emitted code."""
    executed = in_lockstep.run(with_our_kernel(function), args)
    emulated = function(*args)
    return emulated, executed if isinstance(emulated, list | tuple) else executed[0]


def float64(x):
    return np.asarray(x).astype(np.float64)


def check(body, args, expected, atol=1e-4, dtype=jnp.float32):
    """Compares one result, everywhere."""

    out = jax.ShapeDtypeStruct(expected.shape, dtype)
    for result in everywhere(functools.partial(call, body, out), *args):
        assert np.all(abs(result - expected) <= atol)


@pytest.mark.parametrize(
    ("dtype", "turned"),
    [
        *itertools.product(["bfloat16", "float32"], itertools.product([0, 1], [0, 1])),
        ("int8", (0, 1)),
        ("int8", (1, 0)),
        ("float8_e4m3fn", (0, 0)),
    ],
)
def test_blocks_in_any_order(dtype, turned):
    """Transposes are given to the tensor core where it has them."""
    a, b = numbers(dtype, 64, 64), numbers(dtype, 64, 128)
    out = jnp.int32 if dtype == "int8" else jnp.float32

    def body(a_ref, b_ref, o_ref):
        x, y = a_ref[...], b_ref[...]
        o_ref[...] = jnp.dot(
            x.T if turned[0] else x,
            y.T if turned[1] else y,
            preferred_element_type=out,
        )

    stored = (a.T if turned[0] else a, b.T if turned[1] else b)
    scale = np.abs(float64(a)) @ np.abs(float64(b))
    check(body, stored, float64(a) @ float64(b), TYPES[dtype] * scale, out)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_values_in_registers(dtype):
    """The left one stays in registers if the tensor core reads its type there."""
    a, b = numbers(dtype, 64, 64), numbers(dtype, 128, 64)
    out = jnp.int32 if dtype == "int8" else jnp.float32

    def body(a_ref, b_ref, o_ref):
        x, y = a_ref[...] + a_ref[...], b_ref[...] * 2
        o_ref[...] = lax.dot_general(x, y, OF_ROWS, preferred_element_type=out)

    scale = 4 * np.abs(float64(a)) @ np.abs(float64(b)).T
    check(body, (a, b), 4 * float64(a) @ float64(b).T, TYPES[dtype] * scale, out)


def test_vectors():
    v, m = numbers("float32", 64), numbers("float32", 64, 128)

    def body(v_ref, m_ref, rows_ref, columns_ref, total_ref):
        rows_ref[...] = jnp.dot(v_ref[...], m_ref[...])
        columns_ref[...] = jnp.dot(m_ref[...].T, v_ref[...])
        total_ref[...] = jnp.full((128,), jnp.dot(v_ref[...], v_ref[...]))

    out = [jax.ShapeDtypeStruct((128,), jnp.float32)] * 3
    for rows, columns, total in everywhere(functools.partial(call, body, out), v, m):
        np.testing.assert_allclose(rows, float64(v) @ float64(m), atol=1e-4)
        np.testing.assert_allclose(columns, rows, atol=1e-4)
        np.testing.assert_allclose(total, float64(v) @ float64(v), atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int64, jnp.float64])
def test_sums_of_64_bits(dtype):
    """64-bit operands, or a wanted result of 64 bits, are not added in 32."""
    with jax.enable_x64(True):
        out = jnp.dtype(dtype) if dtype == jnp.float64 else jnp.dtype(jnp.int64)
        v = (jnp.arange(64) + 2**28).astype(dtype)

        def body(v_ref, o_ref):
            total = jnp.dot(v_ref[...], v_ref[...], preferred_element_type=out)
            o_ref[...] = jnp.full((64,), total)

        product = functools.partial(call, body, jax.ShapeDtypeStruct((64,), out))
        expected = sum((i + 2**28) ** 2 for i in range(64))
        # Exact in float64, too, but for its 53 bits.
        most = 2**16 if dtype == jnp.float64 else 0
        for result in everywhere(product, v):
            assert result.dtype == out
            assert abs(int(result[0]) - expected) <= most


@pytest.mark.parametrize(
    ("n", "in_registers"), [(8, False), (24, True), (264, True), (320, False)]
)
def test_any_multiple_of_8_columns(n, in_registers):
    """More than an instruction has; what no swizzle divides is stored by columns."""
    a, b = numbers("bfloat16", 64, 32), numbers("bfloat16", 32, n)

    def body(a_ref, b_ref, o_ref):
        right = b_ref[...] * 1 if in_registers else b_ref[...]
        o_ref[...] = jnp.dot(a_ref[...], right, preferred_element_type=jnp.float32)

    check(body, (a, b), float64(a) @ float64(b))


@pytest.mark.parametrize(
    "pair",
    [("float32", "bfloat16"), ("bfloat16", "float32"), ("float8_e4m3fn", "bfloat16")],
)
def test_operands_of_two_types(pair):
    """The narrower one is converted, in whichever order it is stored."""
    a, b = numbers(pair[0], 64, 64), numbers(pair[1], 128, 64)

    def body(a_ref, b_ref, o_ref):
        x, y = a_ref[...], b_ref[...]
        o_ref[...] = lax.dot_general(x, y, OF_ROWS, preferred_element_type=jnp.float32)

    scale = np.abs(float64(a)) @ np.abs(float64(b)).T
    check(body, (a, b), float64(a) @ float64(b).T, 1e-2 * scale)


def test_a_product_with_a_vector_has_any_precision():
    """It is added in float32, not on the tensor core."""
    v, m = numbers("float32", 64), numbers("float32", 64, 64)

    def body(v_ref, m_ref, o_ref):
        o_ref[...] = jnp.dot(m_ref[...], v_ref[...], precision="highest")

    check(body, (v, m), float64(m) @ float64(v))


@pytest.mark.parametrize(("shape", "sums"), [((64, 64), 2), ((), 0)])
def test_sums_over_other_than_one_dimension(shape, sums):
    a, b = numbers("float32", 64, 64), numbers("float32", 1, *shape)

    def body(a_ref, b_ref, o_ref):
        axes = tuple(range(sums))
        dimensions = ((axes, axes), ((), ()))
        result = lax.dot_general(a_ref[...], b_ref[0], dimensions)
        o_ref[...] = jnp.broadcast_to(result, (64, 64))

    expected = np.tensordot(float64(a), float64(b)[0], sums)
    check(body, (a, b), np.broadcast_to(expected, (64, 64)), 1e-3)


@pytest.mark.offline
def test_a_product_of_blocks_reads_them_from_smem():
    """Nothing is loaded to registers on the way."""

    def body(a_ref, b_ref, o_ref):
        o_ref[...] = jnp.dot(
            a_ref[...], b_ref[...].T, preferred_element_type=jnp.float32
        )

    a = numbers("bfloat16", 64, 64)
    (report,) = plgpu.offline.compile(
        lambda a: call(body, jax.ShapeDtypeStruct((64, 64), jnp.float32), a, a), a
    )
    assert "ld.shared" not in report.ptx and "ldmatrix" not in report.ptx


@refused
def test_a_precision_that_kernels_do_not_have():
    def body(a_ref, o_ref):
        o_ref[...] = jnp.matmul(a_ref[...], a_ref[...], precision="F64_F64_F64")

    a = numbers("float32", 64, 64)
    call(body, jax.ShapeDtypeStruct((64, 64), jnp.float32), a)

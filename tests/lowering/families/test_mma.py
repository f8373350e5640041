# SPDX-License-Identifier: Apache-2.0
"""mma.sync: fragments of every type, divisions among the warps, what it refuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu.layouts.registers.fragments import MmaShape
from tests.support import everywhere, host
from tests.support.refusal import refused
from tests.support.semantics import Lane, Warpgroup, under

INTEGERS = ("int8", "uint8", "int4", "uint4")
# Of the magnitudes: float32 is read as tf32, sums of 8-bit floats have 13 bits in the
# emulator.
TOLERANCE = {"float32": 2e-3, "float8_e4m3fn": 5e-4, "float8_e5m2": 5e-4}


def numbers(rng, dtype, *shape):
    if dtype in INTEGERS:
        limits = jnp.iinfo(dtype)
        return host.array(rng.integers(limits.min, limits.max + 1, shape), dtype)
    return host.array(rng.standard_normal(shape), dtype)


def float64(x):
    return np.asarray(x).astype(np.float64)


def check_mma(rng, pair, shape, m_warps=None):
    """Adds a product to a value; with m_warps the layouts are those of a division."""
    m, n, k = shape
    a, b = numbers(rng, pair[0], m, k), numbers(rng, pair[1], k, n)
    out = jnp.dtype(jnp.int32 if pair[0] in INTEGERS else jnp.float32)
    c = numbers(rng, "int8" if out == jnp.int32 else "float32", m, n).astype(out)
    bits = 4 if pair[0].endswith("int4") else 8 * a.dtype.itemsize
    division = MmaShape.best(m, n, k, bits)
    if m_warps is not None:
        division = MmaShape(m, n, k, bits, m_warps)

    def body(c_ref, a_ref, b_ref, o_ref):
        o_ref[...] = plgpu.mma(
            plgpu.layout_cast(c_ref[...], division.acc),
            plgpu.layout_cast(a_ref[...], division.lhs),
            plgpu.layout_cast(b_ref[...], division.rhs),
        )

    scale = (abs(float64(a)) @ abs(float64(b))).max()
    atol = 0 if out == jnp.int32 else TOLERANCE.get(pair[0], 1e-6) * scale
    expected = float64(c) + float64(a) @ float64(b)
    everywhere.run(
        body, [c, a, b], expected, out=jax.ShapeDtypeStruct((m, n), out), atol=atol
    )


@pytest.mark.smoke
@pytest.mark.parametrize(
    "pair",
    [
        ("float16", "float16"),
        ("bfloat16", "bfloat16"),
        ("float32", "float32"),
        ("int8", "int8"),
        ("uint8", "int8"),
        ("int8", "uint8"),
        ("int4", "int4"),
        ("uint4", "int4"),
        ("float8_e4m3fn", "float8_e5m2"),
        ("float8_e5m2", "float8_e5m2"),
    ],
    ids="-".join,
)
def test_types(rng, pair):
    check_mma(rng, pair, (32, 32, 64))


@pytest.mark.parametrize("shape", [(64, 8, 16), (16, 32, 16), (32, 16, 48)])
def test_one_tile_of_each_division(rng, shape):
    check_mma(rng, ("bfloat16", "bfloat16"), shape)


@pytest.mark.parametrize("m_warps", [1, 2, 4])
def test_any_division_of_a_larger_product(rng, m_warps):
    check_mma(rng, ("float16", "float16"), (128, 64, 32), m_warps)


@everywhere.gives(
    [], lambda: np.full((32, 32), 34.0), out=jax.ShapeDtypeStruct((32, 32), jnp.float32)
)
def test_operands_without_a_layout_adopt_one(o_ref):
    """Constants take part in whatever division the others have."""

    ones = jnp.ones((32, 32), jnp.bfloat16)
    o_ref[...] = plgpu.mma(jnp.full((32, 32), 2.0), ones, ones)


def test_sums_of_integers_wrap(rng):
    a = jnp.full((32, 64), 255, jnp.uint8)

    def body(a_ref, o_ref):
        start = jnp.full((32, 32), 2**31 - 1, jnp.int32)
        o_ref[...] = plgpu.mma(start, a_ref[...], a_ref[...].T)

    wrapped = np.int64(2**31 - 1 + 64 * 255**2).astype(np.int32)
    everywhere.run(
        body,
        [a],
        np.full((32, 32), wrapped),
        semantics=[Warpgroup],
        executed=[Warpgroup],
    )


def traced(c, a, b):
    def body(o):
        plgpu.mma(c, a, b)  # HERE

    jax.eval_shape(everywhere.kernel(body, jnp.zeros((64, 64)))())


@pytest.mark.parametrize(
    "types",
    [
        ("float32", "int16", "int16"),
        ("float32", "float16", "bfloat16"),
        ("float16", "float16", "float16"),
        ("float32", "int8", "int8"),
    ],
    ids="-".join,
)
@refused
def test_types_without_an_instruction_are_refused(types):
    traced(*(np.zeros((64, 64), jnp.dtype(t)) for t in types))


@pytest.mark.parametrize(
    "shapes",
    [
        ((64, 64), (64, 32), (64, 64)),
        ((24, 64), (24, 32), (32, 64)),
        ((64, 64), (64, 24), (24, 64)),
        ((16, 16), (16, 32), (32, 16)),
    ],
    ids=str,
)
@refused
def test_shapes_without_an_instruction_are_refused(shapes):
    c, a, b = (np.zeros(s, np.float32) for s in shapes)
    traced(c, a.astype(jnp.bfloat16), b.astype(jnp.bfloat16))


@refused
def test_operands_in_other_layouts_are_refused_under_lane():
    def body(a, o):
        o[...] = plgpu.mma(jnp.zeros((64, 64)), a[...], a[...])  # HERE

    kernel = everywhere.kernel(body, jnp.zeros((64, 64)))()
    plgpu.offline.lower(under(Lane, kernel), jnp.zeros((64, 64), jnp.bfloat16))


GOOD = {
    "mma": lambda e: {
        "acc": jnp.zeros((64, 64)),
        "a": jnp.zeros((64, 32)),
        "b": jnp.zeros((32, 64)),
    }
}

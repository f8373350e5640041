# SPDX-License-Identifier: Apache-2.0
"""Fused epilogues of the matrix product, their derivatives, and what they refuse."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import ops
from tests.support import emulated, host
from tests.support.semantics import Warpgroup

# Two parts of a tile are stored after each other, in two buffers.
SMALL = ops.MatmulConfig(
    tile_m=64,
    tile_n=64,
    tile_k=64,
    stages=2,
    epilogue_n=32,
    blocks=2,
    cluster=None,
    strip=2,
)
M, N, K = 136, 72, 40
BLACKWELL = plgpu.CompilerParams(target="sm_100a")
FUNCTIONS = {
    None: lambda x: x,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
    jnp.sin: jnp.sin,
}


def normal(*shape, seed=0, dtype=jnp.float16):
    rng = np.random.default_rng(seed)
    return host.array(rng.standard_normal(shape) * 0.5, dtype)


def operands(*names, m=M, n=N, k=K, dtype=jnp.float16):
    shapes = {"bias": (n,), "residual": (m, n), "gate": (k, n)}
    arrays = {
        name: normal(*shapes[name], seed=i, dtype=dtype)
        for i, name in enumerate(names, 2)
    }
    return normal(m, k, dtype=dtype), normal(k, n, seed=1, dtype=dtype), arrays


def reference(a, b, arrays, activation=None, scale=1.0):
    """Computes in float32, from rounded operands."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    arrays = {name: x.astype(jnp.float32) for name, x in arrays.items()}
    product = scale * jnp.matmul(a, b, precision="highest")
    if "gate" in arrays:
        gate = scale * jnp.matmul(a, arrays["gate"], precision="highest")
        product = FUNCTIONS[activation or "silu"](gate) * product
    else:
        product = FUNCTIONS[activation](product + arrays.get("bias", 0.0))
    return product + arrays.get("residual", 0.0)


def rounding(expected):
    """The bound of a float16 result's error."""
    return 2**-11 * float(jnp.abs(expected).max())


CASES = [
    (("bias",), {}),
    (("bias",), {"activation": "relu"}),
    (("bias", "residual"), {"activation": "gelu", "scale": 0.5}),
    (("residual",), {"activation": "gelu_exact"}),
    ((), {"activation": jnp.sin}),
    (("gate",), {}),
    (("gate", "residual"), {"activation": "gelu", "scale": 2.0}),
]


@pytest.mark.parametrize(("names", "options"), CASES)
def test_an_epilogue_is_applied_to_the_sums(names, options):
    a, b, arrays = operands(*names)
    keys = list(arrays)

    def make(interpret):
        how = {**options, "config": SMALL, "interpret": interpret}
        return lambda a, b, *others: ops.matmul(
            a, b, **dict(zip(keys, others, strict=True)), **how
        )

    args, expected = [a, b, *arrays.values()], reference(a, b, arrays, **options)
    emulated.check(make, args, expected, [Warpgroup], atol=rounding(expected))


def assert_close(got, expected):
    got = np.asarray(got, np.float32)
    np.testing.assert_allclose(got, expected, atol=rounding(expected))


@pytest.mark.parametrize("changes", [{"transposed": True}, {"parts": 3, "tile_k": 16}])
def test_an_epilogue_of_a_transposed_or_divided_product(changes):
    a, b, arrays = operands("bias", "residual")
    options = {"activation": "gelu", "scale": 0.5}
    c = dataclasses.replace(SMALL, **changes)
    got = ops.matmul(a, b, **arrays, **options, config=c)
    assert_close(got, reference(a, b, arrays, **options))


@pytest.mark.parametrize(("names", "options"), [CASES[2], CASES[5]])
def test_derivatives_are_those_of_plain_jax(names, options):
    a, b, arrays = operands(*names, m=20, n=24, k=16)
    weights = normal(20, 24, seed=9, dtype=jnp.float32)

    def loss(f, *args):
        return jnp.sum(f(*args).astype(jnp.float32) * weights)

    def fused(a, b, arrays):
        return ops.matmul(a, b, **arrays, **options)

    def plain(a, b, arrays):
        return reference(a, b, arrays, **options)

    got = jax.grad(functools.partial(loss, fused), (0, 1, 2))(a, b, arrays)
    # Jitted: JAX would compile each operation of the reference.
    wanted = jax.jit(jax.grad(functools.partial(loss, plain), (0, 1, 2)))
    expected = wanted(a, b, arrays)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_allclose(x, y, atol=2**-8 * np.abs(y).max())


@pytest.mark.parametrize(
    ("transpose_a", "transpose_b", "batch"),
    [
        (False, False, ((), ())),
        (False, True, ((2,), (2,))),
        (True, False, ((2,), ())),
        (True, True, ((), (2,))),
    ],
)
def test_derivatives_of_transposed_operands_and_batches(
    transpose_a, transpose_b, batch
):
    a = normal(*batch[0], *((24, 20) if transpose_a else (20, 24)))
    b = normal(*batch[1], *((16, 24) if transpose_b else (24, 16)), seed=1)

    def turned(x, transposed):
        return x.swapaxes(-1, -2) if transposed else x

    def fused(a, b):
        options = {"transpose_a": transpose_a, "transpose_b": transpose_b}
        return jnp.sum(jnp.sin(ops.matmul(a, b, **options, out_dtype=jnp.float32)))

    def plain(a, b):
        a, b = (x.astype(jnp.float32) for x in (a, b))
        product = turned(a, transpose_a) @ turned(b, transpose_b)
        return jnp.sum(jnp.sin(product))

    got, expected = (jax.grad(f, (0, 1))(a, b) for f in (fused, plain))
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=2**-7 * float(jnp.abs(y).max()))


def test_a_derivative_of_float32():
    a, b, arrays = operands("bias", m=20, n=21, k=17, dtype=jnp.float32)

    def fused(a, b, bias):
        return jnp.sum(ops.matmul(a, b, bias=bias, activation="silu"))

    def plain(a, b, bias):
        return jnp.sum(reference(a, b, {"bias": bias}, activation="silu"))

    got = jax.grad(fused, (0, 1, 2))(a, b, arrays["bias"])
    expected = jax.jit(jax.grad(plain, (0, 1, 2)))(a, b, arrays["bias"])
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=2**-8 * float(jnp.abs(y).max()))


def test_a_derivative_of_a_derivative():
    a, b, _ = operands(m=20, n=24, k=16, dtype=jnp.float32)

    def second(f):
        def slope(a):
            return jnp.sum(jax.grad(lambda x: jnp.sum(jnp.sin(f(x, b))))(a) ** 2)

        return jax.grad(slope)(a)

    got = second(functools.partial(ops.matmul, activation="silu"))
    expected = second(jax.jit(lambda a, b: reference(a, b, {}, activation="silu")))
    np.testing.assert_allclose(got, expected, atol=2**-6 * float(jnp.max(expected)))


def test_the_types_of_bias_residual_and_result():
    a, b, arrays = operands("bias", "residual")
    arrays["residual"] = arrays["residual"].astype(jnp.float32)
    arrays["bias"] = arrays["bias"].astype(jnp.bfloat16)
    got = ops.matmul(a, b, **arrays, config=SMALL, out_dtype=jnp.float32)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, reference(a, b, arrays), atol=1e-5)


@pytest.mark.parametrize("names", [("bias",), ("residual",), ("gate",)])
def test_an_epilogue_of_int8_is_computed_in_float32(names):
    a, b, arrays = operands(*names, m=20, n=24, k=32)
    a, b = (jnp.round(8 * x).astype(jnp.int8) for x in (a, b))
    if "gate" in arrays:
        arrays["gate"] = jnp.round(2 * arrays["gate"]).astype(jnp.int8)
    options = {"activation": "gelu", "scale": 0.01}
    got = ops.matmul(a, b, **arrays, **options)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, reference(a, b, arrays, **options), atol=1e-4)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_the_derivative_for_a_bias_of_int8(activation):
    a, b, arrays = operands("bias", m=20, n=24, k=32)
    a, b = (jnp.round(2 * x).astype(jnp.int8) for x in (a, b))
    bias = arrays["bias"].astype(jnp.float32)

    def fused(bias):
        return jnp.sum(ops.matmul(a, b, bias=bias, activation=activation, scale=0.1))

    def plain(bias):
        return jnp.sum(reference(a, b, {"bias": bias}, activation, scale=0.1))

    got, expected = (jax.grad(f)(bias) for f in (fused, plain))
    np.testing.assert_allclose(got, expected, rtol=1e-4)


def test_an_epilogue_of_a_batch():
    a, b, arrays = operands("bias")
    batch, residual = jnp.stack([a, 2 * a]), normal(2, M, N, seed=5)
    got = ops.matmul(batch, b, **arrays, residual=residual, config=SMALL)
    arrays["residual"] = residual
    expected = reference(batch, b, arrays)
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, atol=2**-7)


def test_on_blackwell_xla_applies_it():
    for names, options in CASES[2], CASES[6]:
        a, b, arrays = operands(*names)
        got = ops.matmul(a, b, **arrays, **options, compiler_params=BLACKWELL)
        assert_close(got, reference(a, b, arrays, **options))

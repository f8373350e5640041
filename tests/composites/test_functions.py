# SPDX-License-Identifier: Apache-2.0
"""Functions of elements, compared with NumPy's and SciPy's in float64."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from scipy import special

from tests.support import everywhere

SPECIAL = (0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 2.0, 3.0, -2.0, -0.5, 0.5)
LIMITS = (1e-6, 1 - 6e-8, 100.0, 1e10, -1e-6, 3e38, -3e38)
# Of a relative error: 4 units in the last place, where XLA's function has no more.
ROUNDED = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 5e-7, "float64": 2e-15}


def values(dtype: str, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    """Ordinary and awkward numbers."""
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(4, 128)) * scale).astype(dtype)
    awkward = np.array([v for v in (*SPECIAL, *LIMITS) if abs(v) < 6e4 or v != v])
    if np.dtype(dtype).itemsize >= 4:
        awkward = np.array((*SPECIAL, *LIMITS))
    x.flat[: len(awkward)] = awkward.astype(dtype)
    return x


def check(
    function: Callable,
    args: list,
    expected: np.ndarray,
    rtol: float,
    atol: float = 0.0,
    emulate: bool = True,
) -> None:
    make = everywhere.elementwise(function, args[0].dtype, shape=args[0].shape)
    with np.errstate(all="ignore"):
        expected = expected.astype(args[0].dtype)
        everywhere.check(make, args, expected, rtol=rtol, atol=atol, emulate=emulate)


def in_float64(function: Callable, *args: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.asarray(function(*(x.astype(np.float64) for x in args)))


LIBRARY = {
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
}


@pytest.mark.parametrize("dtype", [*ROUNDED])
@pytest.mark.parametrize("name", [*LIBRARY])
def test_a_function_of_the_library_is_that_of_float64_rounded(name: str, dtype: str):
    with jax.enable_x64(dtype == "float64"):
        x = values(jnp.dtype(dtype))
        expected = in_float64(LIBRARY[name], x)
        check(getattr(lax, name), [x], expected, ROUNDED[dtype])


# The tolerances of float32 and float64: relative, absolute. Near the zeros of gamma
# functions Lanczos's sum cancels, as XLA's does.
COMPOSITES: dict[str, tuple[Callable, tuple[float, float], tuple[float, float]]] = {
    "erf_inv": (special.erfinv, (6e-7, 0), (2e-15, 0)),
    "lgamma": (special.gammaln, (1e-5, 2e-6), (1e-14, 2e-14)),
    "digamma": (special.digamma, (1e-5, 2e-6), (1e-13, 1e-14)),
    "bessel_i0e": (special.i0e, (1e-6, 0), (2e-15, 0)),
    "bessel_i1e": (special.i1e, (2e-6, 0), (4e-15, 0)),
}


@pytest.mark.parametrize("dtype", [*ROUNDED])
@pytest.mark.parametrize("name", [*COMPOSITES])
def test_a_special_function_is_that_of_float64_rounded(name: str, dtype: str):
    reference, single, double = COMPOSITES[name]
    with jax.enable_x64(dtype == "float64"):
        x = values(jnp.dtype(dtype))
        if name == "erf_inv":
            x = np.clip(x, -1, 1)
            x[1:] = np.tanh(x[1:].astype(np.float64)).astype(x.dtype)
        expected = in_float64(reference, x)
        # JAX has -inf for zeros of both signs, and the limit of the absolute value.
        if name == "digamma":
            expected = np.where(x == 0, -np.inf, expected)
        if name == "lgamma":
            expected = np.where(x == -np.inf, np.inf, expected)
        with np.errstate(over="ignore"):
            expected = expected.astype(x.dtype)
        rtol, atol = double if dtype == "float64" else single
        function, rtol = getattr(lax, name), max(rtol, ROUNDED[dtype])
        emulated = everywhere.elementwise(function, x.dtype, shape=x.shape)(True)(x)
        # XLA's error next to 1 is larger.
        np.testing.assert_allclose(
            np.float64(emulated), np.float64(expected), max(rtol, 2e-11), atol
        )
        check(function, [x], expected, rtol, atol, emulate=False)


def test_small_numbers_do_not_cancel():
    x = np.float32([1e-30, -1e-20, 1e-7, -1e-5] * 32)
    for name in ("asinh", "atanh", "sinh", "atan", "erf_inv"):
        reference = LIBRARY.get(name, special.erfinv)
        check(getattr(lax, name), [x], in_float64(reference, x), 5e-7)


def test_large_numbers_do_not_overflow_in_between():
    x = np.float32([3e38, 1e20, 88.0, 3e19] * 32)
    for name in ("asinh", "acosh"):
        check(getattr(lax, name), [x], in_float64(LIBRARY[name], x), 5e-7)
    check(lax.cosh, [np.float32([89.0] * 128)], np.cosh([89.0] * 128), 5e-6)


def test_zeta_where_it_is_infinite_and_where_it_is_undefined():
    s, q = np.meshgrid(
        np.float32([-2, -0.5, 0, 0.5, 1, 1.5, 2, 3]), np.float32([-3, -2.5, 0, 2])
    )
    expected = np.asarray(jax.jit(lax.zeta)(s, q))
    assert np.isinf(expected).any() and np.isnan(expected).any()
    check(lax.zeta, [s, q], expected, 1e-5)


def test_zeta_and_polygamma():
    rng = np.random.default_rng(1)
    s = rng.uniform(1.1, 12, (2, 128)).astype(np.float32)
    q = rng.uniform(0.1, 30, (2, 128)).astype(np.float32)
    check(lax.zeta, [s, q], in_float64(special.zeta, s, q), 1e-5)
    n = rng.integers(1, 6, (2, 128)).astype(np.float32)
    expected = special.polygamma(n.astype(int), q.astype(np.float64))
    check(lax.polygamma, [n, q], expected, 2e-5)
    n[0, :4], q[0, :4] = (-1, 1.5, 1, 0), (2, 2, -2, 3)
    expected = np.asarray(lax.polygamma(n, q))
    check(lax.polygamma, [n, q], expected, 2e-5)


@pytest.mark.parametrize("name", ["igamma", "igammac", "igamma_grad_a"])
def test_incomplete_gamma_functions(name: str):
    rng = np.random.default_rng(2)
    a, x = rng.uniform(0.1, 20, (2, 4, 128)).astype(np.float32)
    expected = np.asarray(getattr(lax, name)(a, x))
    check(getattr(lax, name), [a, x], expected, 2e-5, 1e-6)


def test_the_incomplete_beta_function():
    rng = np.random.default_rng(3)
    a, b = rng.uniform(0.1, 20, (2, 4, 128)).astype(np.float32)
    x = rng.uniform(0, 1, (4, 128)).astype(np.float32)
    expected = in_float64(special.betainc, a, b, x)
    check(lax.betainc, [a, b, x], expected, 2e-5, 1e-5)


# --- bits of floats -------------------------------------------------------------------

FLOATS = ("float16", "bfloat16", "float32", "float64")


def pairs(dtype: str) -> list[np.ndarray]:
    """Every awkward number with every other one."""
    kind, info = jnp.dtype(dtype), jnp.finfo(dtype)
    least = info.smallest_subnormal
    some = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1.5, -1e-6]
    some += [least, -least, info.max, -info.max, info.tiny, -info.tiny, 0.1]
    row = np.array(some).astype(kind)
    return [np.resize(np.repeat(row, 16), (2, 128)), np.resize(row, (2, 128))]


def bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def check_bits(function: Callable, args: list, expected: np.ndarray) -> None:
    raw = np.dtype(f"uint{8 * args[0].dtype.itemsize}")
    make = everywhere.elementwise(
        lambda *xs: bits(jnp.where(xs[0] != xs[0], 0, function(*xs))),
        raw,
        shape=args[0].shape,
    )
    expected = np.where(np.isnan(args[0]), 0, expected).astype(args[0].dtype)
    everywhere.check(make, args, expected.view(raw))


@pytest.mark.parametrize("name", ["nextafter", "copysign"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_bits_of_a_function_of_all_pairs(dtype: str, name: str):
    with jax.enable_x64(dtype == "float64"):
        x, y = pairs(dtype)
        if name == "nextafter":
            y = np.where(np.isnan(y), 0, y).astype(x.dtype)
        check_bits(getattr(jnp, name), [x, y], getattr(np, name)(x, y))


def test_nextafter_of_nan_is_nan():
    x = np.float32([1.0, np.nan] * 64)
    check(lax.nextafter, [x, x[::-1].copy()], np.full(128, np.nan), 0)


@pytest.mark.parametrize("width", [(5, 2), (8, 7), (3, 20), (4, 1), (11, 52), (5, 10)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_reduce_precision_rounds_as_jax_does(dtype: str, width: tuple[int, int]):
    with jax.enable_x64(dtype == "float64"):
        x = np.concatenate([*pairs(dtype), values(jnp.dtype(dtype), scale=50)])

        def function(x):
            return lax.reduce_precision(x, *width)

        # Without the denormals, which XLA's CPU backend flushes.
        tiny = float(jnp.finfo(dtype).tiny)
        x = np.where(np.abs(x.astype(np.float64)) < tiny, 0, x).astype(x.dtype)
        check_bits(function, [x], np.asarray(function(x)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_powers_with_integers_as_exponents(dtype: str):
    x = np.array([2, -2, 0.5, 0, -0.0, 3, np.inf, np.nan], jnp.dtype(dtype))
    x = np.repeat(x, 16)
    y = np.tile([*range(-4, 11), 257], 8).astype(np.int32)
    make = everywhere.elementwise(lax.pow, x.dtype, shape=x.shape)
    # The exponent is rounded to the type of the base first, as it is outside kernels.
    exact = in_float64(np.power, x, y.astype(x.dtype))
    with np.errstate(over="ignore"):
        everywhere.check(make, (x, y), exact.astype(x.dtype), rtol=ROUNDED[dtype])

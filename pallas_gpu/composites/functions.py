# SPDX-License-Identifier: Apache-2.0
"""Functions of elements that consist of others."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gpu import _jax, types
from pallas_gpu.entry.expand import Composite, composite

_Function = Callable[..., Any]


def widened(function: _Function) -> _Function:
    """Returns a rule that computes 8- and 16-bit floats in float32."""

    @functools.wraps(function)
    def rule(composite: Composite, *operands: Any) -> Any:
        narrow = composite.out_aval.dtype
        wide = jnp.promote_types(narrow, jnp.float32) if _bits(narrow) > 8 else "f4"
        result = function(*(lax.convert_element_type(x, wide) for x in operands))
        return lax.convert_element_type(result, narrow)

    return rule


def _bits(dtype: Any) -> int:
    return 8 * np.dtype(dtype).itemsize


def polynomial(x: Any, coefficients: Sequence[float]) -> Any:
    """Returns a polynomial's value, by Horner's rule: the highest power is first."""
    result = jnp.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        result = result * x + np.asarray(c, x.dtype)
    return result


# --- the inverse of erf ---------------------------------------------------------------

# M. Giles, Approximating the erfinv function (2010): single precision, in w - 2.5 below
# w = 5 and in sqrt(w) - 3 above, where w = -log(1 - x * x).
_CENTRE = (
    *(2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 2.1858087e-04),
    *(-1.25372503e-03, -4.17768164e-03, 2.46640727e-01, 1.50140941),
)
_TAIL = (
    *(-2.00214257e-04, 1.00950558e-04, 1.34934322e-03, -3.67342844e-03, 5.73950773e-03),
    *(-7.6224613e-03, 9.43887047e-03, 1.00167406, 2.83297682),
)


@composite("erf_inv")
@widened
def _erf_inv(x: Any) -> Any:
    # -log(1 - x * x) would lose the digits of 1 - x.
    w = -(lax.log1p(x) + lax.log1p(-x))
    centre = polynomial(w - 2.5, _CENTRE)
    tail = polynomial(lax.sqrt(w) - 3.0, _TAIL)
    result = jnp.where(w < 5.0, centre, tail) * x
    if x.dtype == np.float64:
        result = _refined(result, x)
    return jnp.where(jnp.abs(x) == 1, x * np.inf, result)


def _refined(y: Any, x: Any) -> Any:
    """Two of Halley's steps towards erf(y) = x, in the numbers that cancel least."""
    size, y = jnp.abs(x), jnp.abs(y)
    for _ in range(2):
        centre, tail = lax.erf(y) - size, (1 - size) - lax.erfc(y)
        error = jnp.where(size < 0.5, centre, tail)
        y = y - error / (2 / math.sqrt(math.pi) * lax.exp(-y * y) + y * error)
    return jnp.where(x < 0, -y, y)


# --- gamma functions ------------------------------------------------------------------

# C. Lanczos, A precision approximation of the gamma function (1964), with g = 7 and
# nine coefficients, as XLA does.
_G = 7.0
_LANCZOS = (
    *(676.520368121885098567, -1259.13921672240287047, 771.323428777653078849),
    *(-176.615029162140599066, 12.5073432786869048145, -0.138571095265720116896),
    *(9.98436957801957085956e-6, 1.50563273514931155834e-7),
)


def _reflected(x: Any) -> tuple[Any, Any]:
    """Returns where x < 1/2, and z for which the gamma function of z + 1 is used."""
    below = x < 0.5
    return below, jnp.where(below, -x, x - 1.0)


def _distance_to_integer(x: Any) -> Any:
    """Returns |x| - floor(|x|), or its distance to 1 if that is less."""
    rest = jnp.abs(x) - lax.floor(jnp.abs(x))
    return jnp.where(rest > 0.5, 1.0 - rest, rest)


@composite("lgamma")
@widened
def _lgamma(x: Any) -> Any:
    return log_gamma(x)


def log_gamma(x: Any) -> Any:
    """Returns the logarithm of the gamma function's absolute value."""
    below, z = _reflected(x)
    total = jnp.full_like(z, 0.99999999999980993)
    for i, c in enumerate(_LANCZOS, 1):
        total = total + c / (z + i)
    t = z + (_G + 0.5)
    # The logarithm of t, more precise for small z.
    log_t = math.log(_G + 0.5) + lax.log1p(z / (_G + 0.5))
    above = (z + 0.5 - t / log_t) * log_t + 0.5 * math.log(2 * math.pi)
    above = above + lax.log(total)
    # log(pi / sin(pi |x|)) is infinite at whole numbers, which are the poles.
    sine = lax.log(lax.sin(math.pi * _distance_to_integer(x)))
    pole = jnp.isinf(sine)
    mirrored = jnp.where(pole, -sine, math.log(math.pi) - sine - above)
    result = jnp.where(below, mirrored, above)
    return jnp.where(jnp.isinf(x), np.asarray(np.inf, x.dtype), result)


@composite("digamma")
@widened
def _digamma(x: Any) -> Any:
    return digamma(x)


def digamma(x: Any) -> Any:
    """Returns the derivative of `log_gamma`; -inf at zero, NaN at the other poles."""
    below, z = _reflected(x)
    total, slope = jnp.full_like(z, 0.99999999999980993), jnp.zeros_like(z)
    for i, c in enumerate(_LANCZOS, 1):
        total = total + c / (z + i)
        slope = slope - c / ((z + i) * (z + i))
    t = z + (_G + 0.5)
    log_t = math.log(_G + 0.5) + lax.log1p(z / (_G + 0.5))
    above = log_t + slope / total - _G / t
    # From the nearest whole number, where sine and cosine of pi x are exact enough.
    near = x + lax.floor(jnp.abs(x + 0.5))
    mirrored = above - math.pi / lax.tan(math.pi * near)
    pole = (x <= 0) & (x == lax.floor(x))
    result = jnp.where(below, mirrored, above)
    at_pole = jnp.where(x == 0, np.asarray(-np.inf, x.dtype), np.nan)
    return jnp.where(pole, at_pole, result)


# The Euler-Maclaurin sum: (2 k)! / B(2 k), of the first twelve terms (Cephes, zeta).
_BERNOULLI = (
    *(12.0, -720.0, 30240.0, -1209600.0, 47900160.0, -1.8924375803183791606e9),
    *(7.47242496e10, -2.950130727918164224e12, 1.1646782814350067249e14),
    *(-4.5979787224074726105e15, 1.8152105401943546773e17, -7.1661652561756670113e18),
)


@composite("zeta")
@widened
def _zeta(s: Any, q: Any) -> Any:
    return zeta(s, q)


def zeta(s: Any, q: Any) -> Any:
    """Returns the Hurwitz zeta function, by the sum of Euler and Maclaurin."""
    total, a = jnp.power(q, -s), q
    term = total
    for _ in range(9):
        a = a + 1.0
        term = jnp.power(a, -s)
        total = total + term
    total = total + term * a / (s - 1.0) - 0.5 * term
    # Each factor is divided at once: without, they overflow where the terms are zero.
    power = term / a * s
    for k, c in enumerate(_BERNOULLI):
        total = total + power / c
        power = power * ((s + (2 * k + 1)) / a) * ((s + (2 * k + 2)) / a)
    infinity, nothing = (np.asarray(v, s.dtype) for v in (np.inf, np.nan))
    whole = q == lax.floor(q)
    result = jnp.where(s < 1, nothing, total)
    # Both sides of a pole grow to infinity of one sign if s is even.
    at_pole = jnp.where(s / 2 == lax.floor(s / 2), infinity, nothing)
    result = jnp.where((q <= 0) & whole, at_pole, result)
    result = jnp.where((q <= 0) & (s != lax.floor(s)), nothing, result)
    return jnp.where(s == 1, infinity, result)


@composite("polygamma")
@widened
def _polygamma(n: Any, x: Any) -> Any:
    sign = jnp.where(n / 2 == lax.floor(n / 2), -1.0, 1.0).astype(x.dtype)
    derivative = sign * lax.exp(log_gamma(n + 1.0)) * zeta(n + 1.0, x)
    result = jnp.where(n == 0, digamma(x), derivative)
    invalid = (n < 0) | (n != lax.floor(n))
    return jnp.where(invalid, np.asarray(np.nan, x.dtype), result)


def _by_jax(name: str) -> None:
    """Registers JAX's own definition, which consists of operations of lax."""
    function = _jax.special_function(name)
    composite(name)(lambda composite, *operands: function(*operands))


for _name in ("igamma", "igammac", "igamma_grad_a", "regularized_incomplete_beta"):
    _by_jax(_name)


@composite(
    "pow", when=lambda eqn: jnp.issubdtype(eqn.invars[1].aval.dtype, jnp.integer)
)
def _pow(composite: Composite, x: Any, exponent: Any) -> Any:
    """Rounds an integer exponent to the type of the base, as JAX does on any device."""
    return lax.pow(x, lax.convert_element_type(exponent, x.dtype))


# --- bits of floats -------------------------------------------------------------------


def unsigned(x: Any) -> Any:
    """Returns the bits of elements as unsigned integers of the same width."""
    width = types.itemsize_bits(x.dtype)
    return lax.bitcast_convert_type(x, np.dtype(f"uint{width}"))


def by_bits(x: Any) -> Any:
    """Returns unsigned integers in the order of numbers: -0 before 0, NaN outermost."""
    if x.dtype == np.bool_:
        return x.astype(np.uint8)
    if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        return x
    raw = unsigned(x)
    if x.dtype == jnp.float8_e8m0fnu:
        # Exponents have no sign; NaN is the last.
        return raw
    sign = raw.dtype.type(1) << raw.dtype.type(types.itemsize_bits(x.dtype) - 1)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return raw ^ sign
    return jnp.where(raw >= sign, ~raw, raw | sign)


@composite("nextafter")
def _nextafter(composite: Composite, x: Any, y: Any) -> Any:
    """The numbers of a sign are in the order of their bits."""
    bits = np.dtype(f"uint{_bits(x.dtype)}").type
    sign, one, zero = bits(1) << bits(_bits(x.dtype) - 1), bits(1), bits(0)
    a, b = unsigned(x), unsigned(y)
    size, other = a & ~sign, b & ~sign
    inwards = ((a ^ b) >= sign) | (size > other)
    moved = jnp.where(inwards, a - one, a + one)
    moved = jnp.where(size == zero, (b & sign) | one, moved)
    same = (a == b) | ((size | other) == zero)
    result = lax.bitcast_convert_type(jnp.where(same, b, moved), x.dtype)
    nan = np.asarray(np.nan, x.dtype)
    return jnp.where((x != x) | (y != y), nan, result)


@composite("reduce_precision")
def _reduce_precision(composite: Composite, x: Any) -> Any:
    """Rounds to nearest even; beyond the exponents is infinity, or zero."""
    exponent, mantissa = (
        composite.params[f"{part}_bits"] for part in ("exponent", "mantissa")
    )
    kind, info = np.dtype(f"uint{_bits(x.dtype)}").type, jnp.finfo(x.dtype)
    old, raw = unsigned(x), unsigned(x)
    if mantissa < info.nmant:
        dropped = info.nmant - mantissa
        half = kind((1 << (dropped - 1)) - 1)
        is_odd = (raw >> kind(dropped)) & kind(1)
        raw = (raw + is_odd + half) & ~kind((1 << dropped) - 1)
    if exponent < info.nexp:
        bias, less = (1 << (info.nexp - 1)) - 1, (1 << (exponent - 1)) - 1
        sign = kind(1 << (_bits(x.dtype) - 1))
        field = kind(((1 << info.nexp) - 1) << info.nmant)
        infinity = (raw & sign) | field
        too_large = (raw & field) > kind((bias + less) << info.nmant)
        too_small = (raw & field) <= kind((bias - less) << info.nmant)
        raw = jnp.where(too_large, infinity, jnp.where(too_small, raw & sign, raw))
    result = lax.bitcast_convert_type(jnp.where(x != x, old, raw), x.dtype)
    return result

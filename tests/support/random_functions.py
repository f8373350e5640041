# SPDX-License-Identifier: Apache-2.0
"""Steps of random bodies for which JAX itself, on the CPU, is the reference.

Functions of whole numbers give what is rounded to quarters: `MARGIN` says how far from
the next tie every value is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tests.support.random_bodies import (
    BF16,
    BOOL,
    F16,
    F32,
    I32,
    INTEGERS,
    LIMIT,
    U32,
    Body,
    is_float,
    step,
)

Function = Callable[[Any], Any]
# Distance of 4 f(x) from a tie, at whole numbers up to LIMIT.
MARGIN = 1e-3


def _above(x: Any) -> Any:
    return abs(x) + jnp.float32(1)


def _inside(x: Any) -> Any:
    return x * jnp.float32(0.11)


def _unit(x: Any) -> Any:
    return abs(x) * jnp.float32(0.11) + jnp.float32(0.05)


def _one(x: Any) -> Any:
    return jnp.minimum(x, jnp.float32(1))


FUNCTIONS: dict[str, Function] = {
    "acos": lambda x: lax.acos(_inside(x)),
    "acosh": lambda x: lax.acosh(_above(x)),
    "asin": lambda x: lax.asin(_inside(x)),
    "asinh": lax.asinh,
    "atan": lax.atan,
    "atan2": lambda x: lax.atan2(x, _above(x)),
    "atanh": lambda x: lax.atanh(_inside(x)),
    "cbrt": lax.cbrt,
    "ceil": lambda x: lax.ceil(_inside(x)),
    "clamp": lambda x: lax.clamp(jnp.float32(-2), x, jnp.float32(3)),
    "copy": jnp.copy,
    "cos": lax.cos,
    "cosh": lambda x: lax.cosh(_inside(x)),
    "erf": lax.erf,
    "erfc": lax.erfc,
    "erf_inv": lambda x: lax.erf_inv(_inside(x)),
    "exp": lambda x: lax.exp(_one(x)),
    "exp2": lambda x: lax.exp2(_inside(x)),
    "expm1": lambda x: lax.expm1(_one(x)),
    "integer_pow": lambda x: lax.integer_pow(_inside(x), 3),
    "is_finite": lambda x: lax.is_finite(x).astype(jnp.float32),
    "le": lambda x: (x <= jnp.float32(1)).astype(jnp.float32),
    "log": lambda x: lax.log(_above(x)),
    "log1p": lambda x: lax.log1p(abs(x)),
    "logistic": lax.logistic,
    "log2": lambda x: jnp.log2(_above(x)),
    "nextafter": lambda x: lax.nextafter(x, x + jnp.float32(1)),
    "pow": lambda x: lax.pow(_above(x), jnp.float32(0.4)),
    "reduce_precision": lambda x: lax.reduce_precision(x, 5, 3),
    "relu": jax.nn.relu,
    "rem": lambda x: lax.rem(x, _above(x)),
    "rsqrt": lambda x: lax.rsqrt(_above(x)),
    "silu": jax.nn.silu,
    "sin": lax.sin,
    "sinh": lambda x: lax.sinh(_inside(x)),
    "square": lambda x: lax.square(_inside(x)),
    "sqrt": lambda x: lax.sqrt(abs(x)),
    "tan": lambda x: lax.tan(_inside(x)),
    "tanh": lax.tanh,
}
# Composites of many operations, some with loops.
LONG: dict[str, Function] = {
    "bessel_i0e": lax.bessel_i0e,
    "bessel_i1e": lax.bessel_i1e,
    "digamma": lambda x: lax.digamma(_above(x)),
    "igamma": lambda x: lax.igamma(_above(x), _unit(x)),
    "igammac": lambda x: lax.igammac(_above(x), _unit(x)),
    "lgamma": lambda x: lax.lgamma(_above(x)),
    "zeta": lambda x: lax.zeta(_above(x) + jnp.float32(1), _above(x)),
    "polygamma": lambda x: lax.polygamma(jnp.ones_like(x), _above(x)),
    "betainc": lambda x: lax.betainc(_above(x), _above(x), _unit(x)),
}


def rounded(function: Function) -> Function:
    """4 f(x), rounded."""
    return lambda x: lax.round(
        function(x) * jnp.float32(4), lax.RoundingMethod.TO_NEAREST_EVEN
    )


def _by_jax(b: Body, function: Callable[..., Any], *operands: Any) -> Any:
    """The function in the kernel, or evaluated on the CPU."""
    if b.api.np is jnp:
        return function(*operands)
    with jax.default_device(jax.devices("cpu")[0]):
        return np.asarray(function(*map(jnp.asarray, operands)))


def _floats(b: Body, most: int = 1 << 14) -> Any:
    x = b.any(lambda x: x.dtype in (F32, F16, BF16) and 0 < x.size <= most)
    if x is None:
        return None
    return b.api.np.clip(x.astype(F32), F32.type(-LIMIT), F32.type(LIMIT))


@step(2)
def function(b: Body) -> Any:
    x, name = _floats(b), b.rng.choice(list(FUNCTIONS))
    return None if x is None else b.small(_by_jax(b, rounded(FUNCTIONS[name]), x))


@step(0.3)
def long_function(b: Body) -> Any:
    x, name = _floats(b, 1 << 10), b.rng.choice(list(LONG))
    return None if x is None else b.small(_by_jax(b, rounded(LONG[name]), x))


@jax.custom_vjp
def _twice(x: Any) -> Any:
    return x + x


_twice.defvjp(lambda x: (x + x, None), lambda _, g: (g + g,))

WRAPPED: tuple[Function, ...] = (
    lambda x: jax.checkpoint(lambda y: y + y)(x),
    lambda x: checkpoint_name(x, "kept"),
    lambda x: lax.optimization_barrier(x),
    lambda x: lax.stop_gradient(x),
    lambda x: _twice(x),
    # add_any: both factors have a derivative.
    lambda x: jax.vjp(lambda y: y * y, x)[1](jnp.ones_like(x))[0],
    lambda x: lax.platform_dependent(x, cpu=lambda y: y + y, default=lambda y: y + y),
)


@step(1)
def wrapped(b: Body) -> Any:
    """What JAX wraps around operations."""
    x, call = _floats(b), b.rng.choice(WRAPPED)
    return None if x is None else b.small(_by_jax(b, call, x))


@step(1)
def rearranged(b: Body) -> Any:
    """Parts side by side, copies, and axes without a size."""
    x = b.any(lambda x: len(x.shape) > 0 and 0 < x.size <= 1 << 12)
    if x is None or not x.shape:
        return None
    axis, n = b.rng.randrange(len(x.shape)), b.rng.randint(2, 3)
    first = b.rng.randint(1, x.shape[axis])
    sizes = (first, x.shape[axis] - first)
    calls: list[Function] = [
        lambda x: jnp.tile(x, [1] * axis + [n] + [1] * (len(x.shape) - axis - 1)),
        lambda x: jnp.stack([x] * n, axis=axis),
        lambda x: lax.squeeze(jnp.expand_dims(x, axis), [axis]),
        lambda x: lax.split(x, sizes, axis)[0],
        lambda x: jnp.unstack(x, axis=axis)[x.shape[axis] // 2],
    ]
    if len(x.shape) == 4:
        calls = calls[2:4]
    if len(x.shape) == 1 or x.shape[axis] > 16:
        calls = calls[:4]
    return _by_jax(b, b.rng.choice(calls), x)


@step(1)
def folded(b: Body) -> Any:
    """Reductions of bits, by a function, and sums of exponentials."""
    x = b.any(lambda x: len(x.shape) > 1 and x.dtype != BOOL)
    if x is None or len(x.shape) < 2 or x.dtype == BOOL:
        return None
    axis = b.rng.randrange(len(x.shape))
    kind = b.rng.choice(["xor", "reduce", "logsumexp"])
    if kind == "xor" and x.dtype in INTEGERS:
        return _by_jax(b, lambda x: lax.reduce_xor(x, [axis]), x)
    if kind == "reduce":
        zero = np.zeros((), x.dtype)
        most = lambda a, c: lax.max(lax.max(a, c), zero)  # noqa: E731
        return _by_jax(b, lambda x: lax.reduce(x, zero, most, [axis]), x)
    if not is_float(x.dtype) or x.shape[axis] > 8:
        return None
    x = b.api.np.floor(x.astype(F32))
    return b.small(_by_jax(b, lambda x: lax.round(lax.cumlogsumexp(x, axis)), x))


@step(1)
def replaced(b: Body) -> Any:
    """A row of a value, at a position that is a value."""
    x = b.any(lambda x: len(x.shape) > 1 and x.size <= 1 << 12)
    if x is None or len(x.shape) < 2:
        return None
    n = x.shape[0]
    row = b.rng.randrange(n)
    at = np.asarray([row, (row + 1) % n][: min(n, 2)], I32)
    part = b.api.np.broadcast_to(b.constant(x.dtype), (len(at), *x.shape[1:]))
    return _by_jax(b, lambda x, p: x.at[jnp.asarray(at)].set(p), x, part)


@step(0.5)
def random_bits(b: Body) -> Any:
    shape, seed = b.any().shape, b.rng.randrange(100)
    if not shape or np.prod(shape) > 1 << 12:
        return None

    def draw() -> Any:
        # Built of its data: the key's own type has no values in a kernel's constants.
        key = jax.random.wrap_key_data(jnp.asarray([0, seed], jnp.uint32))
        return jax.random.bits(key, shape, jnp.uint32)

    return (_by_jax(b, draw) >> U32.type(20)).astype(I32)

# SPDX-License-Identifier: Apache-2.0
"""Operations of lax on registers and scalars: the emulator, and the module, as JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_gpu import sparsecore as plsc
from tests.support.sparsecore.kernels import check

Function = Callable[[Any, Any], Any]
# By what they take: two vectors, of which the second is positive. Results that are
# rounded are not subtracted from each other.
FLOATS: dict[str, Function] = {
    "arithmetic": lambda x, y: (x + y) * (x - y) / y,
    "rem": lax.rem,
    "max, min": lambda x, y: lax.max(x, y) + lax.min(x, -y),
    "neg, abs, sign": lambda x, y: -lax.abs(x) + lax.sign(x),
    "sqrt, rsqrt": lambda x, y: lax.sqrt(y) + lax.rsqrt(y),
    "cbrt": lambda x, y: lax.cbrt(y),
    "exp": lambda x, y: lax.exp(x),
    "exp2": lambda x, y: lax.exp2(x),
    "expm1, log1p": lambda x, y: lax.expm1(x) * lax.log1p(y),
    "log": lambda x, y: lax.log(y),
    "logistic": lambda x, y: lax.logistic(x),
    "tanh": lambda x, y: lax.tanh(x),
    "sin, cos": lambda x, y: lax.sin(x) * lax.cos(y),
    "tan": lambda x, y: lax.tan(x),
    "erf": lambda x, y: lax.erf(x),
    "pow": lambda x, y: lax.pow(y, x),
    "integer_pow": lambda x, y: x**3,
    "square": lambda x, y: lax.square(x),
    "floor, ceil": lambda x, y: lax.floor(x) - lax.ceil(y),
    "round": lambda x, y: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
    "atan2": lax.atan2,
    "is_finite": lambda x, y: jnp.where(lax.is_finite(x / (y - y)), x, y),
    "compare, select": lambda x, y: jnp.where(x < y, x, jnp.where(x != y, y, x)),
    "clamp": lambda x, y: lax.clamp(-0.5, x, 0.5),
    "convert": lambda x, y: (x * 9).astype(jnp.int32).astype(jnp.float32),
    "sum": lambda x, y: x - jnp.sum(y),
    "max of all": lambda x, y: x - jnp.max(y) + jnp.min(y),
    "argmax": lambda x, y: x + jnp.argmax(y).astype(jnp.float32),
    "rev": lambda x, y: lax.rev(x, (0,)),
    "cumsum": lambda x, y: jnp.cumsum(x),
    "cummax": lambda x, y: lax.cummax(x),
    "sort": lambda x, y: lax.sort(x),
    "bitcast": lambda x, y: lax.bitcast_convert_type(
        lax.bitcast_convert_type(x, jnp.int32), jnp.float32
    ),
}
INTS: dict[str, Function] = {
    "arithmetic": lambda x, y: (x + y) * (x - y),
    "div, rem": lambda x, y: lax.div(x, y) + lax.rem(x, y),
    "max, min": lambda x, y: lax.max(x, y) - lax.min(x, y),
    "neg, abs, sign": lambda x, y: -lax.abs(x) + lax.sign(x),
    "bits": lambda x, y: (x & y) | (x ^ ~y),
    "shifts": lambda x, y: (x << (y & 7)) + (x >> (y & 7)),
    "logical shift": lambda x, y: lax.shift_right_logical(x, y & 31),
    "clz": lambda x, y: lax.clz(x),
    "population_count": lambda x, y: lax.population_count(x),
    "compare, select": lambda x, y: jnp.where(x < y, x, jnp.where(x == y, y, 3)),
    "clamp": lambda x, y: lax.clamp(-9, x, 9),
    "convert": lambda x, y: (x.astype(jnp.float32) * 0.5).astype(jnp.int32),
    "integer_pow": lambda x, y: x**2,
    "iota": lambda x, y: x + lax.iota(jnp.int32, x.size),
    "sum": lambda x, y: x - jnp.sum(y),
    "max of all": lambda x, y: x - jnp.max(y) + jnp.min(x),
    "argmin": lambda x, y: x + jnp.argmin(y),
    "cumsum": lambda x, y: jnp.cumsum(x),
    "rev": lambda x, y: lax.rev(x, (0,)),
    "sort": lambda x, y: lax.sort(x),
}


def inputs(dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    if dtype == np.float32:
        x = rng.standard_normal(16).astype(dtype)
        return x, (np.abs(rng.standard_normal(16)) + 0.1).astype(dtype)
    return (
        rng.integers(-99, 99, 16).astype(dtype),
        rng.integers(1, 99, 16).astype(dtype),
    )


def everywhere(function: Function, dtype: Any) -> None:
    x, y = inputs(dtype)
    expected = np.asarray(jax.jit(function)(x, y))

    def body(x_ref, y_ref, o, v, w):
        plsc.sync_copy(x_ref, v)
        plsc.sync_copy(y_ref, w)
        v[...] = function(v[...], w[...])
        plsc.sync_copy(v, o)

    vector = plsc.VMEM((16,), dtype)
    check(body, [x, y], expected, vector, vector, subcores=1, schedules=1,
          rtol=2e-6, chips=["tpu7x"])  # fmt: skip


@pytest.mark.parametrize("case", FLOATS)
def test_an_operation_of_floats_is_that_of_jax(case):
    everywhere(FLOATS[case], np.float32)


@pytest.mark.parametrize("case", INTS)
def test_an_operation_of_integers_is_that_of_jax(case):
    everywhere(INTS[case], np.int32)

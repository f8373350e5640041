# SPDX-License-Identifier: Apache-2.0
"""Conversions of bits to elements of the same and of another width."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.support import everywhere
from tests.support.semantics import BOTH, Warpgroup


def check(x: np.ndarray, dtype: str, semantics: tuple = BOTH) -> None:
    with jax.enable_x64():
        target = jnp.dtype(dtype)
        expected = np.asarray(lax.bitcast_convert_type(x, target))
        make = everywhere.elementwise(
            lambda x: lax.bitcast_convert_type(x, target), target, shape=expected.shape
        )
        everywhere.check(make, [x], expected, semantics=semantics)


def random_bits(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Any bits but those of NaN, of which there are many."""
    kind = jnp.dtype(dtype)
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (*shape, kind.itemsize), np.uint8).view(kind)[..., 0]
    if kind.kind in "iu":
        return x
    return np.where(np.isnan(x.astype(np.float64)), 0, x).astype(kind)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        *(("float32", "int32"), ("uint16", "bfloat16"), ("bfloat16", "float16")),
        *(("float64", "uint64"), ("float8_e5m2", "uint8"), ("int8", "float8_e4m3fn")),
    ],
)
def test_bits_as_elements_of_the_same_width(before: str, after: str):
    x = random_bits((64, 128), before)
    if "float" in after:
        as_floats = x.view(jnp.dtype(after)).astype(np.float64)
        x = np.where(np.isnan(as_floats), 0, x).astype(x.dtype)
    check(x, after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        *(("float32", "int16"), ("float32", "uint8"), ("int32", "int8")),
        *(("uint64", "uint32"), ("bfloat16", "uint8"), ("float64", "int16")),
    ],
)
def test_an_element_as_several_narrower_ones(before: str, after: str):
    check(random_bits((16, 128), before), after)


@pytest.mark.parametrize(
    ("before", "after", "parts"),
    [
        ("int16", "int32", 2),
        ("uint8", "float32", 4),
        ("uint32", "uint64", 2),
        ("int8", "int16", 2),
        ("uint16", "float64", 4),
    ],
)
def test_several_elements_as_one_wider(before: str, after: str, parts: int):
    x = random_bits((16, 128 // parts, parts), before)
    if "float" in after:
        x[..., -1] &= x.dtype.type(0x3F)  # a small exponent: no NaN
    # Pairs share registers with others in the default layout of Lane semantics, which
    # has no axis of pairs to reduce.
    check(x, after, BOTH if parts == 4 else (Warpgroup,))


def test_a_scalar_as_two_elements_and_back():
    def body(x):
        parts = lax.bitcast_convert_type(jnp.max(x), jnp.uint16)
        return x + lax.bitcast_convert_type(parts, jnp.float32)

    x = np.arange(128, dtype=np.float32)
    everywhere.check(everywhere.elementwise(body, x.dtype, shape=(128,)), [x], x + 127)

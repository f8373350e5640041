# SPDX-License-Identifier: Apache-2.0
"""Ragged products of 8-bit floats, with factors of rows, columns and matrices."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gpu.ops import RaggedDotConfig, ragged_dot_general
from tests.support import emulated, ragged
from tests.support.ragged import normal
from tests.support.refusal import refused
from tests.support.semantics import Warpgroup

SMALL = RaggedDotConfig(
    tile_m=64, tile_n=64, tile_k=32, stages=2, blocks=3, strip=2, epilogue_n=32
)
SIZES, M = (1, 63, 0, 65, 20), 160
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
TRANSPOSED = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))


def factors(shape):
    scale = np.random.default_rng(1).uniform(0.5, 2, shape)
    return jnp.asarray(scale, jnp.float32)


@pytest.mark.parametrize(
    ("dtype", "n", "k", "of_lhs", "of_rhs"),
    [
        (E4M3, 72, 48, None, None),
        (E4M3, 64, 64, (M,), (len(SIZES), 64)),
        (E4M3, 72, 64, (M,), (len(SIZES), 72)),
        (E5M2, 75, 45, (), (len(SIZES),)),
    ],
)
def test_products_of_narrow_floats(dtype, n, k, of_lhs, of_rhs):
    a, b = normal(M, k, dtype=dtype), normal(len(SIZES), n, k, dtype=dtype)
    left, right = (None if s is None else factors(s) for s in (of_lhs, of_rhs))

    def make(interpret):
        return lambda a, b, sizes: ragged_dot_general(
            *(a, b, sizes, TRANSPOSED),
            lhs_scale=left,
            rhs_scale=right,
            preferred_element_type=jnp.float32,
            config=SMALL,
            interpret=interpret,
        )

    x, w = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if left is not None:
        x = x * np.asarray(left, np.float64).reshape(-1, 1)
    if right is not None:
        w = w * np.asarray(right, np.float64).reshape(len(SIZES), -1, 1)
    expected = ragged.product(x, np.swapaxes(w, 1, 2), SIZES)
    # The tensor core's sums have 13 bits.
    args = [a, b, jnp.array(SIZES)]
    emulated.check(make, args, expected, atol=5e-2, executed=[Warpgroup])


BLOCKS = dataclasses.replace(SMALL, tile_n=128, tile_k=128)


@pytest.mark.parametrize(
    ("config", "n", "k", "of_lhs", "of_rhs"),
    [
        (BLOCKS, 200, 272, (M, 3), (len(SIZES), 2, 3)),
        (
            dataclasses.replace(BLOCKS, consumers=3, cluster="n"),
            *(264, 256, (M,), (len(SIZES), 3, 2)),
        ),
        (None, 128, 256, (M, 2), (len(SIZES), 1, 2)),
    ],
)
@pytest.mark.parametrize("gathered", [False, True])
def test_scales_of_blocks(config, n, k, of_lhs, of_rhs, gathered):
    check_blocks(config, n, k, of_lhs, of_rhs, gathered=gathered)


@pytest.mark.parametrize(
    ("changes", "executed"),
    [({"consumers": 3}, [Warpgroup]), ({"tile_m": 128, "cluster": "n"}, [])],
)
def test_scales_of_blocks_in_tiles_of_some_heights(changes, executed):
    # Five times 64 rows, and three times, which are not whole; the scales of the rows
    # do not begin at multiples of 16 bytes.
    sizes, c = (3, 310, 0, 150), dataclasses.replace(BLOCKS, **changes)
    check_blocks(c, 128, 128, (470, 1), (4, 1, 1), sizes, executed)


def check_blocks(
    config, n, k, of_lhs, of_rhs, sizes=SIZES, executed=(), *, gathered=False
):
    m = of_lhs[0]
    tokens = 40 if gathered else m
    rows = np.random.default_rng(0).integers(0, tokens, m).astype(np.int32)
    a, b = normal(tokens, k, dtype=E4M3), normal(len(sizes), n, k, dtype=E4M3)
    left, right = factors((tokens, *of_lhs[1:])), factors(of_rhs)

    def make(interpret):
        return lambda a, b, sizes: ragged_dot_general(
            *(a, b, sizes, TRANSPOSED),
            rows=jnp.array(rows) if gathered else None,
            lhs_scale=left,
            rhs_scale=right,
            preferred_element_type=jnp.float32,
            config=config,
            interpret=interpret,
        )

    def whole(x, scale, first):
        """The scale of each element; axes from the first on have blocks."""
        scale = np.asarray(scale, np.float64)
        scale = scale.reshape(*scale.shape, *[1] * (x.ndim - scale.ndim))
        for axis in range(first, x.ndim):
            if scale.shape[axis] > 1:
                scale = np.repeat(scale, 128, axis)
        return x * scale[tuple(slice(0, size) for size in x.shape)]

    x = whole(np.asarray(a, np.float64), left, 1)
    w = whole(np.asarray(b, np.float64), right, 1)
    x = x[rows] if gathered else x
    expected = ragged.product(x, np.swapaxes(w, 1, 2), sizes)
    # Sums of 128 products have 13 bits, and factors up to 4.
    args = [a, b, jnp.array(sizes)]
    emulated.check(make, args, expected, atol=0.2, executed=executed)


@refused
def test_tiles_that_are_not_blocks_of_scales():
    a, b = normal(M, 128, dtype=E4M3), normal(len(SIZES), 128, 128, dtype=E4M3)
    scales = {"lhs_scale": factors((M, 1)), "rhs_scale": factors((len(SIZES), 1, 1))}
    ragged_dot_general(*(a, b, jnp.array(SIZES), TRANSPOSED), **scales, config=SMALL)


def test_gathered_rows_take_their_factors_along():
    tokens = 40
    rows = np.random.default_rng(0).integers(0, tokens, M).astype(np.int32)
    a, b = normal(tokens, 48, dtype=E4M3), normal(len(SIZES), 72, 48, dtype=E4M3)
    scale = factors((tokens,))
    got = ragged_dot_general(
        *(a, b, jnp.array(SIZES), TRANSPOSED),
        rows=jnp.array(rows),
        lhs_scale=scale,
        config=SMALL,
    )
    assert got.dtype == jnp.bfloat16
    x = (np.asarray(a, np.float64) * np.asarray(scale)[:, None])[rows]
    expected = ragged.product(x, np.swapaxes(np.asarray(b, np.float64), 1, 2), SIZES)
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=0.25)

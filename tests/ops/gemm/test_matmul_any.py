# SPDX-License-Identifier: Apache-2.0
"""The matrix product of any shape: transpositions, batches, types, refusals."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gpu import ops
from tests.support import emulated, host
from tests.support.semantics import Warpgroup

SMALL = ops.MatmulConfig(
    tile_m=64, tile_n=64, tile_k=64, stages=2, blocks=2, cluster=None, strip=2
)
# Relative to the largest element: 11 and 8 bits, tf32's 11 bits of two factors.
ROUNDING = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-9, "int8": 0}


def normal(*shape, dtype=jnp.float16, seed=0):
    return host.array(np.random.default_rng(seed).standard_normal(shape), dtype)


def wide(x):
    return np.asarray(x, np.float64)


def turned(x, transposed):
    return wide(x).swapaxes(-1, -2) if transposed else wide(x)


def check(a, b, *, transpose_a=False, transpose_b=False, **options):
    expected = turned(a, transpose_a) @ turned(b, transpose_b)

    def make(interpret):
        return lambda x, y: ops.matmul(
            x,
            y,
            transpose_a=transpose_a,
            transpose_b=transpose_b,
            interpret=interpret,
            **options,
        )

    atol = ROUNDING[a.dtype.name] * np.abs(expected).max()
    emulated.check(make, [a, b], expected, atol=atol, executed=[Warpgroup])


@pytest.mark.parametrize(
    ("transpose_a", "transpose_b", "config"),
    [
        *((*turned, SMALL) for turned in itertools.product([False, True], repeat=2)),
        (False, True, None),
        (True, False, None),
    ],
)
def test_operands_may_be_transposed(transpose_a, transpose_b, config):
    a = normal(72, 136) if transpose_a else normal(136, 72)
    b = normal(40, 72) if transpose_b else normal(72, 40)
    check(a, b, transpose_a=transpose_a, transpose_b=transpose_b, config=config)


@pytest.mark.parametrize("cluster", ["m", "n"])
def test_transposed_operands_are_shared_in_a_cluster(cluster):
    config = ops.MatmulConfig(
        tile_m=64, tile_n=64, tile_k=64, stages=2, blocks=4, cluster=cluster
    )
    options = {"transpose_a": True, "transpose_b": True, "config": config}
    check(normal(80, 200), normal(72, 80), **options)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((3, 70, 40), (3, 40, 24)),
        ((2, 3, 20, 24), (24, 16)),
        ((20, 24), (3, 24, 16)),
    ],
)
def test_leading_dimensions_are_a_batch_of_one_launch(a, b):
    check(normal(*a), normal(*b), config=SMALL)


def test_a_transposed_batch_with_one_matrix():
    check(normal(3, 24, 72), normal(24, 16), transpose_a=True, config=SMALL)
    check(normal(72, 24), normal(3, 16, 24), transpose_b=True, config=SMALL)


@pytest.mark.parametrize(
    ("shape", "transposed"), [((40, 24, 40), True), ((67, 35, 33), False)]
)
def test_float32_is_multiplied_as_tf32(shape, transposed):
    m, n, k = shape
    a = normal(*((k, m) if transposed else (m, k)), dtype=jnp.float32)
    b = normal(*((n, k) if transposed else (k, n)), dtype=jnp.float32)
    check(a, b, transpose_a=transposed, transpose_b=transposed)


@pytest.mark.parametrize("shape", [(40, 32, 64), (37, 35, 33)])
def test_int8_is_summed_in_int32(shape):
    m, n, k = shape
    rng = np.random.default_rng(0)
    a, b = (host.array(rng.integers(-128, 128, s), jnp.int8) for s in ((m, k), (k, n)))
    check(a, b)
    assert ops.matmul(a, b).dtype == jnp.int32


@pytest.mark.parametrize("out", ["float32", "bfloat16"])
def test_the_type_of_the_result(out):
    a, b = normal(33, 20), normal(20, 35)
    product = ops.matmul(a, b, out_dtype=out)
    assert product.dtype == out
    tolerance = 1e-5 if out == "float32" else 2**-6
    np.testing.assert_allclose(wide(product), wide(a) @ wide(b), atol=tolerance * 16)


def test_vmap_over_a_batch():
    a, b = normal(2, 3, 20, 24), normal(2, 24, 16)
    product = jax.vmap(ops.matmul)(a, b)
    expected = wide(a) @ wide(b)[:, None]
    np.testing.assert_allclose(wide(product), expected, atol=2**-6)


# --- compiled -------------------------------------------------------------------------

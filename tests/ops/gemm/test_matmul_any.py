# SPDX-License-Identifier: Apache-2.0
"""The matrix product of any shape: transpositions, batches, types, refusals."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import ops
from pallas_gpu.ops.tiles import starts_inside
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

    options |= {"transpose_a": transpose_a, "transpose_b": transpose_b}

    def make(interpret):
        return functools.partial(ops.matmul, interpret=interpret, **options)

    atol = ROUNDING[a.dtype.name] * np.abs(expected).max()
    emulated.check(make, [a, b], expected, atol=atol, executed=[Warpgroup])


A, B, CLUSTERS = (True, False), (False, True), {"blocks": 4, "strip": 16}
OF_CLUSTERS = [dataclasses.replace(SMALL, cluster=x, **CLUSTERS) for x in ("m", "n")]


@pytest.mark.parametrize(
    ("shape", "turned", "config", "dtype"),
    [
        *(
            ((136, 40, 72), turned, SMALL, "float16")
            for turned in itertools.product([False, True], repeat=2)
        ),
        *(((136, 40, 72), turned, None, "float16") for turned in (A, B)),
        # They are shared in a cluster.
        *(((200, 72, 80), (True, True), c, "float16") for c in OF_CLUSTERS),
        # Multiplied as tf32.
        ((40, 24, 40), (True, True), None, "float32"),
        ((67, 35, 33), (False, False), None, "float32"),
    ],
)
def test_operands_may_be_transposed(shape, turned, config, dtype):
    (m, n, k), (of_a, of_b) = shape, turned
    a = normal(*((k, m) if of_a else (m, k)), dtype=dtype)
    b = normal(*((n, k) if of_b else (k, n)), dtype=dtype)
    check(a, b, transpose_a=of_a, transpose_b=of_b, config=config)


@pytest.mark.parametrize(
    ("a", "b", "turned"),
    [
        ((3, 70, 40), (3, 40, 24), {}),
        ((2, 3, 20, 24), (24, 16), {}),
        ((20, 24), (3, 24, 16), {}),
        ((3, 24, 72), (24, 16), {"transpose_a": True}),
        ((72, 24), (3, 16, 24), {"transpose_b": True}),
    ],
)
def test_leading_dimensions_are_a_batch_of_one_launch(a, b, turned):
    check(normal(*a), normal(*b), **turned, config=SMALL)


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


def test_only_sides_that_a_part_may_lie_beyond_are_compared():
    problem = types.SimpleNamespace(m=100, n=256)
    tiles = plgpu.TileSchedule((100, 256), (128, 128))
    assert starts_inside(problem, tiles, (64, 64), 64, 0) is None
    assert starts_inside(problem, tiles, (16, 64), 112, 512) is False
    assert starts_inside(problem, tiles, (16, 64), 96, 512) is True

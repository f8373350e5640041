# SPDX-License-Identifier: Apache-2.0
"""The configurations that products with few rows or few tiles get."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gpu.ops import MatmulConfig, SplitMatmulConfig, matmul
from pallas_gpu.ops.gemm import choice
from pallas_gpu.ops.gemm.epilogue import Epilogue
from pallas_gpu.ops.gemm.problem import Problem
from tests.support.matmuls import ROUNDING, operands, reference

BF16 = jnp.dtype(jnp.bfloat16)
SMEM_BYTES = 232432


def problem(m, n, k, **changes):
    return Problem(
        **({"dtype": BF16, "out_dtype": BF16, "m": m, "n": n, "k": k} | changes)
    )


PROBLEMS = [
    problem(1, 4096, 4096),
    problem(7, 100, 300),
    problem(64, 28672, 4096),
    problem(100, 4096, 14336),
    problem(256, 8192, 8192),
    problem(256, 256, 65536),
    problem(1024, 1024, 1024),
    problem(16, 512, 512, batch=64),
    problem(3, 4096, 4096, transpose_a=True),
    problem(16, 14336, 4096, epilogue=Epilogue(activation="silu", gated=True)),
    problem(16, 4096, 4096, dtype=jnp.dtype(jnp.int8), transpose_b=True),
    problem(16, 4096, 4096, dtype=jnp.dtype(jnp.float32), transpose_b=True),
]
of_problems = pytest.mark.parametrize(
    "p", PROBLEMS, ids=lambda p: f"{p.batch}x{p.m}x{p.n}x{p.k}-{p.dtype}"
)


@of_problems
def test_every_candidate_fits_in_shared_memory(p):
    found = choice.candidates_of_few(p)
    assert found
    for c in found:
        assert choice.smem_bytes(p, c, c.stages) <= SMEM_BYTES
        assert choice.cost(p, c) > 0


def test_blocks_that_share_an_sm_run_at_once():
    p = problem(16, 4096, 4096)
    split = [c for c in choice.candidates_of_few(p) if c.split == 8]
    costs = [choice.cost(p, c) for c in split]
    assert max(costs) < 2 * min(costs)


@pytest.mark.parametrize("m", [1, 16, 64])
def test_few_rows_are_multiplied_transposed(m):
    for n, k in ((4096, 4096), (28672, 4096), (8192, 28672)):
        c = choice.choose(problem(m, n, k))
        assert isinstance(c, SplitMatmulConfig)
        assert c.tile_m == max(8, m)


def test_many_rows_are_not():
    for m, n, k in ((4096, 4096, 4096), (1000, 6144, 4096), (8192, 8192, 8192)):
        assert isinstance(choice.choose(problem(m, n, k)), MatmulConfig)


def test_one_tile_of_a_long_k_is_divided_among_clusters():
    c = choice.choose(problem(64, 64, 65536))
    assert c.split * c.clusters >= 64


@pytest.mark.parametrize("shape", [(1, 72, 40), (5, 200, 1100), (90, 24, 600)])
def test_the_chosen_configuration_computes_the_product(shape):
    x, w = operands(*shape)
    got = matmul(x, w)
    np.testing.assert_allclose(
        np.asarray(got, np.float32), reference(x, w), atol=2 * ROUNDING["float16"]
    )

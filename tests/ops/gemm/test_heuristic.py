# SPDX-License-Identifier: Apache-2.0
"""The configuration that is chosen for a product fits it and the hardware."""

from __future__ import annotations

import dataclasses
import itertools

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_gpu import arch
from pallas_gpu.ops import MatmulConfig, SplitMatmulConfig
from pallas_gpu.ops.gemm import choice
from pallas_gpu.ops.gemm.epilogue import Epilogue
from pallas_gpu.ops.gemm.problem import Problem

SIZES = st.integers(1, 20000)
DTYPES = [jnp.dtype(d) for d in ("bfloat16", "float32", "int8")]
EPILOGUES = [
    Epilogue(),
    Epilogue(bias=True, activation="gelu"),
    Epilogue(residual=True),
    Epilogue(gated=True, residual=True),
]


def problem(m, n, k, dtype="bfloat16", epilogue=EPILOGUES[0]):
    return Problem(
        m=m,
        n=n,
        k=k,
        dtype=jnp.dtype(dtype),
        out_dtype=jnp.dtype(jnp.float32 if dtype == jnp.int8 else dtype),
        epilogue=epilogue,
        residual_dtype=jnp.dtype(jnp.float32) if epilogue.residual else None,
    )


def smem_bytes(p, c):
    factors = 2 if p.epilogue.gated else 1
    ring = (c.block_m + factors * c.tile_n) * c.tile_k * p.dtype.itemsize * c.stages
    part = 2 * c.epilogue_m * c.epilogue_n
    if c.parts > 1:
        return ring + 2 * part * 4
    residual = 2 * part * p.residual_dtype.itemsize if p.epilogue.residual else 0
    return ring + p.epilogue.buffers * part * p.out_dtype.itemsize + residual


@settings(max_examples=25, deadline=None)
@given(SIZES, SIZES, SIZES, st.sampled_from(DTYPES), st.sampled_from(EPILOGUES))
def test_the_buffers_fit_for_any_problem(m, n, k, dtype, epilogue):
    p = problem(m, n, k, dtype, epilogue=epilogue)
    for c in choice.candidates(p):
        assert c.stages >= 2
        assert smem_bytes(p, c) <= arch.SM_90A.smem_bytes_per_block


def test_a_residual_leaves_the_third_stage():
    p = problem(1536, 4096, 8192, epilogue=Epilogue(residual=True))
    c = choice.best(p.but(residual_dtype=p.out_dtype))
    assert (c.block_m, c.tile_n, c.stages) == (256, 192, 3)


@settings(max_examples=25, deadline=None)
@given(SIZES, SIZES, SIZES)
def test_every_block_of_a_cluster_has_a_tile_and_a_part_of_k(m, n, k):
    for c in choice.candidates(problem(m, n, k)):
        rows, columns = -(-m // c.block_m), -(-n // c.tile_n)
        assert c.cluster != "m" or rows % 2 == 0
        assert c.cluster != "n" or columns % 2 == 0
        steps = -(-k // c.tile_k)
        assert (c.parts - 1) * -(-steps // c.parts) < steps


@pytest.mark.parametrize(
    ("shape", "tiles"),
    # The one wave that fills the card best.
    [((2048, 2048, 2048), 128), ((1000, 6144, 4096), 128), ((1000, 4096, 4096), 128)],
)
def test_the_tiles_fill_the_card(shape, tiles):
    p = problem(*shape)
    c = choice.best(p)
    m, n, _ = shape
    assert -(-m // c.block_m) * -(-n // c.tile_n) == tiles


def test_of_equal_tiles_the_widest_instruction_is_chosen():
    c = choice.best(problem(1000, 4096, 4096))
    assert (c.tile_m, c.tile_n) == (64, 256)


def test_blocks_divide_a_long_k_of_few_tiles():
    c = choice.choose(problem(256, 256, 60000))
    assert c.parts >= 16
    gated = problem(256, 256, 60000, epilogue=EPILOGUES[3])
    assert all(c.parts == 1 for c in choice.candidates(gated))


def test_blocks_divide_a_long_k_of_few_rows_of_float32():
    # Only Hopper's kernel transposes B, so that no other one is left these rows.
    p = problem(16, 512, 16384, "float32")
    assert choice.turned(p) == ""
    assert choice.choose(p).parts > 1


def test_few_rows_of_a_long_k_are_left_to_their_own_kernel():
    p = problem(1, 4096, 4096)
    assert choice.best(p).parts > 1
    assert isinstance(choice.choose(p), SplitMatmulConfig)


def test_more_rows_are_not_estimated_to_be_faster():
    sizes = [64, 128, 1024, 4096]
    for (m, n), k in itertools.product(itertools.pairwise(sizes), sizes):
        costs = [
            choice.cost(p, choice.best(p)) for p in (problem(s, s, k) for s in (m, n))
        ]
        # Of few microseconds one is that of a cluster.
        assert costs[0] <= costs[1] + 1


def test_what_was_measured_is_chosen():
    p = problem(8192, 8192, 8192)
    assert choice.measured(p) == choice.choose(p) != choice.best(p)


def test_float32_is_transposed_by_xla_where_it_has_no_other_way():
    p = problem(2048, 2048, 2048, "float32")
    for transpose_a, transpose_b, turned in (
        (False, True, ""),
        (False, False, ""),
        (True, True, ""),
        (True, False, "a"),
    ):
        stored = dataclasses.replace(
            p, transpose_a=transpose_a, transpose_b=transpose_b
        )
        assert choice.turned(stored) == turned
    assert choice.turned(p.but(config=MatmulConfig())) == "b"
    left = p.but(config=MatmulConfig(transposed=True))
    assert choice.turned(left) == ""
    gated = dataclasses.replace(p, epilogue=EPILOGUES[3])
    assert choice.turned(gated) == "b"


def test_the_table_is_for_products_like_those_measured():
    assert choice.measured(problem(8192, 8192, 8192, "float32")) is None
    assert choice.measured(problem(8192, 8192, 8192, epilogue=EPILOGUES[2])) is None
    assert choice.measured(problem(8191, 8192, 8192)) is None

# SPDX-License-Identifier: Apache-2.0
"""Products with few rows or few tiles: all ways to divide them, and refusals."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gpu import offline
from pallas_gpu.ops import SplitMatmulConfig, matmul
from tests.support import emulated
from tests.support.matmuls import ROUNDING, operands, reference
from tests.support.semantics import Warpgroup, under

SMALL = SplitMatmulConfig(tile_m=8, tile_n=64, tile_k=64, stages=2, warpgroups=1)


def config(**changes):
    return dataclasses.replace(SMALL, **changes)


def check(shape, c, dtype="float16", out_dtype=None, executed=(Warpgroup,), **options):
    """Compares with NumPy; `options` are those of matmul."""
    x, w = operands(*shape, jnp.dtype(dtype))
    args = [
        x.T if options.get("transpose_a") else x,
        w.T if options.get("transpose_b") else w,
    ]

    def make(interpret):
        return functools.partial(
            matmul, config=c, out_dtype=out_dtype, interpret=interpret, **options
        )

    atol = ROUNDING[jnp.dtype(out_dtype or dtype).name]
    emulated.check(make, args, reference(x, w), atol=atol, executed=executed)


@pytest.mark.parametrize(("m", "transpose_b"), [(1, False), (3, True), (8, False)])
def test_few_rows(m, transpose_b):
    check((m, 72, 136), SMALL, transpose_b=transpose_b)


@pytest.mark.parametrize(
    "changes",
    [
        {"tile_m": 16, "tile_n": 128},
        {"tile_m": 16, "tile_n": 128, "warpgroups": 2},
        {"tile_m": 24, "tile_n": 192, "warpgroups": 3, "part_m": 8},
        {"tile_m": 40, "tile_k": 16, "stages": 5},
        {"tile_m": 32, "tile_k": 128, "blocks": 1},
        {"tile_m": 40, "tile_n": 192, "split": 2},
    ],
)
def test_tiles_that_exceed_the_problem(changes):
    check((35, 200, 152), config(**changes))


@pytest.mark.parametrize(
    ("m", "changes"),
    [
        (1, {"split": 4, "blocks": 8}),
        (65, {"split": 2, "blocks": 4}),
        (20, {"clusters": 3, "blocks": 3}),
        (20, {"split": 2, "clusters": 2, "blocks": 99}),
    ],
)
def test_blocks_and_clusters_divide_k(m, changes):
    check((m, 136, 264), config(tile_m=16, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"split": 4},
        {"tile_m": 24, "tile_n": 128, "warpgroups": 2, "split": 2},
        {"tile_m": 32, "split": 4, "stages": 3},
        {"tile_m": 40, "split": 2},
    ],
)
def test_the_sums_of_a_cluster_are_sent_or_read(changes):
    check((37, 136, 264), config(**changes))


def test_a_cluster_of_eight_blocks():
    check((1, 64, 1160), config(tile_k=128, split=8))


def test_types_of_operands_and_result():
    check((5, 64, 128), config(split=2), "bfloat16", "float32")


# --- epilogues, batches, other types --------------------------------------------------

DIVIDED = [{}, {"split": 2}, {"split": 2, "clusters": 2}]


@pytest.mark.parametrize("changes", DIVIDED)
def test_epilogues_are_applied_to_the_whole_sum(changes):
    (x, w), (bias, residual) = operands(5, 72, 264), operands(1, 72, 72)
    residual = residual[:, :5].reshape(5, -1)[:, :1] + jnp.zeros((5, 72), jnp.float16)
    bias = bias[0].astype(jnp.float32)
    product = reference(x, w) * 0.5 + np.asarray(bias)
    expected = np.maximum(product, 0) + np.asarray(residual, np.float32)

    def make(interpret):
        how = {"config": config(**changes), "interpret": interpret}
        return lambda x, w, bias, residual: matmul(
            x, w, bias=bias, residual=residual, scale=0.5, activation="relu", **how
        )

    args = [x, w, bias, residual]
    emulated.check(make, args, expected, atol=2**-5, executed=[Warpgroup])


@pytest.mark.parametrize("changes", DIVIDED)
def test_a_gate_is_a_second_product(changes):
    x, w = operands(5, 72, 264)
    gate = operands(1, 72, 264, dtype=jnp.float16)[1][::-1] / 16

    def make(interpret):
        how = {"config": config(**changes), "interpret": interpret}
        return lambda x, w, gate: matmul(
            x, w, gate=gate, activation="relu", out_dtype=jnp.float32, **how
        )

    expected = np.maximum(reference(x, gate), 0) * reference(x, w)
    emulated.check(make, [x, w, gate], expected, atol=1e-3, executed=[Warpgroup])


@pytest.mark.parametrize("transpose_b", [False, True], ids=["w", "w.T"])
def test_the_left_operand_is_transposed(transpose_b):
    c = config(tile_m=16, split=2)
    check((16, 72, 136), c, transpose_a=True, transpose_b=transpose_b)


@pytest.mark.parametrize("changes", DIVIDED[::2])
def test_batches_that_share_an_operand(changes):
    x, w = operands(3, 72, 264, batch=(2,))
    c = config(blocks=16, **changes)
    for a, b in ((x, w), (x[0], w), (x.swapaxes(0, 1), w[0])):
        got = np.asarray(matmul(a, b, config=c), np.float32)
        np.testing.assert_allclose(got, reference(a, b), atol=2**-5)


def test_integers_are_summed_as_integers():
    rng = np.random.default_rng(0)
    x = rng.integers(-128, 128, (3, 288)).astype(np.int8)
    w = rng.integers(-128, 128, (72, 288)).astype(np.int8)

    def make(interpret):
        return functools.partial(
            matmul, transpose_b=True, config=config(split=2), interpret=interpret
        )

    expected = x.astype(np.int32) @ w.T.astype(np.int32)
    emulated.check(make, [x, w], expected, executed=[Warpgroup])


def test_float32_is_multiplied_as_tf32():
    x, w = operands(3, 72, 136, jnp.float32)
    got = matmul(x, w, config=config(tile_k=32, split=2))
    np.testing.assert_allclose(got, reference(x, w), atol=0.1)


# --- compiled -------------------------------------------------------------------------


@pytest.mark.offline
def test_sums_that_are_sent_need_no_fence():
    """It would wait for the reads of the whole device."""
    arguments = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, 256), (256, 64))]
    product = functools.partial(matmul, config=config(split=2))
    (report,) = offline.compile(under(Warpgroup, product), *arguments)
    assert "expect_tx.relaxed.cluster" in report.ptx
    assert "release.cluster.shared" not in report.ptx
    # Those that follow the initialization and precede the exit.
    assert report.ptx.count("barrier.cluster.arrive.relaxed") == 2
    assert report.ptx.count("barrier.cluster.arrive") == 2

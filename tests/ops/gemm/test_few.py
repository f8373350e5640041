# SPDX-License-Identifier: Apache-2.0
"""Products with few rows or few tiles: all ways to divide them, and refusals."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors, offline
from pallas_gpu.ops.gemm import few
from pallas_gpu.ops.gemm.few import SplitMatmulConfig
from tests.support import everywhere
from tests.support.matmuls import ROUNDING, operands, reference
from tests.support.semantics import Warpgroup, under

SMALL = SplitMatmulConfig(tile_m=8, tile_n=64, tile_k=64, stages=2, warpgroups=1)


def config(**changes):
    return dataclasses.replace(SMALL, **changes)


def kernel(shape, c, dtype, out_dtype, transpose_b, interpret):
    dtypes = jnp.dtype(dtype), jnp.dtype(out_dtype or dtype)
    return few.make_kernel(*shape, transpose_b, *dtypes, c, None, interpret)


def check(shape, c, dtype="float16", out_dtype=None, transpose_b=False, **how):
    x, w = operands(*shape, jnp.dtype(dtype))

    def make(interpret):
        product = kernel(shape, c, dtype, out_dtype, transpose_b, interpret)
        return lambda x, w: product(x, w.T if transpose_b else w)

    how = {"executed": [Warpgroup], **how}
    atol = ROUNDING[jnp.dtype(out_dtype or dtype).name]
    everywhere.check(make, [x, w], reference(x, w), atol=atol, **how)


@pytest.mark.parametrize("m", [1, 3, 8])
@pytest.mark.parametrize("transpose_b", [False, True], ids=["w", "w.T"])
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
    ],
)
def test_tiles_that_exceed_the_problem(changes):
    check((35, 200, 152), config(**changes))


@pytest.mark.parametrize("split", [2, 4])
@pytest.mark.parametrize("m", [1, 16, 65])
def test_a_cluster_divides_k(m, split):
    check((m, 136, 264), config(tile_m=16, split=split, blocks=2 * split))


def test_a_cluster_of_eight_blocks():
    check((1, 64, 1160), config(tile_k=128, split=8))


@pytest.mark.parametrize("pair", ["m", "n"])
@pytest.mark.parametrize("transpose_b", [False, True], ids=["w", "w.T"])
def test_two_blocks_share_an_operand(pair, transpose_b):
    # An odd number of tiles along either dimension.
    c = config(tile_m=16, pair=pair, split=2, blocks=8)
    check((35, 136, 200), c, transpose_b=transpose_b)


@pytest.mark.parametrize(("split", "clusters", "blocks"), [(1, 3, 3), (2, 2, 99)])
def test_clusters_divide_k(split, clusters, blocks):
    c = config(tile_m=16, split=split, clusters=clusters, blocks=blocks)
    check((20, 72, 264), c)


@pytest.mark.parametrize(
    ("dtype", "out"), [("bfloat16", None), ("bfloat16", "float32")]
)
def test_types_of_operands_and_result(dtype, out):
    check((5, 64, 128), config(split=2), dtype, out)


@pytest.mark.parametrize("asynchrony", ["eager", "late", "random"])
@pytest.mark.parametrize(
    "changes",
    [
        {"split": 2, "stages": 3},
        {"pair": "m", "tile_m": 16},
        {"pair": "n", "split": 2, "tile_m": 16},
        {"clusters": 2, "split": 2},
    ],
)
def test_there_is_no_race(changes, asynchrony):
    shape, c = (40, 136, 400), config(blocks=8, **changes)
    interpret = plgpu.InterpretParams(asynchrony=asynchrony, seed=3, schedules=3)
    got = kernel(shape, c, "float16", None, False, interpret)(*operands(*shape))
    expected = reference(*operands(*shape))
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, atol=2**-5)


def test_results_are_the_same_in_every_schedule():
    shape, c = (8, 64, 520), config(split=2, clusters=3)
    first, *others = (
        kernel(shape, c, "float16", "float32", False, plgpu.InterpretParams(seed=seed))(
            *operands(*shape)
        )
        for seed in range(6)
    )
    for other in others:
        np.testing.assert_array_equal(first, other)


def test_vmap_makes_a_batch_of_products():
    x, w = operands(3, 64, 128, batch=(2,))
    product = kernel((3, 64, 128), config(split=2), "float16", None, False, None)
    np.testing.assert_allclose(
        np.asarray(jax.vmap(product)(x, w), np.float32),
        reference(x, w),
        atol=ROUNDING["float16"],
    )


# --- compiled -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "c"),
    [
        ((16, 4096, 4096), SplitMatmulConfig(tile_m=16, split=4)),
        ((256, 4096, 4096), SplitMatmulConfig(tile_m=256, tile_n=128, split=4)),
        ((256, 8192, 8192), SplitMatmulConfig(tile_m=128, pair="m")),
        ((256, 256, 65536), SplitMatmulConfig(tile_m=128, split=8, clusters=4)),
    ],
)
def test_nothing_spills(shape, c):
    m, n, k = shape
    arguments = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((m, k), (k, n))]
    product = kernel(shape, c, "bfloat16", None, False, None)
    (report,) = offline.compile(under(Warpgroup, product), *arguments)
    assert report.resources.spill_store_bytes == 0


# --- refusals -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "what", "got"),
    [
        ({"tile_m": 12}, "the tensor core does not support this tile", "12"),
        ({"tile_m": 264}, "the tensor core does not support this tile", "264"),
        ({"tile_k": 8}, "the tensor core does not support this tile", "8"),
        ({"tile_n": 96}, "the warpgroups do not divide the columns", "96"),
        ({"tile_n": 256}, "the warpgroups do not divide the columns", "256"),
        ({"split": 3}, "invalid division of K", "3"),
        ({"split": 8, "pair": "n"}, "invalid division of K", "8"),
        ({"pair": "k"}, "invalid pair", "'k'"),
        ({"part_m": 12}, "the parts do not divide the rows of a tile", "12"),
        ({"stages": 1}, "there are too few stages, clusters or blocks", "stages=1"),
        ({"clusters": 0}, "there are too few stages, clusters or blocks", "clusters=0"),
        ({"blocks": 3, "split": 4}, "there are too few stages", "blocks=3"),
    ],
)
def test_a_configuration_fits_the_tensor_core_and_itself(changes, what, got):
    with pytest.raises(errors.ArgumentError) as caught:
        config(**changes)
    assert caught.value.what.startswith(f"SplitMatmulConfig: {what}")
    assert got in str(caught.value.got)
    assert caught.value.expected and caught.value.hint


def test_every_block_has_a_part_of_k():
    with pytest.raises(errors.ArgumentError) as caught:
        kernel((1, 64, 192), config(split=4), "float16", None, False, None)
    assert caught.value.what == "matmul: a block has no part of K"
    assert "split=4" in caught.value.got

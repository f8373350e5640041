# SPDX-License-Identifier: Apache-2.0
"""Sparse operands on the host: stored elements, positions, and their order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as upstream

import pallas_gpu as plgpu
from pallas_gpu import errors
from pallas_gpu.emulator.gpu.tensor_cores import sparse
from tests.support import host, sparse_products
from tests.support.refusal import refused

TYPES = [jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8]
# Those of other groups, which upstream's function does not order.
OTHERS = [jnp.float32, jnp.float4_e2m1fn]


@pytest.mark.skipif(
    not jax.__version__.startswith("0.11."), reason="compares with upstream 0.11"
)
@pytest.mark.parametrize("dtype", TYPES)
def test_the_order_of_the_metadata_is_upstreams(dtype):
    rng = np.random.default_rng(0)
    meta = host.array(rng.integers(0, 4, (256, 96, 2)).astype(ml_dtypes.uint2))
    np.testing.assert_array_equal(
        plgpu.format_tcgen05_sparse_metadata(meta, dtype),
        upstream.format_tcgen05_sparse_metadata(meta, jnp.dtype(dtype)),
    )


@pytest.mark.parametrize("dtype", TYPES + OTHERS)
def test_stored_elements_and_metadata_are_the_matrix(dtype):
    a = sparse_products.sparse(np.random.default_rng(1), (128, 256), dtype)
    stored, tiles = sparse_products.compressed(a)
    assert stored.shape == (128, 128) and stored.dtype == a.dtype
    rows = np.asarray(tiles)[0].swapaxes(0, 1).reshape(128, -1)
    np.testing.assert_array_equal(sparse.expand(stored, rows), a)


def test_the_first_zeros_are_stored_where_elements_are_missing():
    a = np.array([[0, 0, 0, 5, 0, 0, 0, 0, 0, 6, 7, 0]])
    stored, meta = plgpu.compress_2_of_4(a)
    assert stored.tolist() == [[0, 5, 0, 0, 6, 7]]
    assert meta.astype(int).tolist() == [[[0, 3], [0, 1], [1, 2]]]


def test_of_float32_the_halves_of_an_element_have_positions():
    stored, meta = plgpu.compress_1_of_2(np.array([[0, 5, 6, 0, 0, 0]], np.float32))
    assert stored.tolist() == [[5, 6, 0]]
    assert meta.astype(int).tolist() == [[[2, 3], [0, 1], [0, 1]]]


def test_of_four_bits_pairs_are_stored():
    a = np.array([[0, 0, 0, 1, 0, 0, 2, 0] + 8 * [0]]).astype(jnp.float4_e2m1fn)
    stored, meta = plgpu.compress_4_of_8(a)
    assert stored.astype(int).tolist() == [[0, 1, 2, 0, 0, 0, 0, 0]]
    assert meta.astype(int).tolist() == [[[1, 3], [0, 1]]]


ONE_ROW = np.zeros((3, 8))
ONE_ROW[2, 4:7] = 1
DENSE = np.array([[1, 0, 1, 1, 1, 0, 0, 0]])
MATRICES = {
    "1 of 2": lambda: plgpu.compress_1_of_2(DENSE),
    "4 of 8": lambda: plgpu.compress_4_of_8(DENSE),
    "2 of 4": lambda: plgpu.compress_2_of_4(ONE_ROW),
    "no rows": lambda: plgpu.compress_2_of_4(np.zeros(8)),
    "half a group": lambda: plgpu.compress_2_of_4(np.zeros((4, 6))),
}


@pytest.mark.parametrize("compress", MATRICES.values(), ids=MATRICES)
@refused
def test_matrices_that_are_not_sparse_or_have_no_groups_are_refused(compress):
    compress()


def test_metadata_of_float32_with_half_an_element_is_reported():
    meta = np.broadcast_to(np.array([1, 2], ml_dtypes.uint2), (128, 32, 2))
    tiles = np.asarray(plgpu.format_tcgen05_sparse_metadata(meta, jnp.float32))
    with pytest.raises(errors.KernelError, match="group of two elements"):
        sparse.expand(np.ones((128, 32), np.float32), tiles[0, 0])


@pytest.mark.parametrize(
    ("shape", "dtype", "operand"),
    [
        ((192, 32, 2), "uint2", "float16"),
        ((128, 16, 2), "uint2", "float16"),
        ((128, 32, 4), "uint2", "float16"),
        ((128, 64), "uint2", "float16"),
        ((128, 32, 2), "uint8", "float16"),
        ((128, 16, 2), "uint2", "float32"),
        ((128, 32, 2), "uint2", "float64"),
    ],
)
@refused
def test_metadata_of_other_shapes_and_types_is_refused(shape, dtype, operand):
    metadata = jnp.zeros(shape, dtype)
    plgpu.format_tcgen05_sparse_metadata(metadata, jnp.dtype(operand))  # HERE

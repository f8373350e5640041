# SPDX-License-Identifier: Apache-2.0
"""The kernels of benchmarks/copies.py: correct when small, compiled at full size."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from benchmarks import copies, copy_kernels, dependent_launch, split_products
from tests.support import everywhere

BF16 = jnp.bfloat16


def array(shape):
    return np.asarray(jnp.asarray(np.arange(np.prod(shape)) % 31, BF16).reshape(shape))


STREAMS = {
    "TMA": lambda i: copy_kernels.stream(8, 2, interpret=i),
    "two blocks on an SM": lambda i: copy_kernels.stream(8, 2, resident=2, interpret=i),
    "cp.async": lambda i: copy_kernels.stream(8, 2, by_threads=True, interpret=i),
    "ring": lambda i: copy_kernels.ring(8, 4, 2, interpret=i),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_is_a_copy(name):
    x = array((128, copy_kernels.WIDTH))
    everywhere.check(STREAMS[name], [x], x)


def test_a_gather_takes_rows():
    x = array((32, 256))
    rows = np.random.default_rng(0).permutation(32)[:16].astype(np.int32)
    everywhere.check(
        lambda i: copy_kernels.gather(4, 2, interpret=i), [x, rows], x[rows]
    )


@pytest.mark.parametrize("tile_m", [64, 128])
def test_a_split_product_adds_its_parts(tile_m):
    a, b = array((128, 768)) % 3, array((768, 128)) % 3
    expected = a.astype(np.float32) @ b.astype(np.float32)
    config = split_products.SplitProduct(3, tile_m=tile_m, stages=2)

    def make(interpret):
        return split_products.split_product(config, interpret=interpret)

    np.testing.assert_array_equal(make(True)(a, b), expected)


@pytest.mark.offline
@pytest.mark.parametrize("name", copies.CASES)
def test_a_kernel_of_the_benchmark_compiles_without_spills(name):
    for kernel, shapes in copies.CASES[name]():
        args = [jax.ShapeDtypeStruct(*x) for x in shapes]
        reports = plgpu.offline.compile(kernel, *args)
        assert reports
        for report in reports:
            assert report.resources.spill_store_bytes == 0


@pytest.mark.parametrize("name", dependent_launch.CHAINS)
def test_a_step_of_a_chain_adds_one(name):
    shape = dependent_launch.BLOCKS, 2, dependent_launch.COLUMNS
    x = np.zeros(shape, np.float32)
    step = dependent_launch.step(2, *dependent_launch.CHAINS[name], interpret=True)
    np.testing.assert_array_equal(step(x), x + 1)

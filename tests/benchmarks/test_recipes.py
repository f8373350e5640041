# SPDX-License-Identifier: Apache-2.0
"""The products of benchmarks/recipes.py: correct when small, no spills at full size."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from benchmarks import recipes

BF16 = jnp.bfloat16


def normal(*shape):
    x = np.random.default_rng(0).standard_normal(shape, np.float32)
    return jnp.asarray(x / 8, BF16)


@pytest.mark.parametrize("rank", recipes.RANKS)
def test_a_product_with_an_adapter(rank):
    x, w, a, b = (
        normal(512, 128),
        normal(128, 256),
        normal(128, rank),
        normal(rank, 256),
    )
    got = recipes.lora(512, 256, 128, rank)(x, w, x @ a, b)
    expected = recipes.adapted(*(y.astype(jnp.float32) for y in (x, w, a, b)))
    np.testing.assert_allclose(got.astype(jnp.float32), expected, atol=2e-2)


@pytest.mark.offline
@pytest.mark.parametrize("rank", recipes.RANKS)
def test_no_adapter_spills(rank):
    size = recipes.SIZE
    shapes = (size, size), (size, size), (size, rank), (rank, size)
    types = (jax.ShapeDtypeStruct(shape, BF16) for shape in shapes)
    product = recipes.lora(size, size, size, rank)
    (report,) = plgpu.offline.compile(product, *types, target="sm_90a")
    assert not report.resources.spill_store_bytes

# SPDX-License-Identifier: Apache-2.0
"""Whole kernels on the Mosaic level's names: one source for this package and upstream.

They run in lockstep, and compile for their targets by both packages.
"""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic import gpu as upstream

import pallas_gpu as plgpu
from pallas_gpu import arch
from pallas_gpu import mosaic as mgpu
from tests.support.differential import sides
from tests.support.mosaic_kernels import on_card
from tests.support.mosaic_level import emitting, matmul_blackwell
from tests.support.mosaic_level.flash_attention import Attention
from tests.support.mosaic_level.matmul import Matmul

Blackwell = matmul_blackwell.Matmul


def normal(*shapes, dtype=np.float16):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def as_float(*arrays):
    return [np.asarray(x).astype(np.float32) for x in arrays]


def product(a, b):
    a, b = as_float(a, b)
    return a @ b


def attention(q, k, v):
    q, k, v = as_float(q, k, v)
    scores = np.einsum("hqd,hkd->hqk", q, k) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,hkd->hqd", weights / weights.sum(-1, keepdims=True), v)


SQUARES = ((512, 256), (256, 256))
# name: (kernel of a module, shapes of the operands, the result in NumPy)
SMALL = {
    "matmul": (
        lambda m: Matmul(m, 512, 256, 256, tile_n=128, stages=2, blocks=4),
        SQUARES, product,
    ),
    "matmul, a tile each": (
        lambda m: Matmul(m, 512, 256, 256, tile_n=128, stages=3, blocks=8),
        SQUARES, product,
    ),
    "matmul, in bfloat16": (
        lambda m: Matmul(
            m, 256, 128, 128, jnp.bfloat16, tile_n=128, stages=2, blocks=2
        ),
        ((256, 128), (128, 128)), product,
    ),
    "attention": (
        lambda m: Attention(m, 2, 256, 64, block_kv=64), ((2, 256, 64),) * 3, attention
    ),
    "attention, three warpgroups": (
        lambda m: Attention(m, 1, 384, 128, block_kv=64, multiplying=3),
        ((1, 384, 128),) * 3, attention,
    ),
    "Blackwell": (
        lambda m: Blackwell(m, 512, 256, 256, tile_n=128, stages=2), SQUARES, product
    ),
    "Blackwell, pairs": (
        lambda m: Blackwell(m, 512, 256, 256, pair=True, tile_n=128, stages=2),
        SQUARES, product,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SMALL)
def test_a_kernel_gives_what_numpy_gives(case):
    make, shapes, expected = SMALL[case]
    chosen = make(mgpu)
    operands = normal(*shapes, dtype=np.dtype(getattr(chosen, "dtype", np.float16)))
    function, wanted = chosen.kernel(), expected(*operands)
    tolerance = 1e-2 if "bfloat16" in case else 2e-3
    results = [function(*operands)]
    if "Blackwell" not in case:
        results += on_card(function, operands)
    for found in as_float(*results):
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=0.05)


HALF = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float16)
BIG = [HALF((4096, 4096))] * 2
# name: (target, kernel of a module, operands, the instructions of its products)
LARGE = {
    "matmul": ("sm_90a", lambda m: Matmul(m, 4096, 4096, 4096), BIG, "wgmma.mma_async"),
    "attention": (
        "sm_90a", lambda m: Attention(m, 16, 4096), [HALF((16, 4096, 128))] * 3,
        "wgmma.mma_async",
    ),
    "Blackwell": ("sm_100a", lambda m: Blackwell(m, *(4096,) * 3), BIG, "tcgen05.mma."),
    "Blackwell, pairs": (
        "sm_100a", lambda m: Blackwell(m, *(4096,) * 3, pair=True), BIG, "tcgen05.mma."
    ),
}  # fmt: skip


@pytest.mark.offline
@pytest.mark.parametrize("case", LARGE)
def test_both_packages_compile_one_source(case):
    target, make, operands, products = LARGE[case]
    ours = make(mgpu).kernel()
    (report,) = plgpu.offline.compile(ours, *operands, target=target)
    assert report.resources.spill_store_bytes == 0

    def theirs(*arrays):
        with emitting():
            function = make(upstream).kernel()
        return function(*arrays)

    ptx = sides.upstream(arch.target(target)).ptx(theirs, *operands)
    # Upstream halves products of 256 columns.
    assert 0 < count(products, report.ptx) <= count(products, ptx)
    copies, meetings = "cp.async.bulk.tensor", "barrier.cluster.wait"
    assert count(copies, report.ptx) == count(copies, ptx) > 0
    assert count(meetings, report.ptx) == count(meetings, ptx)


def count(name, ptx):
    return len(re.findall(re.escape(name), ptx))

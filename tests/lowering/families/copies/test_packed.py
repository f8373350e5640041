# SPDX-License-Identifier: Apache-2.0
"""Tensor maps of elements that share bytes: their edges, and alignment."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.refusal import refused
from tests.support.semantics import BOTH, under

PACKED = [jnp.int4, jnp.uint4, jnp.float4_e2m1fn, jnp.int2]
TMA = plgpu.AsyncCopyImplementation.TMA


def copied(dtype, shape, start, tile):
    """A kernel that copies a part of an array by TMA, and what it has to give."""
    x = np.asarray((jnp.arange(np.prod(shape)).reshape(shape) % 2).astype(dtype))
    expected = np.zeros(tile, x.dtype)
    inside = x[tuple(slice(a, a + n) for a, n in zip(start, tile, strict=True))]
    expected[tuple(map(slice, inside.shape))] = inside

    def body(x, o, t, full):
        part = tuple(plgpu.ds(a, n) for a, n in zip(start, tile, strict=True))
        plgpu.copy_gmem_to_smem(x.at[part], t, full, implementation=TMA)
        plgpu.barrier_wait(full)
        plgpu.copy_smem_to_gmem(t, o)
        plgpu.wait_smem_to_gmem(0)

    scratch = plgpu.SMEM(tile, dtype), plgpu.Barrier()
    return everywhere.kernel(body, expected, *scratch), [x], expected


@pytest.mark.parametrize("dtype", PACKED)
def test_a_part_over_the_edge_is_filled_with_zeros(dtype):
    # 96 elements of 4 bits are 48 bytes; of 2 bits, 128 are 32.
    columns = 128 if dtype == jnp.int2 else 96
    everywhere.check(*copied(dtype, (20, columns), (8, 64), (32, 64)))


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
def test_the_map_is_one_of_bytes(semantics):
    make, args, _ = copied(jnp.int4, (64, 128), (8, 64), (32, 64))
    (report,) = plgpu.offline.compile(under(semantics, make()), *args)
    assert report.ptx.count("cp.async.bulk.tensor.2d") == 2


@pytest.mark.parametrize(
    ("shape", "start", "tile"),
    [
        ((64, 128), (8, 1), (32, 64)),
        ((64, 130), (8, 0), (32, 64)),
        ((64, 128), (8, 0), (32, 33)),
    ],
    ids=["start", "rows", "tile"],
)
@refused
def test_bytes_are_not_divided(shape, start, tile):
    make, args, _ = copied(jnp.int4, shape, start, tile)
    make(True)(*args)

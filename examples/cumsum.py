# SPDX-License-Identifier: Apache-2.0
"""The cumulative sum of a long array: sums of blocks, then each block again."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from examples import Case, normal

BLOCK = 4096


def cumsum(x: jax.Array) -> jax.Array:
    """Returns the cumulative sum; x is one-dimensional."""
    blocks = plgpu.cdiv(x.size, BLOCK)
    # A block over the edge goes through SMEM, by TMA, which knows where the array ends.
    space = plgpu.SMEM if x.size % BLOCK else plgpu.GMEM
    block = plgpu.BlockSpec((BLOCK,), lambda i: (i,), memory_space=space)
    one = plgpu.BlockSpec((1,), lambda i: (i,), memory_space=plgpu.GMEM)

    def total(x_ref, sum_ref):
        sum_ref[0] = jnp.sum(x_ref[...])

    sums = plgpu.pallas_call(
        total,
        out_shape=jax.ShapeDtypeStruct((blocks,), x.dtype),
        grid=(blocks,),
        in_specs=[block],
        out_specs=one,
    )(x)
    before = cumsum(sums) - sums if blocks > 1 else jnp.zeros_like(sums)

    def scan(x_ref, before_ref, o_ref):
        o_ref[...] = jnp.cumsum(x_ref[...]) + before_ref[0]

    return plgpu.pallas_call(
        scan,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(blocks,),
        in_specs=[block, one],
        out_specs=block,
    )(x, before)


CASES = [Case(cumsum, jnp.cumsum, (normal(0, 20001),), 1e-3)]

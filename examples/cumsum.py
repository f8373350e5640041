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
    return _scan(x, exclusive=False)


def _scan(x: jax.Array, *, exclusive: bool) -> jax.Array:
    """The cumulative sum; if exclusive, of the elements before each one."""
    blocks = plgpu.cdiv(x.size, BLOCK)
    # A block over the edge goes through SMEM, by TMA, which knows where the array ends.
    space = plgpu.SMEM if x.size % BLOCK else plgpu.GMEM
    # From the end: the second kernel finds there what the L2 still has of the first.
    last = blocks - 1

    def specs(index_map):
        block = plgpu.BlockSpec((BLOCK,), index_map, memory_space=space)
        return block, plgpu.BlockSpec((1,), index_map, memory_space=plgpu.GMEM)

    def scan(x_ref, before_ref, o_ref):
        x = x_ref[...]
        result = jnp.cumsum(x) + before_ref[0]
        o_ref[...] = result - x if exclusive else result

    if blocks > 1:
        before = _scan(_sums(x, *specs(lambda i: (i,))), exclusive=True)
    else:
        before = jnp.zeros((1,), x.dtype)
    block, one = specs(lambda i: (last - i,))
    return plgpu.pallas_call(
        scan,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(blocks,),
        in_specs=[block, one],
        out_specs=block,
    )(x, before)


def _sums(x: jax.Array, block: plgpu.BlockSpec, one: plgpu.BlockSpec) -> jax.Array:
    """The sum of each block."""

    def total(x_ref, sum_ref):
        sum_ref[0] = jnp.sum(x_ref[...])

    blocks = plgpu.cdiv(x.size, BLOCK)
    return plgpu.pallas_call(
        total,
        out_shape=jax.ShapeDtypeStruct((blocks,), x.dtype),
        grid=(blocks,),
        in_specs=[block],
        out_specs=one,
    )(x)


CASES = [Case(cumsum, jnp.cumsum, (normal(0, 20001),), 1e-3)]

# SPDX-License-Identifier: Apache-2.0
"""x + 1 for an array of any length: the last block is over its edge."""

from __future__ import annotations

import jax

import pallas_gpu as plgpu
from examples import Case, normal

BLOCK = 1024


def add_one(x: jax.Array) -> jax.Array:
    """Returns x + 1; x is one-dimensional."""

    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    # A block over the edge goes through SMEM, by TMA, which knows where the array ends.
    space = plgpu.SMEM if x.size % BLOCK else plgpu.GMEM
    spec = plgpu.BlockSpec((BLOCK,), lambda i: (i,), memory_space=space)
    return plgpu.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(plgpu.cdiv(x.size, BLOCK),),
        in_specs=[spec],
        out_specs=spec,
    )(x)


CASES = [
    Case(add_one, lambda x: x + 1, (normal(0, 1001),)),
    Case(add_one, lambda x: x + 1, (normal(0, 4096),)),
]

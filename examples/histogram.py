# SPDX-License-Identifier: Apache-2.0
"""A histogram: each block counts in shared memory, then adds to the result."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from examples import Case, integers

BLOCK = 4096


def histogram(x: jax.Array, bins: int) -> jax.Array:
    """Returns how often each of the values 0 to bins - 1 occurs; x is (n,), int32."""

    def body(x_ref, _, counts_ref, local_ref):
        local_ref[...] = jnp.zeros(bins, jnp.int32)
        position = plgpu.program_id(0) * BLOCK + jnp.arange(BLOCK)
        ones = jnp.ones(BLOCK, jnp.int32)
        value = x_ref[...]
        counted = (position < x.size) & (value >= 0) & (value < bins)
        plgpu.atomic_add(local_ref.at[value], ones, mask=counted)
        plgpu.atomic_add(counts_ref, local_ref[...])

    return plgpu.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((bins,), jnp.int32),
        grid=(plgpu.cdiv(x.size, BLOCK),),
        in_specs=[
            plgpu.BlockSpec((BLOCK,), lambda i: (i,)),
            plgpu.BlockSpec(memory_space=plgpu.GMEM),
        ],
        out_specs=plgpu.BlockSpec(memory_space=plgpu.GMEM),
        scratch_shapes=[plgpu.SMEM((bins,), jnp.int32)],
        input_output_aliases={1: 0},
    )(x, jnp.zeros((bins,), jnp.int32))


_X = integers(0, -3, 103, 10001)
CASES = [
    Case(
        lambda x: histogram(x, 100),
        lambda x: jnp.sum(x[:, None] == jnp.arange(100), axis=0, dtype=jnp.int32),
        (_X,),
        0.0,
    )
]

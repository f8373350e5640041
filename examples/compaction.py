# SPDX-License-Identifier: Apache-2.0
"""Stream compaction: blocks claim their places in the result with an atomic counter."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from examples import Case, normal

BLOCK = 1024


def compact(x: jax.Array, least: float) -> tuple[jax.Array, jax.Array]:
    """Returns the elements of x that are `least` or more, and their number.

    Those of a block stay together and in order; the blocks come in any order. Behind
    them the result is infinite.

    Args:
      x: (n,).
      least: a number.
    """

    # Without block specs the references are whole arrays, in GMEM.
    def body(x_ref, _, __, count_ref, o_ref):
        index = plgpu.program_id(0) * BLOCK + jnp.arange(BLOCK)
        value = plgpu.load(x_ref, index, mask=index < x.size, other=-jnp.inf)
        kept = value >= least
        place = jnp.cumsum(kept.astype(jnp.int32))  # counts from 1
        start = plgpu.atomic_add(count_ref.at[0], place[-1])  # what it was before
        plgpu.store(o_ref, start + place - 1, value, mask=kept)

    count, kept = plgpu.pallas_call(
        body,
        out_shape=[
            jax.ShapeDtypeStruct((1,), jnp.int32),
            jax.ShapeDtypeStruct(x.shape, x.dtype),
        ],
        grid=plgpu.cdiv(x.size, BLOCK),
        input_output_aliases={1: 0, 2: 1},  # the counter starts at 0
    )(x, jnp.zeros(1, jnp.int32), jnp.full(x.shape, jnp.inf, x.dtype))
    return kept, count[0]


def reference(x: jax.Array, least: float) -> tuple[jax.Array, jax.Array]:
    kept = x >= least
    return jnp.sort(jnp.where(kept, x, jnp.inf)), jnp.sum(kept)


def _sorted(x: jax.Array, least: float) -> tuple[jax.Array, jax.Array]:
    kept, count = compact(x, least)
    return jnp.sort(kept), count


CASES = [
    Case(
        lambda x: _sorted(x, 0.5),
        lambda x: reference(x, 0.5),
        (normal(0, 5001),),
        0.0,
    )
]

# SPDX-License-Identifier: Apache-2.0
"""Dropout whose mask is drawn in the kernel, and drawn again for the derivative."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu
from examples import Case, normal

BLOCK = (16, 128)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def dropout(x: jax.Array, seed: jax.Array, rate: float) -> jax.Array:
    """Returns x with elements set to 0 with probability `rate`, others scaled.

    Args:
      x: (rows, columns), multiples of 16 and 128.
      seed: (1,), int32.
      rate: between 0 and 1.
    """

    def body(seed_ref, x_ref, o_ref):
        block = plgpu.program_id(0) * plgpu.num_programs(1) + plgpu.program_id(1)
        key = jax.random.fold_in(jax.random.key(seed_ref[0]), block)
        keep = jax.random.bernoulli(key, 1 - rate, BLOCK)
        o_ref[...] = jnp.where(keep, x_ref[...] / (1 - rate), 0).astype(o_ref.dtype)

    spec = plgpu.BlockSpec(BLOCK, lambda i, j: (i, j))
    return plgpu.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // BLOCK[0], x.shape[1] // BLOCK[1]),
        in_specs=[plgpu.BlockSpec(memory_space=plgpu.GMEM), spec],
        out_specs=spec,
    )(seed, x)


dropout.defvjp(
    lambda x, seed, rate: (dropout(x, seed, rate), seed),
    lambda rate, seed, d_out: (dropout(d_out, seed, rate), None),
)


def reference(x: jax.Array, seed: jax.Array, rate: float) -> jax.Array:
    rows, columns = (n // b for n, b in zip(x.shape, BLOCK, strict=True))

    def keep(block):
        key = jax.random.fold_in(jax.random.key(seed[0]), block)
        return jax.random.bernoulli(key, 1 - rate, BLOCK)

    tiles = [[keep(i * columns + j) for j in range(columns)] for i in range(rows)]
    return jnp.where(jnp.block(tiles), x / (1 - rate), 0)


_X, _SEED = normal(0, 32, 256), np.array([7], np.int32)
CASES = [
    Case(
        functools.partial(dropout, rate=0.25),
        functools.partial(reference, rate=0.25),
        (_X, _SEED),
    ),
    Case(
        jax.grad(lambda x, seed: jnp.sum(dropout(x, seed, 0.25) * _X)),
        jax.grad(lambda x, seed: jnp.sum(reference(x, seed, 0.25) * _X)),
        (normal(1, 32, 256), _SEED),
    ),
]

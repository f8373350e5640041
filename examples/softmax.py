# SPDX-License-Identifier: Apache-2.0
"""Softmax of the rows of a matrix: each row is read once."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from examples import Case, normal


def softmax(x: jax.Array, *, approx_math: bool = False) -> jax.Array:
    """Returns the softmax of each row; computes in float32.

    Args:
      x: (rows, columns).
      approx_math: use the hardware's approximations of exp and division.
    """

    def body(x_ref, o_ref):
        x = x_ref[...].astype(jnp.float32)
        o_ref[...] = jax.nn.softmax(x, axis=-1).astype(o_ref.dtype)

    spec = plgpu.BlockSpec((1, x.shape[1]), lambda i: (i, 0), memory_space=plgpu.GMEM)
    return plgpu.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0],),
        in_specs=[spec],
        out_specs=spec,
        compiler_params=plgpu.CompilerParams(approx_math=approx_math),
    )(x)


CASES = [
    Case(softmax, jax.nn.softmax, (normal(0, 8, 1024),), 1e-6),
    Case(softmax, jax.nn.softmax, (normal(0, 5, 777, dtype=jnp.bfloat16),), 1e-2),
]

# SPDX-License-Identifier: Apache-2.0
"""Rows and columns of a 100x77 matrix, centred: no size is a power of two."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from examples import Case, normal


def centre(x: jax.Array) -> jax.Array:
    """Subtracts from each element the means of its row and of its column."""

    def body(x_ref, o_ref):
        x = x_ref[...]
        rows, columns = jnp.mean(x, 1, keepdims=True), jnp.mean(x, 0, keepdims=True)
        o_ref[...] = x - rows - columns + jnp.mean(x)

    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def reference(x: jax.Array) -> jax.Array:
    return x - x.mean(1, keepdims=True) - x.mean(0, keepdims=True) + x.mean()


CASES = [Case(centre, reference, (normal(0, 100, 77),))]

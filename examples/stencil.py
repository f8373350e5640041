# SPDX-License-Identifier: Apache-2.0
"""A five-point stencil: each block reads its tile with a halo of one element."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from examples import Case, normal

TILE = 32


def laplace(x: jax.Array) -> jax.Array:
    """Returns the sum of the four neighbours minus 4 * x; outside, x is zero."""
    halo = TILE + 2

    def body(x_ref, o_ref):
        x = x_ref[...]
        o_ref[...] = (
            x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:]
            - 4 * x[1:-1, 1:-1]
        )  # fmt: skip

    def part(size: int) -> plgpu.Element:
        return plgpu.Element(halo, padding=(1, 1))

    rows, columns = x.shape
    return plgpu.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(plgpu.cdiv(rows, TILE), plgpu.cdiv(columns, TILE)),
        in_specs=[
            plgpu.BlockSpec(
                (part(rows), part(columns)), lambda i, j: (i * TILE, j * TILE)
            )
        ],
        out_specs=plgpu.BlockSpec((TILE, TILE), lambda i, j: (i, j)),
    )(x)


def reference(x: jax.Array) -> jax.Array:
    p = jnp.pad(x, 1)
    return p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:] - 4 * x


CASES = [Case(laplace, reference, (normal(0, 64, 96),))]

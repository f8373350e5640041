# SPDX-License-Identifier: Apache-2.0
"""The k largest elements of each row, with their positions."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from examples import Case, normal


def top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns values and positions, largest first; x is (rows, columns)."""
    rows, columns = x.shape

    def body(x_ref, values_ref, positions_ref):
        values, positions = jax.lax.top_k(x_ref[0], k)
        values_ref[0], positions_ref[0] = values, positions

    def spec(n):
        return plgpu.BlockSpec((1, n), lambda i: (i, 0), memory_space=plgpu.GMEM)

    return plgpu.pallas_call(
        body,
        out_shape=(
            jax.ShapeDtypeStruct((rows, k), x.dtype),
            jax.ShapeDtypeStruct((rows, k), jnp.int32),
        ),
        grid=(rows,),
        in_specs=[spec(columns)],
        out_specs=(spec(k), spec(k)),
    )(x)


CASES = [
    Case(
        functools.partial(top_k, k=5),
        functools.partial(jax.lax.top_k, k=5),
        (normal(0, 4, 1000),),
        0.0,
    )
]

# SPDX-License-Identifier: Apache-2.0
"""Products with weights of 8 or 4 bits, which become bfloat16 in registers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu
from examples import Case, integers, normal

ROWS, COLUMNS, DEPTH = 64, 128, 64


def matmul(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns x @ (w * scale).

    Args:
      x: (m, k), bfloat16.
      w: (k, n), int8 or int4.
      scale: (n,), float32.
    """
    (m, k), n = x.shape, w.shape[1]

    def body(x_ref, w_ref, scale_ref, o_ref, acc_ref):
        @plgpu.when(plgpu.program_id(2) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        weights = w_ref[...].astype(jnp.bfloat16)
        acc_ref[...] += jnp.dot(x_ref[...], weights, preferred_element_type=jnp.float32)

        @plgpu.when(plgpu.program_id(2) == k // DEPTH - 1)
        def _():
            o_ref[...] = (acc_ref[...] * scale_ref[...]).astype(o_ref.dtype)

    return plgpu.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        grid=(m // ROWS, n // COLUMNS, k // DEPTH),
        in_specs=[
            plgpu.BlockSpec((ROWS, DEPTH), lambda i, j, s: (i, s)),
            plgpu.BlockSpec((DEPTH, COLUMNS), lambda i, j, s: (s, j)),
            plgpu.BlockSpec((COLUMNS,), lambda i, j, s: (j,)),
        ],
        out_specs=plgpu.BlockSpec((ROWS, COLUMNS), lambda i, j, s: (i, j)),
        scratch_shapes=[plgpu.ACC((ROWS, COLUMNS), jnp.float32)],
        compiler_params=plgpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
    )(x, w, scale)


def reference(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
    return ((x.astype(jnp.float32) @ w.astype(jnp.float32)) * scale).astype(x.dtype)


def _case(bits: int) -> Case:
    most = 2 ** (bits - 1)
    w: Any = integers(1, -most, most, 256, 256)
    x = normal(0, 128, 256, dtype=jnp.bfloat16)
    scale = np.exp(normal(2, 256)) / most
    return Case(matmul, reference, (x, w.astype(f"int{bits}"), scale), 2e-2)


CASES = [_case(8), _case(4)]

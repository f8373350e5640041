# SPDX-License-Identifier: Apache-2.0
"""A 3x3 convolution as nine matrix products on shifted parts of the image."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from examples import Case, normal

PIXELS, CHANNELS = 64, 64


def convolution(x: jax.Array, w: jax.Array) -> jax.Array:
    """Returns the convolution with zeros around the image.

    Args:
      x: (batch, height, width, channels); width a multiple of 64.
      w: (3, 3, channels, results); results a multiple of 64.
    """
    batch, height, width, channels = x.shape
    results = w.shape[-1]

    def body(x_ref, w_ref, o_ref):
        image, row = plgpu.program_id(0), plgpu.program_id(1)
        first = plgpu.program_id(2) * PIXELS
        acc = jnp.zeros((PIXELS, CHANNELS), jnp.float32)
        for i in range(3):
            for j in range(3):
                a = x_ref[image, row + i, plgpu.ds(first + j, PIXELS)]
                b = w_ref[i, j]
                acc += jnp.dot(a, b, preferred_element_type=jnp.float32)
        o_ref[0, 0] = acc.astype(o_ref.dtype)

    return plgpu.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((batch, height, width, results), x.dtype),
        grid=(batch, height, width // PIXELS, results // CHANNELS),
        in_specs=[
            plgpu.BlockSpec(memory_space=plgpu.GMEM),
            plgpu.BlockSpec(
                (3, 3, channels, CHANNELS), lambda n, h, p, c: (0, 0, 0, c)
            ),
        ],
        out_specs=plgpu.BlockSpec(
            (1, 1, PIXELS, CHANNELS), lambda n, h, p, c: (n, h, p, c)
        ),
    )(jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))), w)


def reference(x: jax.Array, w: jax.Array) -> jax.Array:
    out = jax.lax.conv_general_dilated(
        x.astype(jnp.float32), w.astype(jnp.float32), (1, 1), "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip
    return out.astype(x.dtype)


_X = normal(0, 1, 4, 64, 64, dtype=jnp.bfloat16)
_W = normal(1, 3, 3, 64, 64, dtype=jnp.bfloat16) / 24
CASES = [Case(convolution, reference, (_X, _W.astype(jnp.bfloat16)), 2e-2)]

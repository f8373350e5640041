# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding, for pairs that are halves apart or neighbours."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from examples import Case, normal

ROWS = 16


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def rotary(x: jax.Array, neighbours: bool = False, inverse: bool = False) -> jax.Array:
    """Rotates the pairs of each position's vector by angles that grow with it.

    Args:
      x: (heads, positions, dimension).
      neighbours: the pairs are (0, 1), (2, 3) ..., else (0, d/2), (1, d/2 + 1) ...
      inverse: rotate backwards, which is the derivative too.
    """
    heads, positions, d = x.shape
    sign = -1.0 if inverse else 1.0

    def body(x_ref, o_ref):
        x = x_ref[0].astype(jnp.float32)
        first = plgpu.program_id(1) * ROWS
        position = first + plgpu.broadcasted_iota(jnp.int32, (ROWS, d // 2), 0)
        frequency = plgpu.broadcasted_iota(jnp.int32, (ROWS, d // 2), 1)
        angle = position * jnp.exp2(frequency * (-2 * 13.287712 / d))  # 10000^(-2i/d)
        cos, sin = jnp.cos(angle), sign * jnp.sin(angle)
        if neighbours:
            a, b = x[:, 0::2], x[:, 1::2]
        else:
            a, b = x[:, : d // 2], x[:, d // 2 :]
        parts = a * cos - b * sin, a * sin + b * cos
        if neighbours:
            rotated = jnp.stack(parts, -1).reshape(ROWS, d)
        else:
            rotated = jnp.concatenate(parts, -1)
        o_ref[0] = rotated.astype(o_ref.dtype)

    spec = plgpu.BlockSpec(
        (1, ROWS, d), lambda h, i: (h, i, 0), memory_space=plgpu.GMEM
    )
    return plgpu.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(heads, plgpu.cdiv(positions, ROWS)),
        in_specs=[spec],
        out_specs=spec,
    )(x)


rotary.defvjp(
    lambda x, neighbours, inverse: (rotary(x, neighbours, inverse), None),
    lambda neighbours, inverse, _, d: (rotary(d, neighbours, not inverse),),
)


def reference(x: jax.Array, neighbours: bool = False) -> jax.Array:
    positions, d = x.shape[1:]
    frequency = 10000.0 ** (-2 * jnp.arange(d // 2) / d)
    angle = jnp.arange(positions)[:, None] * frequency
    pairs = (
        x.reshape(*x.shape[:2], -1, 2)
        if neighbours
        else x.reshape(*x.shape[:2], 2, -1).swapaxes(-1, -2)
    )
    a, b = pairs[..., 0], pairs[..., 1]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    axis = -1 if neighbours else -2
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], axis).reshape(x.shape)


_X = normal(0, 2, 32, 64)
CASES = [
    Case(
        functools.partial(rotary, neighbours=n),
        functools.partial(reference, neighbours=n),
        (_X,),
        1e-4,
    )
    for n in (False, True)
] + [
    Case(
        jax.grad(lambda x: jnp.sum(rotary(x) * _X)),
        jax.grad(lambda x: jnp.sum(reference(x) * _X)),
        (normal(1, 2, 32, 64),),
        1e-4,
    )
]

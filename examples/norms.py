# SPDX-License-Identifier: Apache-2.0
"""Layer norm and RMS norm of rows with a learned scale, and their derivatives."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from examples import Case, normal

EPSILON = 1e-5
# Rows of one block of the backward pass, which sums the scale's gradient over them.
ROWS = 4


def _normalized(x: Any, centred: bool) -> tuple[Any, Any]:
    """Returns normalized rows, and the factor that normalized each of them."""
    if centred:
        x = x - jnp.mean(x, -1, keepdims=True)
    factor = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPSILON)
    return x * factor, factor


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def norm(x: jax.Array, scale: jax.Array, centred: bool) -> jax.Array:
    """Returns the normalized rows of x times a scale for each column.

    Args:
      x: (rows, columns).
      scale: (columns,).
      centred: True for layer norm, which subtracts the mean; False for RMS norm.
    """

    def body(x_ref, scale_ref, o_ref):
        y, _ = _normalized(x_ref[...].astype(jnp.float32), centred)
        o_ref[...] = (y * scale_ref[...].astype(jnp.float32)).astype(o_ref.dtype)

    row = plgpu.BlockSpec((1, x.shape[1]), lambda i: (i, 0), memory_space=plgpu.GMEM)
    return plgpu.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0],),
        in_specs=[row, plgpu.BlockSpec(memory_space=plgpu.GMEM)],
        out_specs=row,
    )(x, scale)


def _forward(x: jax.Array, scale: jax.Array, centred: bool) -> Any:
    return norm(x, scale, centred), (x, scale)


def _backward(centred: bool, saved: Any, d_out: jax.Array) -> Any:
    """The derivatives of rows, and of the scale: a partial sum of each block."""
    x, scale = saved
    rows, columns = x.shape

    def body(x_ref, scale_ref, d_out_ref, dx_ref, d_scale_ref):
        def one_row(i, d_scale):
            y, factor = _normalized(x_ref[i].astype(jnp.float32), centred)
            d_out = d_out_ref[i].astype(jnp.float32)
            dy = d_out * scale_ref[...].astype(jnp.float32)
            dx = dy - y * jnp.mean(dy * y, -1, keepdims=True)
            if centred:
                dx = dx - jnp.mean(dy, -1, keepdims=True)
            dx_ref[i] = (dx * factor).astype(dx_ref.dtype)
            return d_scale + d_out * y

        d_scale_ref[0] = jax.lax.fori_loop(
            0, ROWS, one_row, jnp.zeros(columns, jnp.float32)
        )

    block = plgpu.BlockSpec((ROWS, columns), lambda i: (i, 0), memory_space=plgpu.GMEM)
    part = plgpu.BlockSpec((1, columns), lambda i: (i, 0), memory_space=plgpu.GMEM)
    dx, d_scale = plgpu.pallas_call(
        body,
        out_shape=(
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((rows // ROWS, columns), jnp.float32),
        ),
        grid=(rows // ROWS,),
        in_specs=[block, plgpu.BlockSpec(memory_space=plgpu.GMEM), block],
        out_specs=(block, part),
    )(x, scale, d_out)
    return dx, d_scale.sum(0).astype(scale.dtype)


norm.defvjp(_forward, _backward)


def layer_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Layer norm."""
    return norm(x, scale, True)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMS norm."""
    return norm(x, scale, False)


def reference(x: jax.Array, scale: jax.Array, centred: bool) -> jax.Array:
    return _normalized(x, centred)[0] * scale


def _gradients(function: Any) -> Any:
    """Returns the gradients of a weighted sum of the results."""

    def loss(x, scale, weights):
        return jnp.sum(function(x, scale) * weights)

    return jax.grad(loss, argnums=(0, 1))


_X, _SCALE, _WEIGHTS = normal(0, 8, 512), normal(1, 512), normal(2, 8, 512)
_REFERENCES = {
    layer_norm: functools.partial(reference, centred=True),
    rms_norm: functools.partial(reference, centred=False),
}
CASES = [
    *(Case(f, reference, (_X, _SCALE)) for f, reference in _REFERENCES.items()),
    *(
        Case(_gradients(f), _gradients(reference), (_X, _SCALE, _WEIGHTS), 1e-4)
        for f, reference in _REFERENCES.items()
    ),
]

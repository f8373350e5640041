# SPDX-License-Identifier: Apache-2.0
"""Mamba's selective scan: each block carries the state of its channels in registers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu
from examples import Case, normal

CHANNELS = 64


def selective_scan(
    x: jax.Array, step: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array
) -> jax.Array:
    """Returns y[t] = h[t] @ c[t] of the state h[t] = exp(step a) h[t-1] + step x b.

    Args:
      x, step: (sequences, time, channels), the channels a multiple of 64.
      a: (channels, states).
      b, c: (sequences, time, states).
    """
    sequences, time, channels = x.shape

    def body(x_ref, step_ref, a_ref, b_ref, c_ref, y_ref):
        a = a_ref[...]

        @plgpu.loop(0, time, init_carry=jnp.zeros(a.shape, jnp.float32))
        def _(t, state):  # (channels, states)
            dt, b, c = step_ref[0, t], b_ref[0, t], c_ref[0, t]
            state = jnp.exp(dt[:, None] * a) * state
            state += (dt * x_ref[0, t])[:, None] * b[None, :]
            y_ref[0, t] = jnp.sum(state * c[None, :], axis=1)
            return state

    gmem = plgpu.GMEM  # a row at a time; the array is too long for SMEM
    own = plgpu.BlockSpec(
        (1, time, CHANNELS), lambda i, j: (i, 0, j), memory_space=gmem
    )
    shared = plgpu.BlockSpec(
        (1, time, a.shape[1]), lambda i, j: (i, 0, 0), memory_space=gmem
    )
    return plgpu.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(sequences, channels // CHANNELS),
        in_specs=[
            own,
            own,
            plgpu.BlockSpec((CHANNELS, a.shape[1]), lambda i, j: (j, 0)),
            shared,
            shared,
        ],
        out_specs=own,
    )(x, step, a, b, c)


def reference(x, step, a, b, c):
    def one(x, step, b, c):
        def at(state, now):
            x, dt, b, c = now
            state = jnp.exp(dt[:, None] * a) * state + jnp.outer(dt * x, b)
            return state, state @ c

        return jax.lax.scan(at, jnp.zeros(a.shape), (x, step, b, c))[1]

    with jax.default_matmul_precision("highest"):
        return jax.vmap(one)(x, step, b, c)


CASES = [
    Case(
        selective_scan,
        reference,
        (
            normal(0, 2, 12, 128),
            np.abs(normal(1, 2, 12, 128)),
            -np.abs(normal(2, 128, 16)),
            normal(3, 2, 12, 16),
            normal(4, 2, 12, 16),
        ),
        1e-4,
    )
]

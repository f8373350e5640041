# SPDX-License-Identifier: Apache-2.0
"""SwiGLU: silu(gate) * up, and its derivative, for halves of one matrix."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from examples import Case, normal

COLUMNS = 512


@jax.custom_vjp
def swiglu(x: jax.Array) -> jax.Array:
    """Returns silu(x[:, :n]) * x[:, n:]; x is (rows, 2 * n)."""
    rows, n = x.shape[0], x.shape[1] // 2

    def body(gate_ref, up_ref, o_ref):
        gate, up = gate_ref[...].astype(jnp.float32), up_ref[...].astype(jnp.float32)
        o_ref[...] = (jax.nn.silu(gate) * up).astype(o_ref.dtype)

    gate, up, out = _specs(n)
    return plgpu.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((rows, n), x.dtype),
        grid=(rows, plgpu.cdiv(n, COLUMNS)),
        in_specs=[gate, up],
        out_specs=out,
    )(x, x)


def _specs(n: int) -> list[plgpu.BlockSpec]:
    """Blocks of the two halves, and of a matrix of half the width."""

    def spec(first: int) -> plgpu.BlockSpec:
        return plgpu.BlockSpec(
            (1, COLUMNS), lambda i, j: (i, first + j), memory_space=plgpu.GMEM
        )

    return [spec(0), spec(n // COLUMNS), spec(0)]


def _backward(x: jax.Array, d_out: jax.Array) -> tuple[jax.Array]:
    rows, n = x.shape[0], x.shape[1] // 2

    def body(gate_ref, up_ref, d_out_ref, d_gate_ref, d_up_ref):
        gate, up, d_out = (
            ref[...].astype(jnp.float32) for ref in (gate_ref, up_ref, d_out_ref)
        )
        value, derivative = jax.jvp(jax.nn.silu, (gate,), (jnp.ones_like(gate),))
        d_gate_ref[...] = (d_out * up * derivative).astype(d_gate_ref.dtype)
        d_up_ref[...] = (d_out * value).astype(d_up_ref.dtype)

    gate, up, out = _specs(n)
    half = jax.ShapeDtypeStruct((rows, n), x.dtype)
    d_gate, d_up = plgpu.pallas_call(
        body,
        out_shape=(half, half),
        grid=(rows, n // COLUMNS),
        in_specs=[gate, up, out],
        out_specs=(out, out),
    )(x, x, d_out)
    return (jnp.concatenate([d_gate, d_up], axis=1),)


swiglu.defvjp(lambda x: (swiglu(x), x), _backward)


def reference(x: jax.Array) -> jax.Array:
    gate, up = jnp.split(x, 2, axis=1)
    return jax.nn.silu(gate) * up


_X, _WEIGHTS = normal(0, 4, 2048), normal(1, 4, 1024)
CASES = [
    Case(swiglu, reference, (_X,)),
    Case(
        jax.grad(lambda x, w: jnp.sum(swiglu(x) * w)),
        jax.grad(lambda x, w: jnp.sum(reference(x) * w)),
        (_X, _WEIGHTS),
    ),
]

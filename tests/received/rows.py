# SPDX-License-Identifier: Apache-2.0
"""Kernels over rows and columns: maps, norms, scans, reductions, transposes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from tests.received.case import Case, params
from tests.support import host


def add_kernel(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] + y_ref[...]


def add(x, y, *, block=256):
    spec = pl.BlockSpec((block,), lambda i: (i,))
    return pl.pallas_call(
        add_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(pl.cdiv(x.shape[0], block),),
        in_specs=[spec, spec],
        out_specs=spec,
        compiler_params=params(),
    )(x, y)


def layer_norm_kernel(x_ref, scale_ref, bias_ref, o_ref):
    x = x_ref[...]
    mean = jnp.mean(x, axis=1, keepdims=True)
    centred = x - mean
    variance = jnp.mean(centred * centred, axis=1, keepdims=True)
    normal = centred * lax.rsqrt(variance + 1e-5)
    o_ref[...] = normal * scale_ref[...] + bias_ref[...]


def layer_norm(x, scale, bias, *, block=32):
    rows, columns = x.shape
    spec = pl.BlockSpec((block, columns), lambda i: (i, 0))
    whole = pl.BlockSpec((columns,), lambda i: (0,))
    return pl.pallas_call(
        layer_norm_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(rows // block,),
        in_specs=[spec, whole, whole],
        out_specs=spec,
        compiler_params=params("parallel"),
    )(x, scale, bias)


def layer_norm_reference(x, scale, bias):
    deviation = np.sqrt(x.var(axis=1, keepdims=True) + 1e-5)
    return (x - x.mean(axis=1, keepdims=True)) / deviation * scale + bias


def softmax_kernel(x_ref, o_ref):
    o_ref[...] = jax.nn.softmax(x_ref[...], axis=-1)


def softmax(x, *, block=16):
    spec = pl.BlockSpec((block, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        softmax_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(pl.cdiv(x.shape[0], block),),
        in_specs=[spec],
        out_specs=spec,
        compiler_params=params(),
    )(x)


def softmax_reference(x):
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def recurrence_kernel(x_ref, decay_ref, o_ref, state_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        state_ref[...] = jnp.zeros_like(state_ref)

    def step(t, state):
        state = decay_ref[...] * state + x_ref[t]
        o_ref[t] = state
        return state

    state_ref[...] = lax.fori_loop(0, x_ref.shape[0], step, state_ref[...])


def recurrence(x, decay, *, time=16, width=128):
    """state[t] = decay * state[t - 1] + x[t], for each column."""
    steps, columns = x.shape
    return pl.pallas_call(
        recurrence_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(columns // width, steps // time),
        in_specs=[
            pl.BlockSpec((time, width), lambda c, t: (t, c)),
            pl.BlockSpec((width,), lambda c, t: (c,)),
        ],
        out_specs=pl.BlockSpec((time, width), lambda c, t: (t, c)),
        scratch_shapes=[pl.MemorySpace.DEFAULT((width,), jnp.float32)],
        compiler_params=params("parallel", "arbitrary", max_concurrent_steps=2),
    )(x, decay)


def recurrence_reference(x, decay):
    states, state = [], np.zeros(x.shape[1])
    for row in x:
        state = decay * state + row
        states.append(state)
    return np.stack(states)


def column_sums_kernel(x_ref, o_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += jnp.sum(x_ref[...], axis=0)


def column_sums(x, *, rows=16, columns=128):
    return pl.pallas_call(
        column_sums_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
        grid=(x.shape[1] // columns, x.shape[0] // rows),
        in_specs=[pl.BlockSpec((rows, columns), lambda c, r: (r, c))],
        out_specs=pl.BlockSpec((columns,), lambda c, r: (c,)),
        compiler_params=params("parallel", "arbitrary", max_concurrent_steps=2),
    )(x)


def ragged_transpose_kernel(lengths_ref, x_ref, o_ref):
    """Transposes blocks; what lies after a row's length becomes -1."""
    column = pl.program_id(1) * x_ref.shape[1] + lax.broadcasted_iota(
        jnp.int32, x_ref.shape, 1
    )
    inside = column < lengths_ref[...][:, None]
    o_ref[...] = jnp.where(inside, x_ref[...], -1.0).T


def ragged_transpose(lengths, x, *, block=64):
    rows, columns = x.shape
    return pl.pallas_call(
        ragged_transpose_kernel,
        out_shape=jax.ShapeDtypeStruct((columns, rows), x.dtype),
        grid=(pl.cdiv(rows, block), pl.cdiv(columns, block)),
        in_specs=[
            pl.BlockSpec((block,), lambda i, j: (i,)),
            pl.BlockSpec((block, block), lambda i, j: (i, j)),
        ],
        out_specs=pl.BlockSpec((block, block), lambda i, j: (j, i)),
        compiler_params=params("parallel", "parallel"),
    )(lengths, x)


def ragged_transpose_reference(lengths, x):
    return np.where(np.arange(x.shape[1]) < lengths[:, None], x, -1).T


def _normal(*shapes):
    return lambda rng: tuple(
        host.array(rng.standard_normal(s), jnp.float32) for s in shapes
    )


CASES = {
    "vector add": Case(add, _normal((1000,), (1000,)), np.add, 1e-6),
    "layer norm": Case(
        layer_norm, _normal((64, 256), (256,), (256,)), layer_norm_reference, 1e-5
    ),
    "softmax": Case(softmax, _normal((40, 128)), softmax_reference, 3e-6),
    "scan with a carried state": Case(
        recurrence,
        lambda rng: (*_normal((32, 256))(rng), jnp.linspace(0.5, 0.9, 256)),
        recurrence_reference,
        1e-5,
    ),
    "reduction over an axis": Case(
        column_sums, _normal((64, 256)), lambda x: x.sum(axis=0), 1e-5
    ),
    "transposed ragged blocks": Case(
        ragged_transpose,
        lambda rng: (
            host.array(rng.integers(0, 73, 100), jnp.int32),
            *_normal((100, 72))(rng),
        ),
        ragged_transpose_reference,
    ),
}

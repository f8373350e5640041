# SPDX-License-Identifier: Apache-2.0
"""Kernels with matrix products: a matmul with a k axis, and flash attention."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from tests.received.case import Case, params
from tests.support import host


def matmul_kernel(a_ref, b_ref, o_ref, sum_ref):
    k = pl.program_id(2)

    @pl.when(k == 0)
    def _():
        sum_ref[...] = jnp.zeros_like(sum_ref)

    sum_ref[...] += jnp.dot(a_ref[...], b_ref[...], preferred_element_type=jnp.float32)

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = sum_ref[...].astype(o_ref.dtype)


def matmul(a, b, *, bm=64, bn=64, bk=64):
    (m, k), (_, n) = a.shape, b.shape
    return pl.pallas_call(
        matmul_kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), a.dtype),
        grid=(m // bm, n // bn, k // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
            pl.BlockSpec((bk, bn), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        scratch_shapes=[pl.MemorySpace.DEFAULT((bm, bn), jnp.float32)],
        compiler_params=params(
            "parallel", "parallel", "arbitrary", max_concurrent_steps=2
        ),
    )(a, b)


def attention_kernel(q_ref, k_ref, v_ref, o_ref, max_ref, sum_ref, acc_ref, *, scale):
    i, j = pl.program_id(1), pl.program_id(2)
    rows, keys = q_ref.shape[0], k_ref.shape[0]

    @pl.when(j == 0)
    def _():
        max_ref[...] = jnp.full_like(max_ref, -1e30)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    @pl.when(j * keys <= i * rows + rows - 1)
    def _():
        scores = jnp.dot(q_ref[...], k_ref[...].T, preferred_element_type=jnp.float32)
        row = i * rows + lax.broadcasted_iota(jnp.int32, scores.shape, 0)
        column = j * keys + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        scores = jnp.where(column <= row, scores * scale, -1e30)
        old = max_ref[...]
        new = jnp.maximum(old, jnp.max(scores, axis=1))
        weights = jnp.exp(scores - new[:, None])
        shrink = jnp.exp(old - new)
        sum_ref[...] = sum_ref[...] * shrink + jnp.sum(weights, axis=1)
        acc_ref[...] = acc_ref[...] * shrink[:, None] + jnp.dot(
            weights.astype(v_ref.dtype), v_ref[...], preferred_element_type=jnp.float32
        )
        max_ref[...] = new

    @pl.when(j == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / sum_ref[...][:, None]).astype(o_ref.dtype)


def attention(q, k, v, *, block=64):
    heads, length, width = q.shape
    per_row = pl.MemorySpace.DEFAULT((block,), jnp.float32)
    sums = pl.MemorySpace.DEFAULT((block, width), jnp.float32)
    keys = pl.BlockSpec((None, block, width), lambda h, i, j: (h, j, 0))
    rows = pl.BlockSpec((None, block, width), lambda h, i, j: (h, i, 0))
    return pl.pallas_call(
        functools.partial(attention_kernel, scale=width**-0.5),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(heads, length // block, length // block),
        in_specs=[rows, keys, keys],
        out_specs=rows,
        scratch_shapes=[per_row, per_row, sums],
        compiler_params=params(
            "parallel", "parallel", "arbitrary", max_concurrent_steps=2
        ),
    )(q, k, v)


def attention_reference(q, k, v):
    scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
    scores = np.where(np.tri(q.shape[1], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ v


def _normal(*shapes):
    return lambda rng: tuple(
        host.array(rng.standard_normal(s), jnp.bfloat16) for s in shapes
    )


CASES = {
    "matmul with a k axis": Case(
        matmul, _normal((128, 128), (128, 64)), lambda a, b: a @ b, 0.02
    ),
    "flash attention": Case(
        attention, _normal(*[(2, 128, 64)] * 3), attention_reference, 0.03
    ),
}

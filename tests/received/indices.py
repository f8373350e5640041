# SPDX-License-Identifier: Apache-2.0
"""Kernels whose accesses depend on data: gather, histogram, scalar prefetch, aliases."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from tests.received.case import Case, params


def gather_kernel(index_ref, x_ref, o_ref):
    @pl.loop(0, o_ref.shape[0])
    def _(row):
        o_ref[row] = x_ref[index_ref[row]]


def gather(index, x, *, block=16):
    return pl.pallas_call(
        gather_kernel,
        out_shape=jax.ShapeDtypeStruct((index.shape[0], x.shape[1]), x.dtype),
        grid=(index.shape[0] // block,),
        in_specs=[
            pl.BlockSpec((block,), lambda i: (i,)),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=pl.BlockSpec((block, x.shape[1]), lambda i: (i, 0)),
        compiler_params=params(),
    )(index, x)


def histogram_kernel(x_ref, o_ref):
    @pl.when(pl.program_id(0) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    bins = lax.broadcasted_iota(jnp.int32, (x_ref.shape[0], o_ref.shape[0]), 1)
    hits = (x_ref[...][:, None] == bins).astype(jnp.int32)
    o_ref[...] += jnp.sum(hits, axis=0)


def histogram(x, *, bins=64, block=128):
    return pl.pallas_call(
        histogram_kernel,
        out_shape=jax.ShapeDtypeStruct((bins,), jnp.int32),
        grid=(x.shape[0] // block,),
        in_specs=[pl.BlockSpec((block,), lambda i: (i,))],
        out_specs=pl.BlockSpec((bins,), lambda i: (0,)),
        compiler_params=params("arbitrary", max_concurrent_steps=2),
    )(x)


CASES = {
    "gather by a dynamic index": Case(
        gather,
        lambda rng: (
            jnp.asarray(rng.integers(0, 50, 32), jnp.int32),
            jnp.asarray(rng.standard_normal((50, 128)), jnp.float32),
        ),
        lambda index, x: x[index.astype(int)],
    ),
    "histogram": Case(
        histogram,
        lambda rng: (jnp.asarray(rng.integers(0, 64, 512), jnp.int32),),
        lambda x: np.bincount(x.astype(int), minlength=64),
    ),
}

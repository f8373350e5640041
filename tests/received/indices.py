# SPDX-License-Identifier: Apache-2.0
"""Kernels whose accesses depend on data: gather, histogram, prefetch, aliases."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tests.received.case import Case, params
from tests.support import host


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


def take_blocks_kernel(table_ref, x_ref, o_ref):
    # Also the body reads the prefetched table.
    o_ref[...] = x_ref[...] + table_ref[pl.program_id(0)].astype(x_ref.dtype)


def take_blocks(table, x, *, block=16):
    """Copies the blocks of rows that a table names, by an index map that reads it."""
    columns = x.shape[1]
    return pl.pallas_call(
        take_blocks_kernel,
        out_shape=jax.ShapeDtypeStruct((table.shape[0] * block, columns), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(table.shape[0],),
            in_specs=[pl.BlockSpec((block, columns), lambda i, table: (table[i], 0))],
            out_specs=pl.BlockSpec((block, columns), lambda i, table: (i, 0)),
        ),
        compiler_params=params("arbitrary", max_concurrent_steps=2),
    )(table, x)


def take_blocks_reference(table, x):
    blocks = x.reshape(-1, 16, x.shape[1])[table.astype(int)]
    return (blocks + table[:, None, None]).reshape(-1, x.shape[1])


def accumulate_kernel(total_ref, x_ref, o_ref):
    o_ref[...] = total_ref[...] + x_ref[...]


def accumulate(total, x, *, block=16):
    """Adds to an array in place: the result has the memory of the first argument."""
    spec = pl.BlockSpec((block, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        accumulate_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // block,),
        in_specs=[spec, spec],
        out_specs=spec,
        input_output_aliases={0: 0},
        compiler_params=params(),
    )(total, x)


CASES = {
    "input_output_aliases": Case(
        accumulate,
        lambda rng: tuple(
            host.array(rng.standard_normal((64, 128)), jnp.float32) for _ in "ab"
        ),
        np.add,
        1e-6,
    ),
    "scalar prefetch": Case(
        take_blocks,
        lambda rng: (
            jnp.asarray([3, 0, 3, 1], jnp.int32),
            host.array(rng.standard_normal((64, 128)), jnp.float32),
        ),
        take_blocks_reference,
        1e-6,
    ),
    "gather by a dynamic index": Case(
        gather,
        lambda rng: (
            host.array(rng.integers(0, 50, 32), jnp.int32),
            host.array(rng.standard_normal((50, 128)), jnp.float32),
        ),
        lambda index, x: x[index.astype(int)],
    ),
    "histogram": Case(
        histogram,
        lambda rng: (host.array(rng.integers(0, 64, 512), jnp.int32),),
        lambda x: np.bincount(x.astype(int), minlength=64),
    ),
}

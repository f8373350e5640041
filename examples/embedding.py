# SPDX-License-Identifier: Apache-2.0
"""An embedding: rows of a table by index, and its derivative, which adds to rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from examples import Case, integers, normal

ROWS = 8


@functools.partial(jax.custom_vjp)
def embedding(table: jax.Array, index: jax.Array) -> jax.Array:
    """Returns table[index].

    Args:
      table: (entries, dimension).
      index: (n,), int32, in bounds; n is a multiple of 8.
    """
    d = table.shape[1]

    def body(table_ref, index_ref, o_ref):
        o_ref[...] = table_ref[index_ref[...]]

    return plgpu.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((index.size, d), table.dtype),
        grid=(index.size // ROWS,),
        in_specs=[plgpu.BlockSpec(memory_space=plgpu.GMEM), _block(ROWS)],
        out_specs=_block(ROWS, d),
    )(table, index)


def _block(*shape: int) -> plgpu.BlockSpec:
    return plgpu.BlockSpec(
        shape, lambda i: (i, 0)[: len(shape)], memory_space=plgpu.GMEM
    )


def _backward(saved, d_out: jax.Array):
    index, zeros = saved

    def body(d_out_ref, index_ref, _, d_table_ref):
        plgpu.atomic_add(d_table_ref.at[index_ref[...]], d_out_ref[...])

    whole = plgpu.BlockSpec(memory_space=plgpu.GMEM)
    d_table = plgpu.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(zeros.shape, zeros.dtype),
        grid=(index.size // ROWS,),
        in_specs=[_block(ROWS, d_out.shape[1]), _block(ROWS), whole],
        out_specs=whole,
        input_output_aliases={2: 0},
    )(d_out, index, zeros)
    return d_table, None


embedding.defvjp(
    lambda table, index: (embedding(table, index), (index, jnp.zeros_like(table))),
    _backward,
)

_TABLE, _WEIGHTS = normal(0, 50, 256), normal(1, 32, 256)
_INDEX = integers(2, 0, 50, 32)
CASES = [
    Case(embedding, lambda table, index: table[index], (_TABLE, _INDEX), 0.0),
    Case(
        jax.grad(lambda table, index: jnp.sum(embedding(table, index) * _WEIGHTS)),
        jax.grad(lambda table, index: jnp.sum(table[index] * _WEIGHTS)),
        (_TABLE, _INDEX),
    ),
]

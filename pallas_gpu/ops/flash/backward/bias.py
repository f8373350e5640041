# SPDX-License-Identifier: Apache-2.0
"""Attention's derivative of the bias: a block has a tile of it, and adds in an order.

The derivative is dS, see `hopper`, of unscaled and uncapped scores, summed over the
dimensions in which the bias is 1. A block visits the batches and the heads that share
its tile, and where the bias has one row for all of Q, also the tiles of Q:

    S = Q @ K.T    dP = dO @ V.T    dBias += P * (dP - D)
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.ops import integers, roles
from pallas_gpu.ops.flash.backward.config import CONSUMERS, REGISTERS, ROWS
from pallas_gpu.ops.flash.backward.problem import (
    BackwardProblem,
    Inputs,
    Place,
    divide,
    launch,
)
from pallas_gpu.ops.flash.backward.queries import BLOCK_KV, BLOCK_Q, Rows
from pallas_gpu.ops.flash.masks import Lengths, Mask
from pallas_gpu.ops.tiles import tiles

# TMA addresses rows of multiples of 16 bytes.
_ROW_BYTES = 16


def padded(p: BackwardProblem, bias: jax.Array) -> jax.Array:
    """Returns the bias as the kernels read it: more columns, which nothing sees."""
    # A single row is read without TMA, in whole blocks of any kernel.
    multiple = _ROW_BYTES // bias.dtype.itemsize if p.has_matrix else CONSUMERS * ROWS
    missing = -bias.shape[3] % multiple
    return jnp.pad(bias, [(0, 0)] * 3 + [(0, missing)]) if missing else bias


def derivative(
    p: BackwardProblem, inputs: list[Any], compiler_params: Any, interpret: Any
) -> jax.Array:
    """Returns that of the bias, in its shape and type.

    Args:
      inputs: those of the problem's names; the bias is `padded`.
    """
    assert p.bias is not None
    found = make_kernel(p, compiler_params, interpret)(*inputs)
    if not p.has_matrix:
        found = jnp.sum(found, axis=2, keepdims=True).astype(p.bias_dtype)
    return found[..., : p.kv_len]


@functools.lru_cache(maxsize=64)
def make_kernel(p: BackwardProblem, compiler_params: Any, interpret: Any) -> Any:
    """Returns the function of the problem's inputs.

    It returns the derivative of a matrix, with the columns that were added; of a single
    row the two sums of even and odd halves of tiles of Q, in float32.
    """
    assert p.bias is not None
    # Wide rows leave room for one step.
    stages = 1 if p.wide else 2
    full = plgpu.Barrier(num_arrivals=4, num_barriers=stages)
    scratch = {
        "q_smem": tiles((stages, BLOCK_Q, p.head_dim), p.dtype),
        "do_smem": tiles((stages, BLOCK_Q, p.v_head_dim), p.dtype),
        "k_smem": tiles((stages, BLOCK_KV, p.head_dim), p.dtype),
        "v_smem": tiles((stages, BLOCK_KV, p.v_head_dim), p.dtype),
        "full": full,
        "empty": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
    }
    batch, heads, q_len, _ = p.bias
    kv_tiles = plgpu.cdiv(p.kv_len, BLOCK_KV)
    if p.has_matrix:
        columns = plgpu.align_to(p.kv_len, _ROW_BYTES // p.bias_dtype.itemsize)
        out = jax.ShapeDtypeStruct((batch, heads, q_len, columns), p.bias_dtype)
        scratch["bias_smem"] = tiles((BLOCK_Q, BLOCK_KV), p.bias_dtype)
        scratch["bias_full"] = plgpu.Barrier()
    else:
        shape = batch, heads, CONSUMERS, kv_tiles * BLOCK_KV
        out = jax.ShapeDtypeStruct(shape, jnp.float32)
    return launch(
        functools.partial(_body, p, stages),
        out,
        scratch,
        blocks=batch * heads * plgpu.cdiv(q_len, BLOCK_Q) * kv_tiles,
        name="attention_backward_bias",
        compiler_params=compiler_params,
        interpret=interpret,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Memory(Inputs):
    """The references of a block."""

    dbias: Any
    q_smem: Any
    do_smem: Any
    k_smem: Any
    v_smem: Any
    full: Any
    empty: Any
    bias_smem: Any = None
    bias_full: Any = None


@dataclasses.dataclass(frozen=True)
class _Tile:
    """A tile of the bias, and the places in the scores that it is added to.

    Attributes:
      batch, head: of the bias.
      q_start, kv_start: its first row and column; the row is 0 if there is one.
    """

    p: BackwardProblem
    mem: _Memory
    batch: Any
    head: Any
    q_start: Any
    kv_start: Any

    @property
    def sharing(self) -> tuple[int, int]:
        """How many batches, and how many heads, have the same bias."""
        assert self.p.bias is not None
        return self.p.batch // self.p.bias[0], self.p.heads // self.p.bias[1]

    @property
    def q_tiles(self) -> tuple[Any, Any]:
        """The first tile of Q that it is added to, and the number of them."""
        p = self.p
        if p.mask.ragged or p.mask.segments:
            # Each batch has its own.
            first, end = 0, plgpu.cdiv(p.q_len, BLOCK_Q)
        else:
            lengths = Lengths(p.kv_len, p.q_len)
            of_tile = lengths, self.kv_start, BLOCK_KV, BLOCK_Q
            blocks = p.mask.transposed.blocks(*of_tile)
            first, end = blocks.first, blocks.end
        if p.has_matrix:
            own = integers.divide(self.q_start, BLOCK_Q)
            first = integers.maximum(first, own)
            end = integers.minimum(end, integers.plus(own, 1))
        return first, integers.maximum(integers.minus(end, first), 0)

    @property
    def count(self) -> Any:
        """How many places there are."""
        batches, heads = self.sharing
        return integers.times(self.q_tiles[1], batches * heads)

    def place(self, step: Any) -> Place:
        """Returns one of them: rows of a head of Q."""
        p, (batches, heads) = self.p, self.sharing
        past, head = divide(step, heads)
        past, batch = divide(past, batches)
        head, batch = (
            mine if n == 1 else of_step
            for n, mine, of_step in (
                (heads, self.head, head),
                (batches, self.batch, batch),
            )
        )
        tile = integers.plus(self.q_tiles[0], past)
        return p.place(self.mem, batch, head, tile, BLOCK_Q)


def _body(p: BackwardProblem, stages: int, *refs: Any, **scratch: Any) -> None:
    assert p.bias is not None
    wg = lax.axis_index("wg")
    *inputs, dbias = refs
    mem = _Memory(**dict(zip(p.inputs, inputs, strict=True)), dbias=dbias, **scratch)
    _, heads, q_len, _ = p.bias
    # Neighbours have the same K and V.
    past, q_tile = divide(lax.axis_index("block"), plgpu.cdiv(q_len, BLOCK_Q))
    pair, kv_tile = divide(past, plgpu.cdiv(p.kv_len, BLOCK_KV))
    starts = integers.times(q_tile, BLOCK_Q), integers.times(kv_tile, BLOCK_KV)
    tile = _Tile(p, mem, *divide(pair, heads), *starts)
    produce = functools.partial(_produce, tile, stages)
    consume = functools.partial(_consume, tile, stages, wg)
    roles.split(wg, CONSUMERS, REGISTERS, produce, consume)


def _produce(tile: _Tile, stages: int) -> None:
    """Copies the tile, then rows of Q, dO, K and V of each place."""
    p, mem = tile.p, tile.mem
    columns = plgpu.ds(tile.kv_start, BLOCK_KV)
    if p.has_matrix:
        rows = plgpu.ds(tile.q_start, BLOCK_Q)
        part = mem.bias.at[tile.batch, tile.head, rows, columns]
        plgpu.copy_gmem_to_smem(part, mem.bias_smem, mem.bias_full)

    @plgpu.loop(0, tile.count)
    def _(step):
        place, slot = tile.place(step), lax.rem(step, np.int32(stages))

        @plgpu.when(lax.ge(step, np.int32(stages)))
        def _():
            plgpu.barrier_wait(mem.empty.at[slot])

        kv_head = lax.div(place.head, np.int32(p.group))
        rows = plgpu.ds(place.start, BLOCK_Q)
        for source, ring, part in (
            (mem.q, mem.q_smem, (place.batch, rows, place.head)),
            (mem.k, mem.k_smem, (place.batch, columns, kv_head)),
            (mem.do, mem.do_smem, (place.batch, rows, place.head)),
            (mem.v, mem.v_smem, (place.batch, columns, kv_head)),
        ):
            plgpu.copy_gmem_to_smem(source.at[part], ring.at[slot], mem.full.at[slot])


def _consume(tile: _Tile, stages: int, wg: Any) -> None:
    """Computes and stores its rows of the tile's derivative."""
    p, mem = tile.p, tile.mem
    if p.has_matrix:
        plgpu.barrier_wait(mem.bias_full)

    def step(number, so_far):
        slot = lax.rem(number, np.int32(stages))
        rows = Rows(p, mem, wg, tile.place(number))
        lse, delta = rows.of_rows(mem.lse), rows.of_rows(mem.delta)
        plgpu.barrier_wait(mem.full.at[slot])

        def products(scores, dp):
            own = rows.own
            plgpu.wgmma(scores, mem.q_smem.at[slot, own], mem.k_smem.at[slot].T)
            of_tile = tile.kv_start, p.mask != Mask(), lse, mem.bias_smem
            if p.wide:
                # With both products under way ptxas makes them wait for each other.
                probabilities, _ = rows.probabilities(scores[...], *of_tile)
            plgpu.wgmma(dp, mem.do_smem.at[slot, own], mem.v_smem.at[slot].T)
            if not p.wide:
                shown = plgpu.wgmma_accumulator_load(scores, wait_n=1)
                probabilities, _ = rows.probabilities(shown, *of_tile)
            return probabilities * (dp[...] - delta)

        accumulator = plgpu.ACC((ROWS, BLOCK_KV))
        found = plgpu.run_scoped(products, accumulator, accumulator)
        plgpu.barrier_arrive(mem.empty.at[slot])
        return so_far + found

    zeros = plgpu.layout_cast(
        jnp.zeros((ROWS, BLOCK_KV), jnp.float32), plgpu.Layout.WGMMA
    )
    found = plgpu.loop(0, tile.count, init_carry=zeros)(step)
    row = integers.times(wg, ROWS)
    columns = plgpu.ds(tile.kv_start, BLOCK_KV)
    if not p.has_matrix:
        mem.dbias[tile.batch, tile.head, wg, columns] = jnp.sum(found, axis=0)
        return
    # Other consumers do not read its rows of the buffer.
    buffer = mem.bias_smem.at[plgpu.ds(row, ROWS)]
    buffer[...] = found.astype(p.bias_dtype)
    plgpu.commit_smem()
    row = integers.plus(tile.q_start, row)
    some = row < p.q_len if p.q_len % BLOCK_Q else None
    target = mem.dbias.at[tile.batch, tile.head, plgpu.ds(row, ROWS), columns]
    plgpu.copy_smem_to_gmem(buffer, target, some)
    plgpu.wait_smem_to_gmem(0)

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
from pallas_gpu.ops.flash.backward.config import CONSUMERS, REGISTERS, ROWS
from pallas_gpu.ops.flash.backward.problem import BackwardProblem, Tile
from pallas_gpu.ops.flash.backward.queries import BLOCK_KV, BLOCK_Q, Rows
from pallas_gpu.ops.flash.masks import Lengths, Mask
from pallas_gpu.ops.flash.problem import launch
from pallas_gpu.ops.folded import divide, maximum, minimum, minus, plus, split, times
from pallas_gpu.ops.memory import Memory
from pallas_gpu.ops.rules import aligned, cached
from pallas_gpu.ops.tiles import tiles

# TMA addresses rows of multiples of 16 bytes.
_ROW_BYTES = 16


def padded(p: BackwardProblem, bias: jax.Array) -> jax.Array:
    """Returns the bias as the kernels read it: more columns, which nothing sees."""
    # A single row is read without TMA, in whole blocks of any kernel.
    return aligned(bias, 1 if p.has_matrix else CONSUMERS * ROWS)


def derivative(p: BackwardProblem, arrays: dict[str, Any]) -> jax.Array:
    """Returns that of the bias, in its shape and type.

    Args:
      arrays: those of the problem's names; the bias is `padded`.
    """
    found = make_kernel(p)(arrays)["dbias"]
    if not p.has_matrix:
        found = jnp.sum(found, axis=2, keepdims=True).astype(p.bias_dtype)
    return found[..., : p.kv_len]


@cached
def make_kernel(p: BackwardProblem) -> Any:
    """Returns the function of the problem's inputs.

    It returns the derivative of a matrix, with the columns that were added; of a single
    row the two sums of even and odd halves of tiles of Q, in float32.
    """
    assert p.bias is not None
    # Wide rows leave room for one step.
    stages = 1 if p.wide else 2
    buffers = (
        tiles((stages, BLOCK_Q, p.head_dim), p.dtype),
        tiles((stages, BLOCK_KV, p.head_dim), p.dtype),
        tiles((stages, BLOCK_Q, p.v_dim), p.dtype),
        tiles((stages, BLOCK_KV, p.v_dim), p.dtype),
    )
    scratch: dict[str, Any] = {"ring": plgpu.Ring.of(buffers, consumers=CONSUMERS)}
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
    body, name = functools.partial(_body, p), "attention_backward_bias"
    return launch(
        *(p, name, body, p.inputs, {"dbias": out}, scratch),
        grid={"block": batch * heads * plgpu.cdiv(q_len, BLOCK_Q) * kv_tiles},
        warpgroups=CONSUMERS + 1,
    )


@dataclasses.dataclass(frozen=True)
class _Tile:
    """A tile of the bias, and the places in the scores that it is added to.

    Attributes:
      batch, head: of the bias.
      q_start, kv_start: its first row and column; the row is 0 if there is one.
    """

    p: BackwardProblem
    mem: Memory
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
            own = divide(self.q_start, BLOCK_Q)
            first = maximum(first, own)
            end = minimum(end, plus(own, 1))
        return first, maximum(minus(end, first), 0)

    @property
    def count(self) -> Any:
        batches, heads = self.sharing
        return times(self.q_tiles[1], batches * heads)

    def place(self, step: Any) -> Tile:
        """Returns one of them: rows of a head of Q."""
        p, (batches, heads) = self.p, self.sharing
        past, head = split(step, heads)
        past, batch = split(past, batches)
        head, batch = (
            mine if n == 1 else of_step
            for n, mine, of_step in (
                (heads, self.head, head),
                (batches, self.batch, batch),
            )
        )
        tile = plus(self.q_tiles[0], past)
        return p.tile_of(self.mem, batch, head, tile, BLOCK_Q)


def _body(p: BackwardProblem, mem: Memory) -> None:
    assert p.bias is not None
    wg = lax.axis_index("wg")
    _, heads, q_len, _ = p.bias
    # Neighbours have the same K and V.
    past, q_tile = split(lax.axis_index("block"), plgpu.cdiv(q_len, BLOCK_Q))
    pair, kv_tile = split(past, plgpu.cdiv(p.kv_len, BLOCK_KV))
    starts = times(q_tile, BLOCK_Q), times(kv_tile, BLOCK_KV)
    tile = _Tile(p, mem, *split(pair, heads), *starts)
    produce = functools.partial(_produce, tile)
    consume = functools.partial(_consume, tile, wg)
    plgpu.Roles(CONSUMERS, REGISTERS).run(wg, produce, consume)


def _produce(tile: _Tile) -> None:
    """Copies the tile, then rows of Q, dO, K and V of each place."""
    p, mem = tile.p, tile.mem
    columns = plgpu.ds(tile.kv_start, BLOCK_KV)
    if p.has_matrix:
        rows = plgpu.ds(tile.q_start, BLOCK_Q)
        part = mem.bias.at[tile.batch, tile.head, rows, columns]
        plgpu.copy_gmem_to_smem(part, mem.bias_smem, mem.bias_full)

    @plgpu.loop(0, tile.count)
    def _(step):
        place, slot = tile.place(step), mem.ring.fill(step)
        kv_head = lax.div(place.head, np.int32(p.group))
        of_q = place.batch, plgpu.ds(place.start, BLOCK_Q), place.head
        of_kv = place.batch, columns, kv_head
        parts = mem.q.at[of_q], mem.k.at[of_kv], mem.do.at[of_q], mem.v.at[of_kv]
        for part, buffer in zip(parts, slot.buffers, strict=True):
            plgpu.copy_gmem_to_smem(part, buffer, slot.full)


def _consume(tile: _Tile, wg: Any) -> None:
    p, mem = tile.p, tile.mem
    if p.has_matrix:
        plgpu.barrier_wait(mem.bias_full)

    def step(number, so_far):
        rows = Rows(p, mem, wg, tile.place(number))
        lse, delta = rows.of_rows(mem.lse), rows.of_rows(mem.delta)
        q, k, do, v = mem.ring.take(number).buffers

        def products(scores, dp):
            own = rows.own
            plgpu.wgmma(scores, q.at[own], k.T)
            of_tile = tile.kv_start, p.mask != Mask(), lse, mem.get("bias_smem")
            if p.wide:
                # With both products under way ptxas makes them wait for each other.
                probabilities, _ = rows.of_tile(scores[...], *of_tile)
            plgpu.wgmma(dp, do.at[own], v.T)
            if not p.wide:
                shown = plgpu.wgmma_accumulator_load(scores, wait_n=1)
                probabilities, _ = rows.of_tile(shown, *of_tile)
            return probabilities * (dp[...] - delta)

        accumulator = plgpu.ACC((ROWS, BLOCK_KV))
        found = plgpu.run_scoped(products, accumulator, accumulator)
        mem.ring.release(number)
        return so_far + found

    zeros = plgpu.layout_cast(
        jnp.zeros((ROWS, BLOCK_KV), jnp.float32), plgpu.Layout.WGMMA
    )
    found = plgpu.loop(0, tile.count, init_carry=zeros)(step)
    row = times(wg, ROWS)
    columns = plgpu.ds(tile.kv_start, BLOCK_KV)
    if not p.has_matrix:
        mem.dbias[tile.batch, tile.head, wg, columns] = jnp.sum(found, axis=0)
        return
    # Other consumers do not read its rows of the buffer.
    buffer = mem.bias_smem.at[plgpu.ds(row, ROWS)]
    buffer[...] = found.astype(p.bias_dtype)
    plgpu.commit_smem()
    row = plus(tile.q_start, row)
    some = row < p.q_len if p.q_len % BLOCK_Q else None
    target = mem.dbias.at[tile.batch, tile.head, plgpu.ds(row, ROWS), columns]
    plgpu.copy_smem_to_gmem(buffer, target, some)
    plgpu.wait_smem_to_gmem(0)

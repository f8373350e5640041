# SPDX-License-Identifier: Apache-2.0
"""Attention's derivative of Q alone: a block has rows of Q, and the sums have an order.

It is the second kernel of a deterministic backward pass; `hopper` computes the
other derivatives. A block has one producer, which copies blocks of K and V into two
rings, and two consumers with 64 rows of Q each:

    S = Q @ K.T    dP = dO @ V.T    dS = P * (dP - D)    dQ += dS @ K
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.ops.flash.backward.config import CONSUMERS, REGISTERS, ROWS
from pallas_gpu.ops.flash.backward.consumers import LAYOUT, Scored
from pallas_gpu.ops.flash.backward.problem import BackwardProblem, Tile
from pallas_gpu.ops.flash.masks import Blocks
from pallas_gpu.ops.flash.problem import launch, store_rows
from pallas_gpu.ops.folded import minimum, minus, plus, split, times
from pallas_gpu.ops.memory import Memory
from pallas_gpu.ops.rules import cached
from pallas_gpu.ops.tiles import tiles

BLOCK_Q, BLOCK_KV = CONSUMERS * ROWS, 64


@cached
def make_kernel(p: BackwardProblem) -> Any:
    # Wide rows of Q and dO leave room for one block of K and V.
    stages = 1 if p.wide else 2
    ring = functools.partial(plgpu.Ring.of, consumers=CONSUMERS)
    scratch: dict[str, Any] = {
        "q_smem": tiles((BLOCK_Q, p.head_dim), p.dtype),
        "do_smem": tiles((BLOCK_Q, p.v_dim), p.dtype),
        "q_full": plgpu.Barrier(num_arrivals=2),
        "k_ring": ring(tiles((stages, BLOCK_KV, p.head_dim), p.dtype)),
        "v_ring": ring(tiles((stages, BLOCK_KV, p.v_dim), p.dtype)),
    }
    if p.has_matrix:
        # The other rings have as many buffers.
        buffers = tiles((stages, BLOCK_Q, BLOCK_KV), p.bias_dtype)
        scratch["bias_ring"] = ring(buffers)
    shape = p.outer, p.q_len, p.heads, p.head_dim
    results = {"dq": jax.ShapeDtypeStruct(shape, p.dtype)}
    body, name = functools.partial(_body, p), "attention_backward_queries"
    return launch(
        *(p, name, body, p.inputs, results, scratch),
        grid={"block": p.outer * p.heads * p.tiles_of(p.q_len, BLOCK_Q)},
        warpgroups=CONSUMERS + 1,
    )


def _body(p: BackwardProblem, mem: Memory) -> None:
    wg = lax.axis_index("wg")
    q_tiles = p.tiles_of(p.q_len, BLOCK_Q)
    pair, tile = split(lax.axis_index("block"), q_tiles)
    # Under a causal mask the last rows have the most work.
    tile = minus(q_tiles - 1, tile)
    place = p.tile_of(mem, *split(pair, p.heads), tile, BLOCK_Q)
    blocks = p.mask.blocks(place.lengths, place.start, BLOCK_Q, BLOCK_KV)
    if p.mask.segments:
        blocks = blocks.within(Blocks.loaded(mem.of_segments.at[place.batch, tile]))

    def produce() -> None:
        _produce(p, mem, place, blocks)

    def consume() -> None:
        _Consumer(p, mem, wg, place).run(blocks)

    plgpu.Roles(CONSUMERS, REGISTERS).run(wg, produce, consume)


def _produce(p: BackwardProblem, mem: Memory, place: Tile, blocks: Any) -> None:
    kv_head = lax.div(place.head, np.int32(p.group))
    mode = plgpu.OOBFillMode.ZEROS if p.packed else None
    load = functools.partial(plgpu.copy_gmem_to_smem, oob_mode=mode)
    first = plus(place.q_first, place.start)
    part = place.batch, plgpu.ds(first, BLOCK_Q), place.head
    load(mem.q.at[part], mem.q_smem, mem.q_full)
    load(mem.do.at[part], mem.do_smem, mem.q_full)

    @plgpu.loop(blocks.first, blocks.end)
    def _(block):
        position = minus(block, blocks.first)
        first = plus(place.kv_first, times(block, BLOCK_KV))
        columns = plgpu.ds(first, BLOCK_KV)
        part = place.batch, columns, kv_head
        copies = [(mem.k.at[part], mem.k_ring), (mem.v.at[part], mem.v_ring)]
        if p.has_matrix:
            rows = plgpu.ds(place.start, BLOCK_Q)
            of_bias = p.bias_part(mem, place, place.head, rows, columns)
            copies.insert(0, (of_bias, mem.bias_ring))
        for source, ring in copies:
            slot = ring.fill(position)
            load(source, slot.buffers, slot.full)


class Rows(Scored):
    def of_rows(self, ref) -> Any:
        """Returns a number of each row, for each element of a tile."""
        p = self.p
        first = plus(self.place.q_first, self.row)
        if p.packed:
            # Tiles without rows may lie behind the end.
            first = minimum(first, p.padded_q_len - ROWS)
        part = ref.at[self.place.batch, self.place.head, plgpu.ds(first, ROWS)]
        return lax.broadcast_in_dim(self.loaded(part, 1), (ROWS, BLOCK_KV), (0,))

    def of_tile(self, scores, column, masked, lse, bias=None) -> tuple[Any, Any]:
        """Returns the probabilities of a tile, and tanh of its scores; see `Scored`.

        Args:
          bias: a block of it in SMEM, if it is a matrix.
        """
        of_bias = functools.partial(self.bias, column, bias)
        head = self.place.head
        return self.probabilities(scores, head, column, masked, lambda: lse, of_bias)

    def bias(self, column, block) -> Any:
        if block is not None:
            return plgpu.load(block.at[self.own], layout=LAYOUT)
        if self.p.bias is None:
            return None
        place, columns = self.place, plgpu.ds(column, BLOCK_KV)
        part = self.p.bias_part(self.mem, place, place.head, 0, columns)
        return self.loaded(part, 0)


class _Consumer(Rows):
    def run(self, blocks: Any) -> None:
        p, mem = self.p, self.mem
        lse, delta = self.of_rows(mem.lse), self.of_rows(mem.delta)

        def over_blocks(dq):
            plgpu.barrier_wait(mem.q_full)

            def step(block, masked):
                position = minus(block, blocks.first)
                self.step(dq, position, block, masked, lse, delta)

            for first, end, masked in blocks.parts():
                plgpu.loop(first, end)(functools.partial(step, masked=masked))
            return dq[...]

        dq = plgpu.run_scoped(over_blocks, plgpu.ACC((ROWS, p.head_dim)))
        place, buffer = self.place, mem.q_smem.at[self.own]
        result = (dq * p.scores.sm_scale).astype(p.dtype)
        first = plus(place.q_first, self.row)
        target = mem.dq.at[place.batch, plgpu.ds(first, ROWS), place.head]
        left = place.lengths.rows - self.row if p.packed else None
        some = self.row < p.q_len if p.q_len % BLOCK_Q else None
        store_rows(result, buffer, target, left, some)
        plgpu.wait_smem_to_gmem(0)

    def step(self, dq, position, block, masked, lse, delta) -> None:
        p, mem = self.p, self.mem

        def derivatives(scores, dp):
            k = mem.k_ring.take(position).buffers
            plgpu.wgmma(scores, mem.q_smem.at[self.own], k.T)
            if p.wide and p.has_matrix:
                # Registers do not hold both products and a block of the bias.
                factors = self.factors(scores[...], position, block, masked, lse)
                self.start_dp(dp, position)
            else:
                self.start_dp(dp, position)
                shown = plgpu.wgmma_accumulator_load(scores, wait_n=1)
                factors = self.factors(shown, position, block, masked, lse)
            ds = factors * (dp[...] - delta)
            return ds.astype(p.dtype)

        tile = plgpu.ACC((ROWS, BLOCK_KV))
        ds = plgpu.run_scoped(derivatives, tile, tile)
        mem.v_ring.release(position)
        plgpu.wgmma(dq, ds, mem.k_ring.slot(position).buffers)
        plgpu.wgmma_wait(0)
        mem.k_ring.release(position)

    def start_dp(self, dp, position) -> None:
        v = self.mem.v_ring.take(position).buffers
        plgpu.wgmma(dp, self.mem.do_smem.at[self.own], v.T)

    def factors(self, scores, position, block, masked, lse) -> Any:
        """Returns the probabilities of a tile, times the derivative of a soft cap."""
        p, mem = self.p, self.mem
        of_bias = mem.bias_ring.take(position).buffers if p.has_matrix else None
        column = times(block, BLOCK_KV)
        probabilities, capped = self.of_tile(scores, column, masked, lse, of_bias)
        if p.has_matrix:
            mem.bias_ring.release(position)
        if capped is not None:
            probabilities = probabilities * (1 - capped * capped)
        return probabilities

# SPDX-License-Identifier: Apache-2.0
"""Attention for Hopper: a consumer, which computes its rows of a tile's result."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.ops.flash import narrow
from pallas_gpu.ops.flash.config import AttentionConfig
from pallas_gpu.ops.flash.masks import Blocks
from pallas_gpu.ops.flash.problem import Problem, Tile, store_rows
from pallas_gpu.ops.flash.softmax import Softmax
from pallas_gpu.ops.folded import maximum, minimum, minus, plus, times, where
from pallas_gpu.ops.memory import Memory

# By how many powers of two probabilities may exceed 1; float16 has room for more.
_SLACK = 8.0
# The largest head_dim of V whose sums stay in parts: measured on an H200.
_NARROW = 64
_ROW, _COLUMN = plgpu.Layout.WGMMA_ROW, plgpu.Layout.WGMMA_COL


@dataclasses.dataclass(frozen=True)
class _Own:
    """A tile as one consumer sees it.

    Attributes:
      q_row: its own first row, counted in the sequence.
      ids: segment ids of its rows, or None.
      slope: of ALiBi, or None.
      scales: factors of the scores and of the result, or None.
    """

    tile: Tile
    q_row: Any
    ids: Any
    slope: Any
    scales: Any


@dataclasses.dataclass(frozen=True)
class Consumer:
    p: Problem[AttentionConfig]
    mem: Memory
    wg: Any

    @property
    def own_rows(self) -> Any:
        rows = self.p.config.rows
        return plgpu.ds(times(self.wg, rows), rows)

    def take_q(self, position: Any) -> Any:
        return self.mem.q_ring.take(position).buffers.at[self.own_rows]

    def open_turns(self) -> None:
        """Gives the first turn to the first consumer."""
        if self.p.config.ping_pong:

            @plgpu.when(self.wg == self.p.config.consumers - 1)
            def _():
                plgpu.barrier_arrive(self.mem.turn.at[0])

    def take_turn(self) -> None:
        if self.p.config.ping_pong:
            plgpu.barrier_wait(self.mem.turn.at[self.wg])

    def pass_turn(self) -> None:
        if self.p.config.ping_pong:
            following = lax.rem(plus(self.wg, 1), np.int32(self.p.config.consumers))
            plgpu.barrier_arrive(self.mem.turn.at[following])

    def visit(self, tile: Tile, blocks: Blocks) -> None:
        own = self.own(tile)

        def over_blocks(acc):
            q = self.take_q(0)
            state = self.first_step(q, np.int32(0), own, plus(blocks.end, -1))
            state = self.other_steps(acc, q, np.int32(0), state, own, blocks)
            last = minus(plus(blocks.end, -1), blocks.first)
            return self.finish(acc, last, state, own)

        result = plgpu.run_scoped(over_blocks, self.result_type)
        self.store(result, own)

    def visit_all(self) -> None:
        """Computes and stores its rows of all tiles of the block.

        The first scores of a tile are computed in the last step of the one before.
        """
        mem = self.mem

        def first(number):
            tile, blocks = self.p.tile_and_blocks(mem, number)
            return self.own(tile), plus(blocks.end, -1)

        def over_tiles(acc):
            own_visits = self.p.visits(mem)
            count = own_visits.count
            first_number = own_visits.number(np.int32(0))
            q = self.take_q(0)
            start = self.first_step(q, np.int32(0), *first(first_number))

            def visit(position, number, following, carry):
                before, state = carry
                tile, blocks = self.p.tile_and_blocks(mem, number)
                own = self.own(tile)
                q = mem.q_ring.slot(position).buffers.at[self.own_rows]
                state = self.other_steps(acc, q, before, state, own, blocks)
                mem.q_ring.release(position)
                end = plus(before, minus(blocks.end, blocks.first))

                def go_on():
                    q = self.take_q(plus(position, 1))
                    place = first(following)
                    return self.step_between(acc, q, end, state, own, *place)

                def stop():
                    result = self.finish(acc, plus(end, -1), state, own)
                    self.store(result, own)
                    return state

                return end, lax.cond(plus(position, 1) < count, go_on, stop)

            own_visits.for_each(visit, (np.int32(0), start))

        plgpu.run_scoped(over_tiles, self.result_type)

    def other_steps(self, acc, q, before, state, own, blocks) -> Any:
        """Visits the blocks of a tile from the last but one to the first.

        The first loop has those that are cut at the end, the last one those at the
        start of what the tile sees.
        """
        p = self.p
        steps = minus(blocks.end, blocks.first)
        if p.masks_more or p.masks_first:
            blocks = self.own_blocks(own, blocks)

        def step(step, state, masked):
            block = minus(plus(blocks.end, -1), step)
            return self.step(acc, q, plus(before, step), state, own, block, masked)

        masked_step = functools.partial(step, masked=True)
        whole_step = functools.partial(step, masked=False)
        masked, whole, ends = 1, steps, steps
        if p.masks_more:
            masked = maximum(minus(blocks.end, blocks.end_whole), 1)
        if p.masks_first:
            whole = minus(blocks.end, blocks.first_whole)
            whole = maximum(whole, masked)
        if p.idles:
            some = own.q_row < p.q_len
            masked, whole, ends = (
                where(some, x, np.int32(1)) for x in (masked, whole, ends)
            )
        if p.masks_more:
            state = plgpu.loop(1, masked, init_carry=state)(masked_step)
        state = plgpu.loop(masked, whole, init_carry=state)(whole_step)
        if p.masks_first:
            state = plgpu.loop(whole, ends, init_carry=state)(masked_step)
        if p.idles:
            plgpu.loop(ends, steps)(lambda i: self.idle_step(plus(before, i)))
        return state

    def idle_step(self, position) -> None:
        """Takes part in a step without rows of its own."""
        mem, before = self.mem, plus(position, -1)
        mem.k_ring.take(position)
        self.take_turn()
        mem.v_ring.take(before)
        self.pass_turn()
        mem.k_ring.release(position)
        mem.v_ring.release(before)

    def own_blocks(self, own, blocks: Blocks) -> Blocks:
        """Returns the tile's blocks; those are whole that all its own rows see."""
        p = self.p
        if p.mask.segments:
            return blocks
        rows = own.tile.lengths, own.q_row, p.config.rows
        found = p.mask.blocks(*rows, p.config.block_kv)
        return Blocks(
            blocks.first,
            maximum(minimum(found.first_whole, blocks.end), blocks.first),
            maximum(minimum(found.end_whole, blocks.end), blocks.first),
            blocks.end,
        )

    def own(self, tile: Tile) -> _Own:
        p, mem = self.p, self.mem
        q_row = plus(tile.start, times(self.wg, p.config.rows))
        ids = None
        if p.mask.segments:
            rows = plgpu.ds(q_row, p.config.rows)
            ids = plgpu.load(mem.q_ids.at[tile.batch, rows], layout=_ROW)
        slope, scales = p.slope(mem, tile, tile.head), None
        if p.narrow:
            of_batch = tile.batch if mem.scales.shape[0] > 1 else 0
            scales = [mem.scales[of_batch, tile.head, i] for i in range(2)]
        return _Own(tile, q_row, ids, slope, scales)

    def add(self, acc, probabilities, position) -> None:
        block = self.mem.v_ring.take(position).buffers
        plgpu.wgmma(acc, probabilities, block.T if self.p.narrow else block)

    def first_step(self, q, position, own, block) -> tuple[Any, Any, Any]:
        ring = self.mem.k_ring

        def multiply(scores):
            plgpu.wgmma(scores, q, ring.take(position).buffers.T)
            return scores[...]

        scores = plgpu.run_scoped(multiply, self.scores_type)
        ring.release(position)
        row_max, sums, wide = self.first_softmax(scores, position, own, block)
        return row_max, sums, self.rounded(wide)

    def first_softmax(self, scores, position, own, block) -> tuple[Any, Any, Any]:
        scores = self.modified(scores, position, own, block, self.p.masks)
        return self.softmax(own).begin(scores)

    def softmax(self, own) -> Softmax:
        """Returns that of a tile; without `in_parts` it has whole sums."""
        return Softmax(
            axis=1,
            factor=self.factor(own),
            exponent=narrow.EXPONENT if self.p.narrow else 0,
            slack=_SLACK if self.p.config.keep_maxima else 0.0,
            summed=_partial_sums if self.in_parts else None,
        )

    def two_products(self, acc, q, position, probabilities) -> Any:
        """Starts the scores of a block, and adds the block before it to the result.

        Returns the scores; the second product is still under way.
        """
        ring = self.mem.k_ring

        def multiply(scores):
            k = ring.take(position).buffers
            self.take_turn()
            plgpu.wgmma(scores, q, k.T)
            self.add(acc, probabilities, plus(position, -1))
            self.pass_turn()
            return plgpu.wgmma_accumulator_load(scores, wait_n=1)

        scores = plgpu.run_scoped(multiply, self.scores_type)
        ring.release(position)
        return scores

    def step(self, acc, q, position, state, own, block, masked) -> Any:
        """Computes the softmax of a block while the one before it is added."""
        before = plus(position, -1)
        row_max, sums, probabilities = state
        scores = self.two_products(acc, q, position, probabilities)
        scores = self.modified(scores, position, own, block, masked)
        softmax, keeps = self.softmax(own), self.p.config.keep_maxima
        new_max, sums, shrink, wide = softmax.step((row_max, sums), scores)
        if not keeps:
            if not self.in_parts:
                # All this is to happen while the second product is under way.
                wide, new_max, sums, shrink = lax.optimization_barrier(
                    (wide, new_max, sums, shrink)
                )
            so_far = acc[...]
            self.mem.v_ring.release(before)
            acc[...] = softmax.scaled(so_far, shrink)
            return new_max, sums, self.rounded(wide)
        # Not from the smallest factor: NaN in one row must not decide for the others.
        some = jnp.max(jnp.where(new_max > row_max, 1.0, 0.0)) > 0
        so_far = acc[...]
        self.mem.v_ring.release(before)
        # Rounded while exponentials are computed, and not after the branch.
        rounded = lax.optimization_barrier(self.rounded(wide))

        @plgpu.when(some)
        def _():
            acc[...] = softmax.scaled(so_far, shrink)

        return new_max, sums, rounded

    @property
    def in_parts(self) -> bool:
        """Whether the sums of the rows are in parts until the end."""
        p = self.p
        return p.config.keep_maxima or (p.v_dim <= _NARROW and not p.narrow)

    def step_between(self, acc, q, position, state, own, following, block) -> Any:
        """Begins a tile while the last block of the one before is added; stores that.

        Args:
          q: rows of the tile that begins, which is `following`; `block` is its first.
          own, state: of the tile that ends.
        """
        before = plus(position, -1)
        row_max, sums, probabilities = state
        scores = self.two_products(acc, q, position, probabilities)
        begun = self.first_softmax(scores, position, following, block)
        begun = lax.optimization_barrier(begun)
        total = acc[...]
        self.mem.v_ring.release(before)
        acc[...] = jnp.zeros_like(total)
        self.store(self.divided(total, row_max, sums, own), own)
        return begun[0], begun[1], self.rounded(begun[2])

    def finish(self, acc, position, state, own) -> Any:
        row_max, sums, probabilities = state
        self.add(acc, probabilities, position)
        total = acc[...]
        self.mem.v_ring.release(position)
        return self.divided(total, row_max, sums, own)

    def divided(self, total, row_max, sums, own) -> Any:
        p, row_sum = self.p, sums if sums.ndim == 1 else sums.sum(axis=1)
        share, seen_max = 1 / row_sum, row_max
        if p.narrow:
            # The sums have the factor of the exponentials.
            share, row_max = share * own.scales[1], row_max - narrow.EXPONENT
        lse = (row_max + jnp.log2(row_sum)) * math.log(2) if p.logsumexp else None
        if p.may_see_nothing or p.bias is not None:
            nothing = seen_max <= p.scores.lowest_maximum
            if p.mask.ragged:
                row = plgpu.broadcasted_iota(jnp.int32, nothing.shape, 0, layout=_ROW)
                nothing |= row >= own.tile.lengths.rows - own.q_row
            share = jnp.where(nothing, 0.0, share)
            lse = jnp.where(nothing, -jnp.inf, lse) if p.logsumexp else None
        if p.logsumexp:
            self.store_logsumexp(lse, own)
        return total * lax.broadcast_in_dim(share, total.shape, (0,))

    def store_logsumexp(self, lse, own) -> None:
        p, tile = self.p, own.tile
        rows = plgpu.ds(plus(tile.q_first, own.q_row), p.config.rows)
        at = (tile.head, rows) if p.packed else (tile.batch, tile.head, rows)
        inside = None
        if p.packed or p.q_len % p.config.block_q:
            end = tile.lengths.rows if p.packed else p.q_len
            row = plgpu.broadcasted_iota(jnp.int32, lse.shape, 0, layout=_ROW)
            inside = row < minus(end, own.q_row)
        plgpu.store(self.mem.lse, at, lse, mask=inside)

    def store(self, result, own) -> None:
        p, mem, tile = self.p, self.mem, own.tile
        # Rows of Q are not needed any more.
        out = mem.get("out_smem")
        buffer = mem.q_ring.slot(0).buffers if out is None else out
        if p.persistent:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        first = plus(tile.q_first, own.q_row)
        rows = p.rows_of(mem.out, tile, first, p.config.rows, tile.head)
        # Of the last tile not every consumer may have rows.
        some = own.q_row < p.q_len if p.q_len % p.config.block_q else None
        left = tile.lengths.rows - own.q_row if p.packed else None
        result = result.astype(p.out_dtype)
        store_rows(result, buffer.at[self.own_rows], rows, left, some)

    # --- pieces -----------------------------------------------------------------------

    @property
    def result_type(self) -> Any:
        return plgpu.ACC((self.p.config.rows, self.p.v_dim))

    @property
    def scores_type(self) -> Any:
        return plgpu.ACC((self.p.config.rows, self.p.config.block_kv))

    def factor(self, own) -> Any:
        """Makes of modified scores exponents of two."""
        factor = self.p.scores.factor
        return factor * own.scales[0] if self.scales_late else factor

    @property
    def scales_late(self) -> bool:
        """Whether the scales of operands are a part of the factor of the scores."""
        return self.p.narrow and not self.p.scores.modifies

    def rounded(self, wide) -> Any:
        p = self.p
        return narrow.probabilities(wide) if p.narrow else wide.astype(p.dtype)

    def modified(self, scores, position, own, block, masked) -> Any:
        p, mem = self.p, self.mem
        lengths = own.tile.lengths
        column = times(block, p.config.block_kv)
        if p.scores.modifies:
            if p.narrow:
                scores = scores * own.scales[0]
            bias = None
            if p.bias is not None:
                part = mem.bias_ring.take(position).buffers
                if p.has_matrix:
                    bias = part.at[self.own_rows][...]
                else:
                    columns = plgpu.ds(0, p.config.block_kv)
                    bias = plgpu.load(part.at[columns], layout=_COLUMN)
                mem.bias_ring.release(position)
            origin = plus(own.q_row, p.mask.shift(lengths))
            distance = minus(origin, column)
            scores = p.scores.modified(scores, distance, bias, own.slope)
        if not masked:
            return scores
        ids = None
        if p.mask.segments:
            columns = plgpu.ds(column, p.config.block_kv)
            of_columns = mem.kv_ids.at[own.tile.batch, columns]
            ids = own.ids, plgpu.load(of_columns, layout=_COLUMN)
        hidden = p.scores.hidden
        if self.scales_late:
            hidden = hidden / own.scales[0]
        place = lengths, own.q_row, column
        return p.mask.hide(scores, hidden, *place, ids, layout=plgpu.Layout.WGMMA)


def _partial_sums(wide: Any) -> Any:
    """Returns sums over every eighth column: each thread adds columns of its own."""
    rows, columns = wide.shape
    return wide.reshape(rows, columns // 8, 8).sum(axis=1)

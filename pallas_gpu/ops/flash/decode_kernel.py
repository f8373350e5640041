# SPDX-License-Identifier: Apache-2.0
"""Decode on Hopper: one warpgroup copies keys and values, another one multiplies."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.ops.flash import decode_copies as copies
from pallas_gpu.ops.flash.decode_work import Lane, Piece, Problem, Share
from pallas_gpu.ops.flash.problem import launch
from pallas_gpu.ops.flash.softmax import Softmax
from pallas_gpu.ops.folded import divide, minus, plus, times
from pallas_gpu.ops.memory import Memory
from pallas_gpu.ops.rules import cached
from pallas_gpu.ops.tiles import tiles

# A query's scores are a column: its partial sums are added up at the end.
_SOFTMAX = Softmax(axis=0, summed=lambda wide: wide)
_REGULAR = plgpu.SemaphoreType.REGULAR
_LN_2, _LOG2_E = math.log(2), math.log2(math.e)
# A masked score, and the maximum to begin with: beside it masked ones vanish.
_MASKED, _LOWEST = -(2.0**100), -(2.0**99)
# Rows of the statistics of a part of a tile: maxima and sums of its columns.
_MAXIMUM, _SUM = 0, 1
# Registers of a thread for parts that are loaded at once, to wait for them once, by the
# number of warpgroups.
_LOADED_REGISTERS = {2: 64, 3: 48, 5: 24}


# Registers of a thread of a warpgroup that multiplies, copies and widens, by the number
# of warpgroups: five of them have 96 each when they start.
_REGISTERS = {5: (136, 40, 80)}


@cached
def make_kernel(p: Problem, inputs: tuple[str, ...]) -> Any:
    c = p.config
    part, stats = (p.dims, p.columns), (2, p.columns)
    scratch = copies.scratch(p)
    scratch["p_smem"] = tiles((c.consumers, p.columns, p.rows), p.wide)
    if p.scales_queries:
        queries = tiles((c.consumers, p.columns, p.dims), p.wide)
        scratch["wide_q"] = queries
    if c.consumers > 1 and c.cluster == 1:
        number = c.consumers - 1
        others = [plgpu.SMEM((1, number, *x), jnp.float32) for x in (part, stats)]
        scratch["others"] = plgpu.Ring.of(others, copies=number)
    grid: dict[str, int] = {"tile": p.batch * p.units}
    cluster: dict[str, int] = {}
    if c.cluster > 1:
        scratch["parts"] = plgpu.SMEM((c.consumers, *part), jnp.float32)
        scratch["stats"] = plgpu.SMEM((c.consumers, *stats), jnp.float32)
        sources = c.cluster * c.consumers
        scratch["inbox"] = plgpu.SMEM((sources, p.share, p.columns), jnp.float32)
        scratch["inbox_stats"] = plgpu.SMEM((sources, *stats), jnp.float32)
        scratch["arrived"] = plgpu.Barrier(num_arrivals=2 * sources)
        cluster = {"split": c.cluster}
    else:
        workers = p.lanes * p.abreast
        if p.divides_tiles:
            if p.combiners > 1:
                scratch["turn_seen"] = plgpu.Barrier(num_arrivals=p.combiners - 1)
            scratch["parts"] = plgpu.GMEM((workers, 2, *part), jnp.float32)
            scratch["stats"] = plgpu.GMEM((workers, 2, *stats), jnp.float32)
        grid = {"worker": workers}
    shape = (p.batch, p.q_len, p.kv_heads, p.group, p.head_dim)
    results = {"out": jax.ShapeDtypeStruct(shape, p.dtype)}
    if p.logsumexp:
        results["logsumexp"] = jax.ShapeDtypeStruct(shape[:-1], jnp.float32)
    body, name = functools.partial(_body, p), "decode_attention"
    return launch(
        *(p, name, body, inputs, results, scratch),
        grid=grid,
        cluster=cluster,
        warpgroups=p.warpgroups,
    )


def _body(p: Problem, mem: Memory) -> None:
    if p.config.cluster == 1 and p.divides_tiles:
        mem.turns = plgpu.get_global(_REGULAR((p.lanes * p.abreast,)))
    wg = lax.axis_index("wg")
    work: Any = Share(p, mem.get("lengths"))
    if p.config.cluster == 1:
        work = Lane.of(p, mem.get("lengths"))

    consumers = p.config.consumers
    # Without widening the fifth is one that multiplies.
    registers = _REGISTERS.get(p.warpgroups) if p.is_narrow else None

    @plgpu.when(wg < consumers)
    def _():
        if registers is not None:
            plgpu.set_max_registers(registers[0], action="increase")
        _Consumer(p, mem, work, wg).run()

    @plgpu.when(wg == consumers)
    def _():
        if registers is not None:
            plgpu.set_max_registers(registers[1], action="decrease")

        @plgpu.warp_map
        def _(warp):
            @plgpu.when(warp == 0)
            def _():
                work.for_each(functools.partial(copies.produce, p, mem))

            @plgpu.when(warp == 1)
            def _():
                work.for_each(functools.partial(copies.copy_queries, p, mem))

    if p.is_narrow:

        @plgpu.when(wg > consumers)
        def _():
            if registers is not None:
                plgpu.set_max_registers(registers[2], action="decrease")
            index = plus(wg, -consumers - 1)
            work.for_each(functools.partial(copies.widen, p, mem, index))


# --- products -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Consumer:
    """What the warpgroup that multiplies does.

    Keys are the rows of both products, so that few queries waste nothing: scores are
    `k @ q.T`, results `v.T @ p.T`.
    """

    p: Problem
    mem: Memory
    work: Any
    index: Any

    def run(self) -> None:
        if self.p.config.cluster > 1:
            self.work.for_each(self.visit_share)
            return
        self.work.for_each(self.visit)
        if self.p.divides_tiles:

            @plgpu.when(lax.lt(self.index, np.int32(self.p.combiners)))
            def _():
                self.combine_lanes()

    @property
    def is_first(self) -> Any:
        return lax.eq(self.index, np.int32(0))

    @property
    def own_rows(self) -> Any:
        return plgpu.ds(times(self.index, self.p.rows), self.p.rows)

    def visit_piece(self, piece: Piece, then: Any) -> None:
        """Computes a piece; calls `then` in the first warpgroup with the result."""
        state, others = self.reduce(piece), self.mem.get("others")
        if self.p.config.consumers == 1:
            then(*state)
            return

        @plgpu.when(~self.is_first)
        def _():
            slot, at = others.fill(piece.number), plus(self.index, -1)
            parts, stats = slot.buffers
            parts[at], stats[at, _MAXIMUM], stats[at, _SUM] = state
            plgpu.barrier_arrive(slot.full)

        @plgpu.when(self.is_first)
        def _():
            parts, stats = others.take(piece.number).buffers
            total = state
            for i in range(self.p.config.consumers - 1):
                part = parts[i], *(stats[i, j] for j in (_MAXIMUM, _SUM))
                total = _SOFTMAX.combined([total, part])
            others.release(piece.number)
            then(*total)

    # --- the blocks of a piece --------------------------------------------------------

    def reduce(self, piece: Piece, meanwhile: Any = None) -> tuple[Any, Any, Any]:
        """Returns what a piece's blocks add up to: result, maxima and sums.

        Calls `meanwhile` with maxima and sums, if possible beside the last product.
        """
        p, mem = self.p, self.mem
        factor = p.factor * self.scale("k_scale", piece.unit)
        queries = mem.queries.take(piece.number).buffers
        if self.p.scales_queries:
            queries, scale = self.scaled_queries(queries)
            factor = factor * scale

        def finish(maxima, sums):
            sums = sums.sum(axis=0)
            if meanwhile is not None:
                meanwhile(maxima, sums)
            return sums

        def over_blocks(acc):
            def step(block, state):
                scores = self.scores(piece, queries, block, factor)
                return self.step(acc, piece, block, scores, state)

            maxima = jnp.full((p.columns,), _LOWEST, jnp.float32)
            sums = jnp.zeros((p.rows, p.columns), jnp.float32)
            loop = plgpu.loop(piece.first, piece.last, init_carry=(maxima, sums))
            maxima, sums = loop(step)
            # After a loop that may have no steps ptxas would serialize the products.
            if p.has_equal_shares:
                sums = finish(maxima, sums)
            return acc[...], maxima, sums

        total = plgpu.ACC((p.dims, p.columns))
        result, maxima, sums = plgpu.run_scoped(over_blocks, total)
        self.release_v(piece, piece.last)
        mem.queries.release(piece.number)
        return result, maxima, sums if p.has_equal_shares else finish(maxima, sums)

    def release_v(self, piece: Piece, block: Any) -> None:
        """Frees the buffer of V of the block before."""

        @plgpu.when(lax.gt(block, piece.first))
        def _():
            self.mem.v_ring.release(piece.read(plus(block, -1)))

    def step(self, acc: Any, piece: Piece, block: Any, scores: Any, state: Any) -> Any:
        p = self.p
        row = times(plus(p.first_block(piece.length), block), p.config.block_kv)
        row = plus(row, times(self.index, p.rows))
        scores = self.mask(scores, piece, row)
        new, sums, shrink, wide = _SOFTMAX.step(state, scores)
        so_far = acc[...]
        self.release_v(piece, block)
        acc[...] = _SOFTMAX.scaled(so_far, shrink)
        p_smem = self.mem.p_smem.at[self.index]
        plgpu.transpose_ref(p_smem, (1, 0))[...] = wide.astype(p.wide)
        if p.sees_whole_blocks:
            plgpu.commit_smem()
        v = self.mem.v_ring.take(piece.read(block)).buffers.at[self.own_rows]
        if not p.sees_whole_blocks:
            self.clear(piece, v, row)
            plgpu.commit_smem()
        plgpu.wgmma(acc, v.T, p_smem.T)
        return new, sums

    def scaled_queries(self, queries: Any) -> tuple[Any, Any]:
        """Stores queries in float16, scaled to its range.

        Returns:
          Their reference, and what to multiply the scores of each column by.
        """
        found = queries[...].astype(jnp.float32)
        largest = jnp.abs(found).max(axis=1)
        exponent = lax.bitcast_convert_type(largest, jnp.int32) >> 23
        # The largest one becomes 2**13 or more; both factors are normal numbers.
        exponent = lax.max(exponent, np.int32(17)) - np.int32(13)
        by = [
            lax.bitcast_convert_type(e << 23, jnp.float32)
            for e in (np.int32(254) - exponent, exponent)
        ]
        scaled = found * lax.broadcast_in_dim(by[0], found.shape, (0,))
        own = self.mem.wide_q.at[self.index]
        own[...] = scaled.astype(own.dtype)
        plgpu.commit_smem()
        return own, by[1]

    def scores(self, piece: Piece, queries: Any, block: Any, factor: Any) -> Any:
        p, ring, step = self.p, self.mem.k_ring, piece.read(block)

        def multiply(scores):
            own = ring.take(step).buffers.at[self.own_rows]
            # Narrow elements are widened on their way through registers.
            operand = own[...].astype(p.wide) if p.is_narrow else own
            plgpu.wgmma(scores, operand, queries.T)
            return scores[...]

        scores = plgpu.run_scoped(multiply, plgpu.ACC((p.rows, p.columns)))
        ring.release(step)
        if self.p.scales_queries:
            factor = _SOFTMAX.of_queries(factor, scores)
        scores = scores * factor
        if p.soft_cap is None:
            return scores
        cap = p.soft_cap * _LOG2_E
        return jnp.tanh(scores / cap) * cap

    def scale(self, name: str, unit: Any) -> Any:
        if (of := self.mem.get(name)) is None:
            return 1.0
        head, _ = self.p.head(unit)
        return of[head if of.shape[0] > 1 else 0]

    def mask(self, scores: Any, piece: Piece, row: Any) -> Any:
        p = self.p
        key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0)
        end = own_end = minus(piece.length, row)
        if p.q_len > 1 and (p.causal or p.window is not None):
            column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1)
            query, _ = p.query_and_head(column)
            own_end = query + plus(end, 1 - p.q_len)
        visible = key < (own_end if p.causal else end)
        if p.window is not None:
            visible = visible & (key >= own_end - p.window)
        return jnp.where(visible, scores, _MASKED)

    def clear(self, piece: Piece, v: Any, row: Any) -> None:
        """Stores zeros to rows of V that no query sees: they may hold NaN."""
        p = self.p
        end = minus(piece.length, row)
        begin = minus(p.first_row(piece.length), row)
        partly = lax.lt(end, np.int32(p.rows))
        if p.window is not None:
            partly = partly | lax.gt(begin, np.int32(0))

        @plgpu.when(partly)
        def _():
            elements = v[...]
            key = plgpu.broadcasted_iota(jnp.int32, elements.shape, 0)
            seen = key < end
            if p.window is not None:
                seen = seen & (key >= begin)
            v[...] = jnp.where(seen, elements, jnp.zeros_like(elements))

    # --- results ----------------------------------------------------------------------

    def visit(self, piece: Piece) -> None:
        def then(*state):
            if not self.p.divides_tiles:
                self.store(piece.sequence, piece.unit, 0, *state)
                return

            @plgpu.when(piece.is_whole)
            def _():
                self.store(piece.sequence, piece.unit, 0, *state)

            @plgpu.when(~piece.is_whole)
            def _():
                self.hand_over(piece, *state)

        self.visit_piece(piece, then)

    def hand_over(self, piece: Piece, result: Any, maxima: Any, sums: Any) -> None:
        """Stores a part of a result, and tells the CTA that combines them."""
        begins = lax.eq(piece.first, np.int32(0))
        at = lax.axis_index("worker"), begins.astype(jnp.int32)
        self.mem.parts[at] = result
        self.mem.stats[(*at, _MAXIMUM)] = maxima
        self.mem.stats[(*at, _SUM)] = sums

        _, last = self.work.lanes_of(piece.start, piece.blocks)
        turn = self.mem.turns.at[self.work.worker(last)]
        plgpu.semaphore_signal(turn, memory_scope="gpu")

    def combine_lanes(self) -> None:
        """Combines the parts of the tile that ends in this CTA but began before it.

        Each warpgroup combines some dimensions of the head.
        """
        p, work = self.p, self.work
        size = p.dims // p.combiners
        start = times(self.index, size)

        def visit(piece):
            first, last = work.lanes_of(piece.start, piece.blocks)
            mine = lax.gt(piece.first, np.int32(0)) & lax.eq(piece.last, piece.blocks)

            @plgpu.when(mine)
            def _():
                turn = self.mem.turns.at[lax.axis_index("worker")]
                count = plus(minus(last, first), 1)
                plgpu.semaphore_wait(turn, count, decrement=False, memory_scope="gpu")
                if p.combiners > 1:

                    @plgpu.when(~self.is_first)
                    def _():
                        plgpu.barrier_arrive(self.mem.turn_seen)

                together = _LOADED_REGISTERS.get(p.warpgroups, 0)
                together = together * 128 // (size * p.columns)
                together = min(max(together, 1), p.lanes)

                def add(step, state):
                    parts = [state]
                    for i in range(together):
                        lane = plus(plus(first, times(step, together)), i)
                        there = lax.le(lane, last)
                        lane = lax.min(lane, last)
                        begins = lax.eq(lane, first).astype(jnp.int32)
                        at = work.worker(lane), begins
                        maxima = self.mem.stats[(*at, _MAXIMUM)]
                        # What has been added already counts no more.
                        maxima = jnp.where(there, maxima, 2 * _MASKED)
                        sums = self.mem.stats[(*at, _SUM)]
                        part = self.mem.parts[(*at, plgpu.ds(start, size))]
                        parts.append((part, maxima, sums))
                    return _SOFTMAX.combined(parts)

                steps = divide(plus(minus(last, first), together), together)
                loop = plgpu.loop(0, steps, init_carry=self.nothing(size))
                result, maxima, sums = loop(add)
                tile = piece.sequence, piece.unit
                self.store(*tile, start, result, maxima, sums, first=start)

                @plgpu.when(self.is_first)
                def reset():
                    if p.combiners > 1:
                        plgpu.barrier_wait(self.mem.turn_seen)
                    plgpu.semaphore_signal(turn, lax.neg(count), memory_scope="gpu")

        work.first_piece(visit)

    def nothing(self, dims: int) -> Any:
        p = self.p
        zeros = jnp.zeros((dims, p.columns), jnp.float32)
        maxima = jnp.full((p.columns,), _LOWEST, jnp.float32)
        return zeros, maxima, jnp.zeros((p.columns,), jnp.float32)

    def visit_share(self, piece: Piece) -> None:
        """Computes a piece, then a part of the head's dimensions for all pieces."""
        p, at = self.p, self.index
        source = plus(times(lax.axis_index("split"), p.config.consumers), at)

        def send(arrays, inbox):
            for cta, array in enumerate(arrays):
                plgpu.async_store_smem(
                    array,
                    inbox.at[source],
                    self.mem.arrived,
                    cluster_idx=cta,
                    cluster_dim="split",
                    sem="relaxed",
                )

        def send_stats(maxima, sums):
            self.mem.stats[at, _MAXIMUM], self.mem.stats[at, _SUM] = maxima, sums
            send([self.mem.stats[at]] * p.config.cluster, self.mem.inbox_stats)

        self.mem.parts[at] = self.reduce(piece, send_stats)[0]
        # The last ones overlap: sizes are static.
        starts = [min(i * p.share, p.dims - p.share) for i in range(p.config.cluster)]
        send([self.mem.parts[at, plgpu.ds(i, p.share)] for i in starts], self.mem.inbox)

        @plgpu.when(self.is_first)
        def _():
            plgpu.barrier_wait(self.mem.arrived)
            first = times(lax.axis_index("split"), p.share)
            start = lax.min(first, np.int32(p.dims - p.share))
            parts = [
                (
                    self.mem.inbox[i],
                    self.mem.inbox_stats[i, _MAXIMUM],
                    self.mem.inbox_stats[i, _SUM],
                )
                for i in range(p.config.cluster * p.config.consumers)
            ]
            total = _SOFTMAX.combined(parts)
            self.store(piece.sequence, piece.unit, start, *total, first=first)

    def store(self, sequence, unit, start, result, maxima, sums, first=0) -> None:
        """Stores a tile's result.

        Args:
          sequence, unit: the tile.
          start: dimension of the head where the result begins.
          result, maxima, sums: of all columns.
          first: dimension that is stored first.
        """
        p = self.p
        empty = sums == 0
        inverse = jnp.where(empty, 0.0, 1 / jnp.where(empty, 1.0, sums))
        inverse = inverse * (p.v_factor * self.scale("v_scale", unit))
        result = (result * _SOFTMAX.of_queries(inverse, result)).astype(p.dtype)
        head, first_head = p.head(unit)

        def place(shape, axis):
            column = plgpu.broadcasted_iota(jnp.int32, shape, axis)
            query, within = p.query_and_head(column)
            last = minus(np.int32(p.group), first_head)
            exists = (within < last) & (within < p.tile_heads) & (query < p.q_len)
            return (sequence, query, head, within + first_head), exists

        where, exists = place(result.shape, 1)
        dim = plgpu.broadcasted_iota(jnp.int32, result.shape, 0) + start
        if p.dims % p.config.cluster:
            exists = exists & (dim >= first)
        if p.dims > p.head_dim:
            exists = exists & (dim < p.head_dim)
        plgpu.store(self.mem.out, (*where, dim), result, mask=exists)
        if p.logsumexp:
            # Those of empty columns are -inf: their sums are zero.
            value = maxima * _LN_2 + jnp.log(sums)
            where, exists = place(value.shape, 0)
            # All CTAs of a cluster have the same ones.
            plgpu.store(self.mem.logsumexp, where, value, mask=exists & (first == 0))

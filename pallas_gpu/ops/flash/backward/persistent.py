# SPDX-License-Identifier: Apache-2.0
"""Attention's derivatives, narrow heads: persistent blocks, whose steps never pause.

The last step of a tile of K and V starts the first products of the next one, and the
first step of a tile adds the last part of dQ of the one before: between two tiles
consumers store dK and dV, and that is all. Positions count the steps of all tiles. K
has two buffers, because the first step of a tile reads that of the one before. Behind
the last tile come one step's operands of any tile, which nothing uses.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.ops import integers
from pallas_gpu.ops.flash.backward.config import ROWS
from pallas_gpu.ops.flash.backward.consumers import Memory, Narrow
from pallas_gpu.ops.flash.backward.problem import BackwardProblem
from pallas_gpu.ops.flash.persistent import Visits


class Added(NamedTuple):
    """What the step before leaves to be added to dQ.

    Attributes:
      batch, row, head: the tile of dQ.
      k: the buffer of K.
    """

    batch: Any
    row: Any
    head: Any
    k: Any


def consume(p: BackwardProblem, mem: Memory, wg: Any, visits: Visits) -> None:
    """Computes and stores the rows of dK and dV of a consumer, of all tiles."""

    def over_tiles(dk, dv, scores, dp):
        zero = jnp.int32(0)
        accumulators = dk, dv, scores, dp
        _consumer(p, mem, wg, zero, zero, zero).start(scores, dp)

        def visit(count, number, _, carry):
            start, before = carry
            one = _consumer(p, mem, wg, number, count, start)
            before = one.visit(accumulators, before)
            return one.end, before

        start = zero, Added(zero, zero, zero, zero)
        end, before = visits.for_each(visit, start)
        plgpu.wgmma_wait(0)
        _consumer(p, mem, wg, zero, zero, end).finish(before)
        return scores[...], dp[...]

    accumulators = [plgpu.ACC((ROWS, n)) for n in (p.head_dim, p.v_head_dim)]
    accumulators += [plgpu.ACC((ROWS, p.config.block_q))] * 2
    plgpu.run_scoped(over_tiles, *accumulators)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _consumer(p, mem, wg, number, count, start) -> _Steady:
    place = p.tile(mem, number)
    return _Steady(p, mem, wg, place, p.tiles_of_q(mem, place), count, start)


@dataclasses.dataclass(frozen=True)
class _Steady(Narrow):
    """A consumer in one of the tiles.

    Attributes:
      count, first: the tiles, and the steps, of the block before it.
    """

    count: Any
    first: Any

    @property
    def end(self) -> Any:
        return integers.plus(self.first, self.total)

    def k(self, count: Any) -> Any:
        return self.mem.k_smem.at[self.p.k_buffer(count)]

    def start(self, scores, dp) -> None:
        """Starts the products of the first step; there is no dS before it."""
        mem, zero = self.mem, jnp.int32(0)
        plgpu.barrier_wait(mem.k_full)
        self.start_scores(scores, zero, self.k(zero))
        plgpu.barrier_wait(mem.v_full)
        self.start_dp(dp, zero)
        self.shared(jnp.int32(1))[...] = jnp.zeros(
            (ROWS, self.p.config.block_q), self.p.dtype
        )
        plgpu.commit_smem()
        plgpu.barrier_arrive(mem.ds_full)
        plgpu.wgmma_accumulator_load(scores, wait_n=1)

    def visit(self, accumulators, before: Added) -> Added:
        """Computes the tile; returns what its last step leaves."""
        p, blocks = self.p, self.blocks
        last = integers.plus(self.end, -1)

        def one(position, masked, added=None, is_last=False):
            head, tile = self.visited(position)
            added = added or self.left_by(integers.plus(position, -1))
            of_step = accumulators, position, head, tile, masked, added
            self.one_step(*of_step, is_last)

        def bound(tile):
            past = integers.times(integers.minus(blocks.end, tile), p.group)
            position = jnp.minimum(integers.plus(self.first, past), last)
            return jnp.maximum(position, integers.plus(self.first, 1))

        one(self.first, p.hides, before)
        parts = [
            (bound(end), bound(first), masked)
            for first, end, masked in (
                (blocks.end_whole, blocks.end, True),
                (blocks.first_whole, blocks.end_whole, False),
                (blocks.first, blocks.first_whole, True),
            )
            if first is not end
        ]
        # So is `bound(blocks.first)`, also where there are steps beyond the tiles.
        parts[-1] = parts[-1][0], last, parts[-1][2]
        for start, end, masked in parts:
            # With constant bounds ptxas runs out of registers.
            bounds = lax.optimization_barrier([start, end])
            of_part = functools.partial(one, masked=masked)
            plgpu.loop(*bounds)(of_part)
        one(last, p.hides, is_last=True)
        self.leave_results(*accumulators[:2])
        return self.left_by(last)

    def visited(self, position) -> tuple[Any, Any]:
        """Returns the head and the tile of Q of one of its steps."""
        past = integers.minus(position, self.first)
        member, tile = self.p.visited(self.blocks, past)
        return integers.plus(integers.times(self.kv_head, self.p.group), member), tile

    def left_by(self, position) -> Added:
        """Returns what one of its steps leaves."""
        head, tile = self.visited(position)
        row = integers.times(tile, self.p.config.block_q)
        return Added(self.place.batch, row, head, self.p.k_buffer(self.count))

    def one_step(
        self, accumulators, position, head, tile, masked, before, is_last
    ) -> None:
        """Adds a tile of Q to dK and dV, and the one of the step before to dQ.

        It finds the scores complete and dP under way, and leaves those of the next step
        so: ptxas follows no more than that around a loop.
        """
        mem, (dk, dv, scores, dp) = self.mem, accumulators
        slot, following = self.slot(position), integers.plus(position, 1)
        shown = plgpu.wgmma_accumulator_load(scores, wait_n=None)
        found = self.probabilities(shown, position, head, tile, masked)
        # The exponentials are to be computed while dP is under way.
        probabilities, factors = lax.optimization_barrier(found)
        values = dp[...]
        if is_last:
            # A tile has two steps: none reads K of the tile before any more.
            plgpu.barrier_arrive(mem.kv_empty)
        plgpu.wgmma(dv, probabilities, mem.do_smem.at[slot])
        ds = self.derivatives(factors, values, position)
        plgpu.wgmma(dk, ds, mem.q_smem.at[slot])
        # dS of the step before are there, and those before them are not read any more.
        plgpu.barrier_wait(mem.ds_full)
        self.shared(position)[...] = ds
        plgpu.commit_smem()
        count = integers.plus(self.count, 1) if is_last else self.count

        def compute(dq):
            self.start_dq(dq, self.buffer(following), k=mem.k_smem.at[before.k])
            # The left operands of dK and dV are registers: they are free now.
            plgpu.wgmma_wait(1)
            if is_last:
                plgpu.barrier_wait(mem.k_full)
            self.restart(self.start_scores, scores, following, self.k(count))
            return plgpu.wgmma_accumulator_load(dq, wait_n=1)

        part = plgpu.run_scoped(compute, plgpu.ACC(self.p.dq_part))
        plgpu.barrier_arrive(mem.ds_full)
        plgpu.barrier_arrive(mem.q_empty.at[slot])
        self.add(part, position, before)
        if is_last:
            plgpu.barrier_wait(mem.v_full)
        self.restart(self.start_dp, dp, following)
        plgpu.wgmma_accumulator_load(scores, wait_n=1)

    def add(self, part, position, before: Added) -> None:
        """Starts the addition of the part of the step before, if there is one."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        some = lax.gt(position, np.int32(0))
        self.add_at(part, self.mem.dq_smem.at[self.wg], before[:3], some=some)

    def finish(self, before: Added) -> None:
        """Adds what the last step of all has left."""
        mem, end = self.mem, self.first

        def last(dq):
            plgpu.barrier_wait(mem.ds_full)
            buffer = self.buffer(integers.plus(end, 1))
            self.start_dq(dq, buffer, k=mem.k_smem.at[before.k])
            return dq[...]

        self.add(plgpu.run_scoped(last, plgpu.ACC(self.p.dq_part)), end, before)

    def leave_results(self, dk, dv) -> None:
        """Stores or adds dV and dK, while dP of the next tile is under way."""
        p, mem = self.p, self.mem
        for acc, scale, gmem in ((dv, None, mem.dv), (dk, p.scores.sm_scale, mem.dk)):
            values = plgpu.wgmma_accumulator_load(acc, wait_n=1)
            values = values if scale is None else values * scale
            (self.store_result if p.parts == 1 else self.add_result)(values, gmem)
            acc[...] = jnp.zeros(acc.shape, acc.dtype)

    def store_result(self, values, gmem) -> None:
        """Starts the copy of one of them to its head of K and V."""
        p, place = self.p, self.place
        buffer = self.mem.results_smem.at[self.wg, 0]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        buffer[...] = values.astype(p.dtype)
        plgpu.commit_smem()
        rows, some = self.rows_of_result()
        plgpu.copy_smem_to_gmem(buffer, gmem.at[place.batch, rows, place.head], some)

    def add_result(self, values, gmem) -> None:
        """Starts the addition of one of them to its head of K and V, in float32."""
        p, place = self.p, self.place
        buffer, width = self.mem.dq_smem.at[self.wg], p.dq_part[1]
        rows, some = self.rows_of_result()
        for first in range(0, p.head_dim, width):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            buffer[...] = values[:, first : first + width]
            plgpu.commit_smem()
            columns = plgpu.ds(first, width)
            area = gmem.at[place.batch, rows, p.head_of_kv(place.head), columns]
            plgpu.copy_smem_to_gmem(buffer, area, some, reduction_op="add")

    def rows_of_result(self) -> tuple[Any, Any]:
        """Returns its rows of K and V, and whether there are any, or None."""
        p = self.p
        row = integers.plus(self.kv_start, self.row)
        some = row < p.kv_len if p.kv_len % p.block_kv else None
        return plgpu.ds(row, ROWS), some


def produce(p: BackwardProblem, mem: Memory, visits: Visits) -> None:
    """Copies K, V and the tiles of Q and dO of all tiles in the order of their use."""
    c, tiles = p.config, visits.count

    def visit(count, number, _, start):
        place = p.tile(mem, number)
        blocks = p.tiles_of_q(mem, place)
        total = jnp.where(count == tiles, 1, p.total(blocks))
        own_rows = plgpu.ds(place.start, p.block_kv)
        own = place.batch, own_rows, p.head_of_kv(place.head)

        def copy_step(position):
            slot = lax.rem(position, np.int32(c.stages))
            member, tile = p.visited(blocks, integers.minus(position, start))
            head = integers.plus(integers.times(place.head, p.group), member)
            rows = plgpu.ds(integers.times(tile, c.block_q), c.block_q)
            numbers = place.batch, head, rows
            rows = place.batch, rows, head

            @plgpu.when(lax.ge(position, np.int32(c.stages)))
            def _():
                plgpu.barrier_wait(mem.q_empty.at[slot])

            for source, part, ring, full in (
                (mem.q, rows, mem.q_smem, mem.q_full),
                (mem.lse, numbers, mem.lse_smem, mem.q_full),
                (mem.do, rows, mem.do_smem, mem.do_full),
                (mem.delta, numbers, mem.delta_smem, mem.do_full),
            ):
                plgpu.copy_gmem_to_smem(source.at[part], ring.at[slot], full.at[slot])

        # In the order in which their buffers are released.
        copy_step(start)
        wait = functools.partial(plgpu.barrier_wait, mem.kv_empty)
        plgpu.when(lax.gt(count, np.int32(0)))(wait)
        k_smem = mem.k_smem.at[p.k_buffer(count)]
        plgpu.copy_gmem_to_smem(mem.k.at[own], k_smem, mem.k_full)
        plgpu.copy_gmem_to_smem(mem.v.at[own], mem.v_smem, mem.v_full)
        end = integers.plus(start, total)
        plgpu.loop(integers.plus(start, 1), end)(copy_step)
        return end

    visits.for_each(visit, jnp.int32(0), more=1)

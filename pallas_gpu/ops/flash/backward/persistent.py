# SPDX-License-Identifier: Apache-2.0
"""Attention's derivatives, narrow heads: persistent blocks, whose steps never pause.

The last step of a tile of K and V starts the first products of the next one, and the
first step of a tile adds the last part of dQ of the one before: between two tiles
consumers store dK and dV, and that is all. Positions count the steps of all tiles. K
has two buffers, because the first step of a tile reads that of the one before. Behind
the last tile come one step's operands of any tile, which nothing uses.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.ops.flash.backward.config import ROWS
from pallas_gpu.ops.flash.backward.consumers import Added, Narrow
from pallas_gpu.ops.flash.backward.problem import BackwardProblem
from pallas_gpu.ops.flash.persistent import Visits
from pallas_gpu.ops.folded import minus, plus, times
from pallas_gpu.ops.memory import Memory


def consume(p: BackwardProblem, mem: Memory, wg: Any, visits: Visits) -> None:

    def over_tiles(*accumulators):
        zero = jnp.int32(0)
        _consumer(p, mem, wg, zero, zero, zero).start(*accumulators[2:])

        def visit(count, number, _, carry):
            start, before = carry
            one = _consumer(p, mem, wg, number, count, start)
            before = one.visit(accumulators, before)
            return one.end, before

        start = zero, Added((zero, zero, zero), zero)
        end, before = visits.for_each(visit, start)
        plgpu.wgmma_wait(0)
        _consumer(p, mem, wg, zero, zero, end).finish(end, before)
        return [acc[...] for acc in accumulators[2:]]

    zero = jnp.int32(0)
    accumulators = _consumer(p, mem, wg, zero, zero, zero).accumulators
    plgpu.run_scoped(over_tiles, *accumulators)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _consumer(p, mem, wg, number, count, start) -> _Steady:
    place = p.tile(mem, number)
    return _Steady(p, mem, wg, place, p.tiles_of_q(mem, place), count, start)


class _Steady(Narrow):
    @property
    def end(self) -> Any:
        return plus(self.first, self.total)

    def visit(self, accumulators, before: Added) -> Added:
        """Computes the tile; returns what its last step leaves."""
        p, blocks = self.p, self.blocks
        last = plus(self.end, -1)

        def one(position, masked, added=None, last=False):
            visited = self.visited(position)
            added = added or self.left_by(plus(position, -1))
            self.step(accumulators, position, *visited, masked, last, added)

        def bound(tile):
            past = times(minus(blocks.end, tile), p.group)
            position = jnp.minimum(plus(self.first, past), last)
            return jnp.maximum(position, plus(self.first, 1))

        one(self.first, p.hides, before)
        parts = [
            (bound(end), bound(first), masked)
            for first, end, masked in reversed(blocks.parts())
        ]
        # So is `bound(blocks.first)`, also where there are steps beyond the tiles.
        parts[-1] = parts[-1][0], last, parts[-1][2]
        for start, end, masked in parts:
            # With constant bounds ptxas runs out of registers.
            bounds = lax.optimization_barrier([start, end])
            of_part = functools.partial(one, masked=masked)
            plgpu.loop(*bounds)(of_part)
        one(last, p.hides, last=True)
        self.leave_results(*accumulators[:2])
        return self.left_by(last)

    def leave_results(self, dk, dv) -> None:
        """Stores or adds dV and dK, while dP of the next tile is under way."""
        p, mem = self.p, self.mem
        for acc, scale, gmem in ((dv, None, mem.dv), (dk, p.scores.sm_scale, mem.dk)):
            values = plgpu.wgmma_accumulator_load(acc, wait_n=1)
            values = values if scale is None else values * scale
            (self.store_result if p.parts == 1 else self.add_result)(values, gmem)
            acc[...] = jnp.zeros(acc.shape, acc.dtype)

    def store_result(self, values, gmem) -> None:
        p, place = self.p, self.place
        buffer = self.mem.results_smem.at[self.wg, 0]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        buffer[...] = values.astype(p.dtype)
        plgpu.commit_smem()
        rows, some = self.rows_of_result()
        plgpu.copy_smem_to_gmem(buffer, gmem.at[place.batch, rows, place.head], some)

    def add_result(self, values, gmem) -> None:
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
        row = self.row
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
            head, tile = p.visited(place, blocks, minus(position, start))
            rows = plgpu.ds(times(tile, c.block_q), c.block_q)
            q, do = mem.q_ring.fill(position), mem.do_ring.slot(position)
            for sources, slot in (((mem.q, mem.lse), q), ((mem.do, mem.delta), do)):
                parts = (place.batch, rows, head), (place.batch, head, rows)
                for source, part, buffer in zip(
                    sources, parts, slot.buffers, strict=True
                ):
                    plgpu.copy_gmem_to_smem(source.at[part], buffer, slot.full)

        # In the order in which their buffers are released.
        copy_step(start)
        wait = functools.partial(plgpu.barrier_wait, mem.kv_empty)
        plgpu.when(lax.gt(count, np.int32(0)))(wait)
        k_smem = mem.k_smem.at[p.k_buffer(count)]
        plgpu.copy_gmem_to_smem(mem.k.at[own], k_smem, mem.k_full)
        plgpu.copy_gmem_to_smem(mem.v.at[own], mem.v_smem, mem.v_full)
        end = plus(start, total)
        plgpu.loop(plus(start, 1), end)(copy_step)
        return end

    visits.for_each(visit, jnp.int32(0), more=1)

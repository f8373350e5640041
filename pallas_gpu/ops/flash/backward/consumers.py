# SPDX-License-Identifier: Apache-2.0
"""Attention's derivatives: what consumers have in common, and those of narrow heads.

Each has 64 rows of K and V, and computes S and dP transposed for them: they come out of
one product as the left operand of the next, in registers, and dV and dK stay in
registers. dQ needs the dS of both, through SMEM; each adds its part in GMEM. In a step
the tensor core has dP under way during the exponentials, dV during dS, and the scores
of the next step while dQ is being stored.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.ops.flash.backward.config import ROWS
from pallas_gpu.ops.flash.backward.problem import BackwardProblem
from pallas_gpu.ops.flash.masks import Blocks, Lengths
from pallas_gpu.ops.flash.problem import Tile, store_rows
from pallas_gpu.ops.folded import minus, plus, times
from pallas_gpu.ops.memory import Memory

LAYOUT = plgpu.Layout.WGMMA


@dataclasses.dataclass(frozen=True)
class Scored:
    """A consumer warpgroup: its number, and the block's tile.

    Attributes:
      transposed: whether the rows of its scores are those of K and V, and not of Q.
    """

    p: BackwardProblem
    mem: Memory
    wg: Any
    place: Tile
    transposed: ClassVar[bool] = False

    @property
    def first_row(self) -> Any:
        """The first of its rows, in the block."""
        return times(self.wg, ROWS)

    @property
    def own(self) -> Any:
        return plgpu.ds(self.first_row, ROWS)

    @property
    def row(self) -> Any:
        """The first of its rows, counted in the sequence."""
        return plus(self.place.start, self.first_row)

    def probabilities(
        self,
        scores: Any,
        head: Any,
        column: Any,
        masked: bool,
        lse: Callable[[], Any],
        bias: Callable[[], Any],
    ) -> tuple[Any, Any]:
        """Returns those of a tile, and tanh of scores with a soft cap, or None.

        Args:
          head: of Q.
          column: the first one, counted in the sequence.
          lse, bias: return what is subtracted from the scores, and what is added.
        """
        p, mem, row, capped = self.p, self.mem, self.row, None
        mask, lengths, ids = p.mask, self.place.lengths, ("q_ids", "kv_ids")
        if self.transposed:
            # Loaded again: with fewer values around the loop, registers suffice.
            lengths = Lengths(*reversed(p.lengths(mem, self.place.sequence)))
            mask, ids = mask.transposed, ("kv_ids", "q_ids")
        if p.scores.modifies:
            distance = plus(minus(row, column), mask.shift(lengths))
            scores, capped = p.scores.modified(
                *(scores, distance, bias(), p.slope(mem, self.place, head)),
                keeps_capped=True,
            )
        if masked:
            found: Any = None
            if mask.segments:
                found = [
                    self.loaded(mem.get(x).at[self.place.batch, plgpu.ds(first, n)], i)
                    for i, x, first, n in zip(
                        (1, 0), ids, (row, column), scores.shape, strict=True
                    )
                ]
            scores = mask.hide(
                *(scores, p.scores.hidden, lengths, row, column, found),
                hides_rows=self.transposed and p.has_tail,
            )
        # Loaded before the scores are scaled: after it ptxas runs out of registers.
        subtracted = lse()
        return jnp.exp2(scores * p.scores.factor - subtracted), capped

    def loaded(self, part: Any, axis: int) -> Any:
        """Returns a number for each row (1) or each column (0) of a tile."""
        return plgpu.load(part, layout=LAYOUT.reduce(axis), optimized=False)


@dataclasses.dataclass(frozen=True)
class Consumer(Scored):
    """A consumer whose block has a tile of K and V.

    Attributes:
      blocks: the tiles of Q that it visits.
    """

    blocks: Blocks
    transposed: ClassVar[bool] = True

    def run(self) -> None:
        raise NotImplementedError

    @property
    def first_row(self) -> Any:
        return 0 if self.p.wide else times(self.wg, ROWS)

    @property
    def scores_type(self) -> Any:
        return plgpu.ACC((ROWS, self.p.config.block_q))

    def for_each_tile(self, step: Any) -> None:
        """Calls `step(position, head, tile, masked, last=False)` for the tiles of Q.

        The last tile comes first, and heads before tiles: blocks that differ in their
        first tile visit the others at the same time, and share them in the L2 cache.
        """
        p, blocks = self.p, self.blocks
        last = jnp.int32(plus(self.total, -1))

        def one(position, masked, **options):
            visited = p.visited(self.place, blocks, position)
            step(position, *visited, masked, **options)

        for first, end, masked in reversed(blocks.parts()):
            past = [minus(blocks.end, x) for x in (end, first)]
            bounds = [jnp.minimum(jnp.int32(times(x, p.group)), last) for x in past]
            # With constant bounds ptxas runs out of registers.
            of_part = functools.partial(one, masked=masked)
            plgpu.loop(*lax.optimization_barrier(bounds))(of_part)
        one(last, p.hides, last=True)

    @property
    def total(self) -> Any:
        """The number of tiles it visits, one at least."""
        return self.p.total(self.blocks)

    # --- products ---------------------------------------------------------------------

    def start_scores(self, scores, position, k=None) -> None:
        k = self.mem.k_smem if k is None else k
        q, _ = self.mem.q_ring.take(position).buffers
        plgpu.wgmma(scores, k.at[self.own], q.T)

    def start_dp(self, dp, position) -> None:
        do, _ = self.mem.do_ring.take(position).buffers
        plgpu.wgmma(dp, self.mem.v_smem.at[self.own], do.T)

    def restart(self, start, acc, position, *operands) -> None:
        """Starts a product of its own in an accumulator whose values have been read."""
        acc[...] = jnp.zeros(acc.shape, acc.dtype)
        start(acc, position, *operands)

    def start_dq(self, dq, ds, piece: int = 0, k=None) -> None:
        k = self.mem.k_smem if k is None else k
        if self.p.splits_columns:
            _, columns = self.p.dq_part
            part = plus(times(self.wg, self.p.dq_pieces), piece)
            columns = plgpu.ds(times(part, columns), columns)
            plgpu.wgmma(dq, ds.T, k.at[:, columns])
        else:
            rows = plgpu.ds(times(self.wg, ROWS), ROWS)
            plgpu.wgmma(dq, ds.at[:, rows].T, k)

    def of_dq(self, head, tile) -> tuple[Any, Any, Any]:
        """Returns batch, first row and head of a tile of dQ."""
        row = plus(self.place.q_first, times(tile, self.p.config.block_q))
        return self.place.batch, row, head

    def add_to_dq(self, part, buffer, tile, piece: int = 0, some=None) -> None:
        p, (batch, row, head) = self.p, tile
        number = plus(times(self.wg, p.dq_pieces), piece)
        buffer[...] = part
        plgpu.commit_smem()
        rows, columns = p.dq_part
        column = 0
        if p.splits_columns:
            column = times(number, columns)
        else:
            row = plus(row, times(number, rows))
        if p.packed or p.q_len % p.config.block_q:
            inside = lax.lt(row, np.int32(p.q_len))
            some = inside if some is None else some & inside
        area = batch, plgpu.ds(row, rows), head, plgpu.ds(column, columns)
        plgpu.copy_smem_to_gmem(buffer, self.mem.dq.at[area], some, reduction_op="add")

    # --- elements ---------------------------------------------------------------------

    def factors(self, scores, position, head, tile, masked) -> tuple[Any, Any]:
        """Returns the probabilities of a transposed tile of scores, and factors of dS.

        The factors are the probabilities times the derivative of a soft cap. Both are
        float32: products of rounded ones would be rounded twice.
        """
        p, mem = self.p, self.mem
        _, lse = mem.q_ring.slot(position).buffers
        wide, capped = self.probabilities(
            scores,
            head,
            times(tile, p.config.block_q),
            masked,
            functools.partial(self.of_columns, lse),
            functools.partial(self.bias, position, head),
        )
        if p.has_matrix:
            mem.bias_ring.release(position)
        return wide, wide if capped is None else wide * (1 - capped * capped)

    def bias(self, position, head) -> Any:
        p, mem = self.p, self.mem
        if p.has_matrix:
            tile = mem.bias_ring.take(position).buffers.at[:, self.own].T
            return plgpu.load(tile, layout=LAYOUT, optimized=False)
        if p.bias is None:
            return None
        part = p.bias_part(mem, self.place, head, 0, plgpu.ds(self.row, ROWS))
        shape = ROWS, p.config.block_q
        return lax.broadcast_in_dim(self.loaded(part, 1), shape, (0,))

    def of_columns(self, numbers) -> Any:
        """Returns a number of each row of Q for each element of a transposed tile."""
        values = plgpu.load(numbers, layout=LAYOUT.reduce(0))
        return lax.broadcast_in_dim(values, (ROWS, self.p.config.block_q), (1,))

    def derivatives(self, factors, dp, position) -> Any:
        _, delta = self.mem.do_ring.slot(position).buffers
        dp = dp - self.of_columns(delta)
        return (factors * dp).astype(self.p.dtype)

    def store(self, result, smem, gmem) -> None:
        p, place, first, left = self.p, self.place, self.row, None
        result = result.astype(p.dtype)
        # Of the last tile not every consumer may have rows.
        some = self.row < p.kv_len if p.kv_len % p.block_kv else None
        if p.packed:
            left = p.lengths(self.mem, place.sequence).columns - self.row
            first = plus(self.mem.kv_starts[place.sequence], first)
        rows = gmem.at[place.batch, plgpu.ds(first, ROWS), place.head]
        store_rows(result, smem.at[self.own], rows, left, some)


class Added(NamedTuple):
    """What the step before leaves to be added to dQ.

    Attributes:
      tile: the tile of dQ: batch, first row and head.
      k: the buffer of K.
    """

    tile: tuple[Any, Any, Any]
    k: Any


@dataclasses.dataclass(frozen=True)
class Narrow(Consumer):
    """A consumer that has dK and dV of its rows.

    Attributes:
      count, first: the tiles, and the steps, of a persistent block before this tile.
    """

    count: Any = 0
    first: Any = 0

    @property
    def accumulators(self) -> list[Any]:
        dims = self.p.head_dim, self.p.v_dim
        return [*(plgpu.ACC((ROWS, n)) for n in dims), *[self.scores_type] * 2]

    def run(self) -> None:
        p, mem = self.p, self.mem

        def over_tiles(*accumulators):
            self.start(*accumulators[2:])
            self.for_each_tile(functools.partial(self.step, accumulators))
            return [acc[...] for acc in accumulators[:2]]

        dk, dv = plgpu.run_scoped(over_tiles, *self.accumulators)
        self.store(dv, mem.v_smem, mem.dv)
        if not p.config.deterministic:
            self.finish(jnp.asarray(self.total, jnp.int32))
        # The other consumer's last product reads K.
        plgpu.barrier_arrive_and_wait(mem.together)
        self.store(dk * p.scores.sm_scale, mem.k_smem, mem.dk)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def k(self, count: Any) -> Any:
        return self.k_buffer(self.p.k_buffer(count))

    def k_buffer(self, number: Any) -> Any:
        return self.mem.k_smem.at[number] if self.p.persistent else self.mem.k_smem

    def start(self, scores, dp) -> None:
        """Starts the products of the first step; there is no dS before it."""
        p, mem, zero = self.p, self.mem, jnp.int32(0)
        plgpu.barrier_wait(mem.k_full)
        self.start_scores(scores, zero, self.k(zero))
        plgpu.barrier_wait(mem.v_full)
        self.start_dp(dp, zero)
        if not p.config.deterministic:
            zeros = jnp.zeros((ROWS, p.config.block_q), p.dtype)
            self.shared(jnp.int32(1))[...] = zeros
            plgpu.commit_smem()
            plgpu.barrier_arrive(mem.ds_full)
        plgpu.wgmma_accumulator_load(scores, wait_n=1)

    def step(
        self, accumulators, position, head, tile, masked, last=False, before=None
    ) -> None:
        """Adds a tile of Q to dK and dV, and the one of the step before to dQ.

        It finds the scores complete and dP under way, and leaves those of the next step
        so: ptxas follows no more than that around a loop. The last step of a tile
        starts the next tile if the block is persistent.
        """
        p, mem, (dk, dv, scores, dp) = self.p, self.mem, accumulators
        following, goes_on = plus(position, 1), p.persistent or not last
        shown = plgpu.wgmma_accumulator_load(scores, wait_n=None)
        wide, factors = self.factors(shown, position, head, tile, masked)
        found = wide, factors, wide[:, :ROWS].astype(p.dtype)
        # The exponentials are to be computed while dP is under way.
        wide, factors, narrow = lax.optimization_barrier(found)
        values = dp[...]
        if last and goes_on:
            # A tile has two steps: none reads K of the tile before any more.
            plgpu.barrier_arrive(mem.kv_empty)
        ds = self.start_dv(dv, wide, factors, narrow, values, position)
        plgpu.wgmma(dk, ds, mem.q_ring.slot(position).buffers[0])

        def go_on():
            count = plus(self.count, 1) if last else self.count
            if last:
                plgpu.barrier_wait(mem.k_full)
            self.restart(self.start_scores, scores, following, self.k(count))

        if not p.config.deterministic:
            self.visit_dq(ds, position, before, go_on if goes_on else None)
        elif goes_on:
            go_on()
            plgpu.wgmma_wait(1)
            self.release(position)
        if goes_on:
            if last:
                plgpu.barrier_wait(mem.v_full)
            self.restart(self.start_dp, dp, following)
            plgpu.wgmma_accumulator_load(scores, wait_n=1)

    def start_dv(self, dv, wide, factors, narrow, dp, position) -> Any:
        """Starts dV, and returns dS, in parts of 64 rows of Q.

        Registers do not hold all probabilities both rounded and not, beside dP.

        Args:
          wide, narrow: the probabilities, and the first part of them, rounded.
        """
        p, parts = self.p, []
        do, delta = self.mem.do_ring.slot(position).buffers
        for first in range(0, p.config.block_q, ROWS):
            part = slice(first, first + ROWS)
            if first > 0:
                narrow = wide[:, part].astype(p.dtype)
            plgpu.wgmma(dv, narrow, do.at[plgpu.ds(first, ROWS)])
            # Under Lane a part of what is repeated keeps a layout that is named.
            less = plgpu.layout_cast(self.of_columns(delta), LAYOUT)[:, part]
            less = dp[:, part] - less
            parts.append((factors[:, part] * less).astype(p.dtype))
        return lax.concatenate(parts, 1)

    def release(self, position) -> None:
        self.mem.q_ring.release(position)
        if not self.p.persistent:
            self.mem.do_ring.release(position)

    # --- dQ ---------------------------------------------------------------------------
    # It needs the dS of the other consumer. Each step adds the tile before its own, so
    # that it seldom waits. The first one adds nothing; its dS are zeros.

    def shared(self, position) -> Any:
        """Its rows of the buffer of a step's dS."""
        return self.buffer(position).at[self.own]

    def buffer(self, position) -> Any:
        return self.mem.ds_smem.at[lax.rem(position, np.int32(2))]

    def visit_dq(self, ds, position, before, go_on) -> None:
        """Adds the tile of the step before to dQ, and calls `go_on` meanwhile."""
        # dS of the step before are there, and those before them are not read any more.
        plgpu.barrier_wait(self.mem.ds_full)
        self.shared(position)[...] = ds
        plgpu.commit_smem()

        def compute(dq):
            k = self.mem.k_smem if before is None else self.k_buffer(before.k)
            self.start_dq(dq, self.buffer(plus(position, 1)), k=k)
            # The left operands of dK and dV are registers: they are free now.
            plgpu.wgmma_wait(1)
            if go_on is None:
                return dq[...]
            go_on()
            return plgpu.wgmma_accumulator_load(dq, wait_n=1)

        part = plgpu.run_scoped(compute, plgpu.ACC(self.p.dq_part))
        plgpu.barrier_arrive(self.mem.ds_full)
        self.release(position)
        self.add(part, position, before)

    def visited(self, position) -> tuple[Any, Any]:
        past = minus(position, self.first) if self.p.persistent else position
        return self.p.visited(self.place, self.blocks, past)

    def left_by(self, position) -> Added:
        return Added(self.of_dq(*self.visited(position)), self.p.k_buffer(self.count))

    def add(self, part, position, before: Added | None) -> None:
        """Starts the addition of the part of the step before, if there is one."""
        before = before or self.left_by(plus(position, -1))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        some = lax.gt(position, np.int32(0))
        self.add_to_dq(part, self.mem.dq_smem.at[self.wg], before.tile, some=some)

    def finish(self, end, before: Added | None = None) -> None:
        def last(dq):
            plgpu.barrier_wait(self.mem.ds_full)
            k = self.mem.k_smem if before is None else self.k_buffer(before.k)
            self.start_dq(dq, self.buffer(plus(end, 1)), k=k)
            return dq[...]

        self.add(plgpu.run_scoped(last, plgpu.ACC(self.p.dq_part)), end, before)

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
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.ops import integers
from pallas_gpu.ops.flash.backward.config import ROWS
from pallas_gpu.ops.flash.backward.problem import BackwardProblem, Inputs, Place
from pallas_gpu.ops.flash.masks import Blocks, Lengths

# Rows that are stored without TMA at a time: those of a tile of the swizzle.
_STORED = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory(Inputs):
    """The references of a block."""

    dk: Any
    dv: Any
    k_smem: Any
    v_smem: Any
    q_smem: Any
    do_smem: Any
    lse_smem: Any
    delta_smem: Any
    k_full: Any
    v_full: Any
    q_full: Any
    do_full: Any
    q_empty: Any
    do_empty: Any = None
    together: Any = None
    ds_smem: Any = None
    dq_smem: Any = None
    q_dq: Any = None
    do_dq: Any = None
    p_full: Any = None
    ds_full: Any = None
    dq: Any = None
    bias_smem: Any = None
    bias_full: Any = None
    bias_empty: Any = None
    kv_empty: Any = None
    results_smem: Any = None


@dataclasses.dataclass(frozen=True)
class Consumer:
    """A consumer warpgroup: its number, and the block's tile of K and V.

    Attributes:
      blocks: the tiles of Q that it visits.
    """

    p: BackwardProblem
    mem: Memory
    wg: Any
    place: Place
    blocks: Blocks

    @property
    def kv_head(self) -> Any:
        return self.place.head

    @property
    def kv_start(self) -> Any:
        """The first row of the tile, counted in its sequence."""
        return self.place.start

    def run(self) -> None:
        """Computes and stores its derivatives."""
        raise NotImplementedError

    @property
    def row(self) -> Any:
        """The first of its rows of K and V, in the block."""
        return 0 if self.p.wide else integers.times(self.wg, ROWS)

    @property
    def own(self) -> Any:
        """Its rows of the tile of K and V."""
        return plgpu.ds(self.row, ROWS)

    @property
    def scores_type(self) -> Any:
        return plgpu.ACC((ROWS, self.p.config.block_q))

    def slot(self, position) -> Any:
        return lax.rem(position, np.int32(self.p.config.stages))

    def for_each_tile(self, step: Any) -> None:
        """Calls `step(position, head, tile, masked, last=False)` for the tiles of Q.

        The last tile comes first, and heads before tiles: blocks that differ in their
        first tile visit the others at the same time, and share them in the L2 cache.
        """
        p, blocks = self.p, self.blocks
        last = jnp.int32(integers.plus(self.total, -1))

        def one(position, masked, **options):
            member, tile = p.visited(blocks, position)
            head = integers.plus(integers.times(self.kv_head, p.group), member)
            step(position, head, tile, masked, **options)

        for first, end, masked in (
            (blocks.end_whole, blocks.end, True),
            (blocks.first_whole, blocks.end_whole, False),
            (blocks.first, blocks.first_whole, True),
        ):
            if first is end:
                continue
            past = [integers.minus(blocks.end, x) for x in (end, first)]
            bounds = [
                jnp.minimum(jnp.int32(integers.times(x, p.group)), last) for x in past
            ]
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
        mem, slot = self.mem, self.slot(position)
        k = mem.k_smem if k is None else k
        plgpu.barrier_wait(mem.q_full.at[slot])
        plgpu.wgmma(scores, k.at[self.own], mem.q_smem.at[slot].T)

    def start_dp(self, dp, position) -> None:
        mem, slot = self.mem, self.slot(position)
        plgpu.barrier_wait(mem.do_full.at[slot])
        plgpu.wgmma(dp, mem.v_smem.at[self.own], mem.do_smem.at[slot].T)

    def restart(self, start, acc, position, *operands) -> None:
        """Starts a product of its own in an accumulator whose values have been read."""
        acc[...] = jnp.zeros(acc.shape, acc.dtype)
        start(acc, position, *operands)

    def release(self, slot) -> None:
        plgpu.barrier_arrive(self.mem.q_empty.at[slot])
        plgpu.barrier_arrive(self.mem.do_empty.at[slot])

    def start_dq(self, dq, ds, piece: int = 0, k=None) -> None:
        """Starts its part of dS @ K."""
        k = self.mem.k_smem if k is None else k
        if self.p.splits_columns:
            _, columns = self.p.dq_part
            part = integers.plus(integers.times(self.wg, self.p.dq_pieces), piece)
            columns = plgpu.ds(integers.times(part, columns), columns)
            plgpu.wgmma(dq, ds.T, k.at[:, columns])
        else:
            rows = plgpu.ds(integers.times(self.wg, ROWS), ROWS)
            plgpu.wgmma(dq, ds.at[:, rows].T, k)

    def add_to_dq(self, part, buffer, head, tile, piece: int = 0, some=None) -> None:
        """Starts the addition of its part to dQ in GMEM, through SMEM."""
        first = integers.times(tile, self.p.config.block_q)
        row = integers.plus(self.place.q_first, first)
        self.add_at(part, buffer, (self.place.batch, row, head), piece, some)

    def add_at(self, part, buffer, tile, piece: int = 0, some=None) -> None:
        """Starts that addition of a tile: one of a batch, a first row and a head."""
        p, (batch, row, head) = self.p, tile
        number = integers.plus(integers.times(self.wg, p.dq_pieces), piece)
        buffer[...] = part
        plgpu.commit_smem()
        rows, columns = p.dq_part
        column = 0
        if p.splits_columns:
            column = integers.times(number, columns)
        else:
            row = integers.plus(row, integers.times(number, rows))
        if p.packed or p.q_len % p.config.block_q:
            inside = lax.lt(row, np.int32(p.q_len))
            some = inside if some is None else some & inside
        area = batch, plgpu.ds(row, rows), head, plgpu.ds(column, columns)
        plgpu.copy_smem_to_gmem(buffer, self.mem.dq.at[area], some, reduction_op="add")

    # --- elements ---------------------------------------------------------------------

    def probabilities(self, scores, position, head, tile, masked) -> tuple[Any, Any]:
        """Returns those of a transposed tile of scores, and the factors of dS.

        Both have the type of the operands. The factors are the probabilities times the
        derivative of a soft cap.
        """
        p, capped = self.p, None
        row = integers.plus(self.kv_start, self.row)
        column = integers.times(tile, p.config.block_q)
        # Loaded again: with fewer values around the loop, registers suffice.
        lengths = Lengths(*reversed(p.lengths(self.mem, self.place.sequence)))
        mask = p.mask.transposed
        if p.scores.modifies:
            distance = integers.plus(integers.minus(row, column), mask.shift(lengths))
            bias, slope = self.bias(position, head), self.slope(head)
            scores, capped = p.scores.modified(
                scores, distance, bias, slope, keeps_capped=True
            )
        if masked:
            place = p.scores.hidden, lengths, row, column
            ids = self.ids(row, column) if mask.segments else None
            scores = mask.hide(scores, *place, ids, hides_rows=p.has_tail)
        lse = self.of_columns(self.mem.lse_smem, position)
        wide = jnp.exp2(scores * p.scores.factor - lse)
        if p.has_matrix:
            slot = lax.rem(position, np.int32(p.bias_stages))
            plgpu.barrier_arrive(self.mem.bias_empty.at[slot])
        narrow = wide.astype(p.dtype)
        if capped is None:
            return narrow, narrow
        return narrow, (wide * (1 - capped * capped)).astype(p.dtype)

    def ids(self, row, column) -> tuple[Any, Any]:
        """Returns the segments of rows of K and V, and of Q."""
        mem, layout = self.mem, plgpu.Layout.WGMMA
        sizes = ROWS, self.p.config.block_q
        return tuple(  # type: ignore[return-value]
            plgpu.load(
                ids.at[self.place.batch, plgpu.ds(start, size)],
                layout=layout.reduce(axis),
                optimized=False,
            )
            for ids, start, size, axis in (
                (mem.kv_ids, row, sizes[0], 1),
                (mem.q_ids, column, sizes[1], 0),
            )
        )

    def bias(self, position, head) -> Any:
        """Returns that of a transposed tile of scores, if there is one."""
        p, mem, layout = self.p, self.mem, plgpu.Layout.WGMMA
        if p.bias is None:
            return None
        if not p.has_matrix:
            rows = plgpu.ds(integers.plus(self.kv_start, self.row), ROWS)
            part = p.bias_part(mem.bias, self.place, head, 0, rows)
            values = plgpu.load(part, layout=layout.reduce(1), optimized=False)
            return lax.broadcast_in_dim(values, (ROWS, p.config.block_q), (0,))
        slot = lax.rem(position, np.int32(p.bias_stages))
        plgpu.barrier_wait(mem.bias_full.at[slot])
        tile = mem.bias_smem.at[slot, :, self.own].T
        return plgpu.load(tile, layout=layout, optimized=False)

    def slope(self, head) -> Any:
        """Returns that of ALiBi of a head of Q, if there is one."""
        slopes = self.mem.slopes
        if slopes is None:
            return None
        return slopes[self.place.sequence if slopes.shape[0] > 1 else 0, head]

    def of_columns(self, ring, position) -> Any:
        """Returns a number of each row of Q for each element of a transposed tile."""
        layout = plgpu.Layout.WGMMA.reduce(0)
        values = plgpu.load(ring.at[self.slot(position)], layout=layout)
        return lax.broadcast_in_dim(values, (ROWS, self.p.config.block_q), (1,))

    def derivatives(self, factors, dp, position) -> Any:
        """Returns dS transposed, of the scaled scores."""
        dp = dp - self.of_columns(self.mem.delta_smem, position)
        return (factors.astype(jnp.float32) * dp).astype(self.p.dtype)

    def store(self, result, smem, gmem) -> None:
        """Starts the copy of its rows of a result, through SMEM, to GMEM."""
        p, place = self.p, self.place
        row, result = integers.plus(self.kv_start, self.row), result.astype(p.dtype)
        if p.packed:
            lengths = p.lengths(self.mem, place.sequence)
            first = integers.plus(self.mem.kv_starts[place.sequence], row)
            left = lengths.columns - row
            rows = gmem.at[place.batch, plgpu.ds(first, ROWS), place.head]
            store_some(result, left, smem.at[self.own], rows)
            return
        buffer = smem.at[self.own]
        buffer[...] = result
        plgpu.commit_smem()
        # Of the last tile not every consumer may have rows.
        some = row < p.kv_len if p.kv_len % p.block_kv else None
        rows = plgpu.ds(row, ROWS)
        plgpu.copy_smem_to_gmem(buffer, gmem.at[place.batch, rows, place.head], some)


def store_some(result: Any, left: Any, buffer: Any, rows: Any) -> None:
    """Stores the first `left` rows of a tile, through SMEM; by TMA if that is all.

    TMA would also write the first rows of the next sequence.
    """
    buffer[...] = result
    plgpu.commit_smem()
    whole = left >= ROWS

    @plgpu.when(whole)
    def _():
        plgpu.copy_smem_to_gmem(buffer, rows)

    @plgpu.when(jnp.logical_not(whole))
    def _():
        # Few rows at a time, for few registers.
        @plgpu.loop(0, ROWS // _STORED)
        def _(i):
            start = integers.times(i, _STORED)
            part = plgpu.ds(start, _STORED)
            values = buffer[part]
            row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0)
            plgpu.store(rows, part, values, mask=row < left - start)


class Narrow(Consumer):
    """A consumer that has dK and dV of its rows."""

    def run(self) -> None:
        """Computes and stores its rows of dK and dV."""
        p, mem = self.p, self.mem

        def over_tiles(dk, dv, scores, dp):
            plgpu.barrier_wait(mem.k_full)
            self.start_scores(scores, jnp.int32(0))
            plgpu.barrier_wait(mem.v_full)
            self.start_dp(dp, jnp.int32(0))
            if not p.config.deterministic:
                self.shared(jnp.int32(1))[...] = jnp.zeros(
                    (ROWS, p.config.block_q), p.dtype
                )
                plgpu.commit_smem()
                plgpu.barrier_arrive(mem.ds_full)
            plgpu.wgmma_accumulator_load(scores, wait_n=1)
            self.for_each_tile(functools.partial(self.step, dk, dv, scores, dp))
            return dk[...], dv[...]

        accumulators = [plgpu.ACC((ROWS, n)) for n in (p.head_dim, p.v_head_dim)]
        accumulators += [self.scores_type, self.scores_type]
        dk, dv = plgpu.run_scoped(over_tiles, *accumulators)
        self.store(dv, mem.v_smem, mem.dv)
        if not p.config.deterministic:
            self.finish_dq()
        # The other consumer's last product reads K.
        plgpu.barrier_arrive_and_wait(mem.together)
        self.store(dk * p.scores.sm_scale, mem.k_smem, mem.dk)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def step(
        self, dk, dv, scores, dp, position, head, tile, masked, last=False
    ) -> None:
        """Adds a tile of Q to dK and dV, and the one before it to dQ.

        It finds the scores complete and dP under way, and leaves those of the next tile
        so: ptxas follows no more than that around a loop.
        """
        p, mem = self.p, self.mem
        slot, following = self.slot(position), integers.plus(position, 1)
        shown = plgpu.wgmma_accumulator_load(scores, wait_n=None)
        found = self.probabilities(shown, position, head, tile, masked)
        # The exponentials are to be computed while dP is under way.
        probabilities, factors = lax.optimization_barrier(found)
        values = dp[...]
        plgpu.wgmma(dv, probabilities, mem.do_smem.at[slot])

        ds = self.derivatives(factors, values, position)
        plgpu.wgmma(dk, ds, mem.q_smem.at[slot])
        if not p.config.deterministic:
            self.visit_dq(ds, scores, position, slot, last)
        elif not last:
            self.restart(self.start_scores, scores, following)
            plgpu.wgmma_wait(1)
            self.release(slot)
        if not last:
            self.restart(self.start_dp, dp, following)
            plgpu.wgmma_accumulator_load(scores, wait_n=1)

    # --- dQ ---------------------------------------------------------------------------
    # It needs the dS of the other consumer. Each step adds the tile before its own, so
    # that it seldom waits. The first one adds nothing; its dS are zeros.

    def shared(self, position) -> Any:
        """Its rows of the buffer of a step's dS."""
        return self.buffer(position).at[self.own]

    def buffer(self, position) -> Any:
        """The buffer of a step's dS."""
        return self.mem.ds_smem.at[lax.rem(position, np.int32(2))]

    def visit_dq(self, ds, scores, position, slot, last) -> None:
        """Adds the tile before its own to dQ, and starts the next scores."""
        p, mem = self.p, self.mem
        following = integers.plus(position, 1)
        # dS of the step before are there, and those before them are not read any more.
        plgpu.barrier_wait(mem.ds_full)
        self.shared(position)[...] = ds
        plgpu.commit_smem()

        def compute(dq):
            self.start_dq(dq, self.buffer(following))
            # The left operands of dK and dV are registers: they are free now.
            plgpu.wgmma_wait(1)
            if last:
                return dq[...]
            self.restart(self.start_scores, scores, following)
            return plgpu.wgmma_accumulator_load(dq, wait_n=1)

        part = plgpu.run_scoped(compute, plgpu.ACC(p.dq_part))
        plgpu.barrier_arrive(mem.ds_full)
        self.release(slot)
        self.add_before(part, position)

    def add_before(self, part, position) -> None:
        """Starts the addition of the tile before the one at a position."""
        p, mem = self.p, self.mem
        member, tile = p.visited(self.blocks, integers.plus(position, -1))
        head = integers.plus(integers.times(self.kv_head, p.group), member)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        buffer, some = mem.dq_smem.at[self.wg], lax.gt(position, np.int32(0))
        self.add_to_dq(part, buffer, head, tile, some=some)

    def finish_dq(self) -> None:
        """Adds the last tile to dQ."""
        total = jnp.asarray(self.total, jnp.int32)

        def last(dq):
            plgpu.barrier_wait(self.mem.ds_full)
            self.start_dq(dq, self.buffer(integers.plus(total, 1)))
            return dq[...]

        part = plgpu.run_scoped(last, plgpu.ACC(self.p.dq_part))
        self.add_before(part, total)

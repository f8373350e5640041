# SPDX-License-Identifier: Apache-2.0
"""Attention's derivative of Q alone: a block has rows of Q, and the sums have an order.

It is the second kernel of a deterministic backward pass; `hopper` computes the
other derivatives. A block has one producer, which copies blocks of K and V into two
rings, and two consumers with 64 rows of Q each:

    S = Q @ K.T    dP = dO @ V.T    dS = P * (dP - D)    dQ += dS @ K
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
from pallas_gpu.ops.flash.backward.consumers import store_some
from pallas_gpu.ops.flash.backward.problem import (
    BackwardProblem,
    Inputs,
    Place,
    blocks_of,
    divide,
    launch,
)
from pallas_gpu.ops.tiles import tiles

BLOCK_Q, BLOCK_KV = CONSUMERS * ROWS, 64


@functools.lru_cache(maxsize=64)
def make_kernel(p: BackwardProblem, compiler_params: Any, interpret: Any) -> Any:
    """Returns the function of the problem's inputs; it returns dQ."""
    # Wide rows of Q and dO leave room for one block of K and V.
    stages = 1 if p.wide else 2
    full = plgpu.Barrier(num_barriers=stages)
    empty = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages)
    scratch: dict[str, Any] = {
        "q_smem": tiles((BLOCK_Q, p.head_dim), p.dtype),
        "do_smem": tiles((BLOCK_Q, p.v_head_dim), p.dtype),
        "k_smem": tiles((stages, BLOCK_KV, p.head_dim), p.dtype),
        "v_smem": tiles((stages, BLOCK_KV, p.v_head_dim), p.dtype),
        "q_full": plgpu.Barrier(num_arrivals=2),
        "k_full": full,
        "v_full": full,
        "k_empty": empty,
        "v_empty": empty,
    }
    if p.has_matrix:
        shape: tuple[int, ...] = (p.bias_stages, BLOCK_Q, BLOCK_KV)
        scratch["bias_smem"] = tiles(shape, p.bias_dtype)
        scratch |= {"bias_full": full, "bias_empty": empty}
    shape = p.batch, p.q_len, p.heads, p.head_dim
    return launch(
        functools.partial(_body, p, stages),
        jax.ShapeDtypeStruct(shape, p.dtype),
        scratch,
        blocks=p.batch * p.heads * p.tiles_of(p.q_len, BLOCK_Q),
        name="attention_backward_queries",
        compiler_params=compiler_params,
        interpret=interpret,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Memory(Inputs):
    """The references of a block."""

    dq: Any
    q_smem: Any
    do_smem: Any
    k_smem: Any
    v_smem: Any
    q_full: Any
    k_full: Any
    v_full: Any
    k_empty: Any
    v_empty: Any
    bias_smem: Any = None
    bias_full: Any = None
    bias_empty: Any = None


def _body(p: BackwardProblem, stages: int, *refs: Any, **scratch: Any) -> None:
    wg = lax.axis_index("wg")
    *inputs, dq = refs
    mem = _Memory(**dict(zip(p.inputs, inputs, strict=True)), dq=dq, **scratch)
    q_tiles = p.tiles_of(p.q_len, BLOCK_Q)
    pair, tile = divide(lax.axis_index("block"), q_tiles)
    # Under a causal mask the last rows have the most work.
    tile = integers.minus(q_tiles - 1, tile)
    place = p.place(mem, *divide(pair, p.heads), tile, BLOCK_Q)
    blocks = p.mask.blocks(place.lengths, place.start, BLOCK_Q, BLOCK_KV)
    if p.mask.segments:
        blocks = blocks.within(blocks_of(mem.of_segments.at[place.batch, tile]))

    def produce() -> None:
        _produce(p, mem, stages, place, blocks)

    def consume() -> None:
        _Consumer(p, mem, wg, place, stages).run(blocks)

    roles.split(wg, CONSUMERS, REGISTERS, produce, consume)


def _produce(
    p: BackwardProblem, mem: _Memory, stages: int, place: Place, blocks: Any
) -> None:
    kv_head = lax.div(place.head, np.int32(p.group))
    mode = plgpu.OOBFillMode.ZEROS if p.packed else None
    load = functools.partial(plgpu.copy_gmem_to_smem, oob_mode=mode)
    first = integers.plus(place.q_first, place.start)
    part = place.batch, plgpu.ds(first, BLOCK_Q), place.head
    load(mem.q.at[part], mem.q_smem, mem.q_full)
    load(mem.do.at[part], mem.do_smem, mem.q_full)

    @plgpu.loop(blocks.first, blocks.end)
    def _(block):
        position = integers.minus(block, blocks.first)
        slot = lax.rem(position, np.int32(stages))
        first = integers.plus(place.kv_first, integers.times(block, BLOCK_KV))
        columns = plgpu.ds(first, BLOCK_KV)
        part = place.batch, columns, kv_head
        copies = [
            (mem.k.at[part], mem.k_smem, mem.k_full, mem.k_empty),
            (mem.v.at[part], mem.v_smem, mem.v_full, mem.v_empty),
        ]
        if p.has_matrix:
            rows = plgpu.ds(place.start, BLOCK_Q)
            of_bias = p.bias_part(mem.bias, place, place.head, rows, columns)
            copies.insert(0, (of_bias, mem.bias_smem, mem.bias_full, mem.bias_empty))
        for source, ring, full, empty in copies:

            @plgpu.when(lax.ge(position, np.int32(stages)))
            def _(empty=empty):
                plgpu.barrier_wait(empty.at[slot])

            load(source, ring.at[slot], full.at[slot])


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of Q of one consumer warpgroup."""

    p: BackwardProblem
    mem: Any
    wg: Any
    place: Place

    @property
    def own(self) -> Any:
        """Its rows of the tile of Q."""
        return plgpu.ds(integers.times(self.wg, ROWS), ROWS)

    @property
    def row(self) -> Any:
        """The first of its rows, counted in the sequence."""
        return integers.plus(self.place.start, integers.times(self.wg, ROWS))

    def of_rows(self, ref) -> Any:
        """Returns a number of each row, for each element of a tile."""
        p = self.p
        first = integers.plus(self.place.q_first, self.row)
        if p.packed:
            # Tiles without rows may lie behind the end.
            first = integers.minimum(first, p.padded_q_len - ROWS)
        layout = plgpu.Layout.WGMMA.reduce(1)
        part = ref.at[self.place.batch, self.place.head, plgpu.ds(first, ROWS)]
        values = plgpu.load(part, layout=layout, optimized=False)
        return lax.broadcast_in_dim(values, (ROWS, BLOCK_KV), (0,))

    def probabilities(self, scores, column, masked, lse, bias=None) -> tuple[Any, Any]:
        """Returns those of a tile, and tanh of scores with a soft cap, or None.

        Args:
          column: the first one, counted in the sequence.
          bias: a block of it in SMEM, if it is a matrix.
        """
        p, place, capped = self.p, self.place, None
        lengths = place.lengths
        if p.scores.modifies:
            distance = integers.plus(
                integers.minus(self.row, column), p.mask.shift(lengths)
            )
            slope = None
            if (slopes := self.mem.slopes) is not None:
                slope = slopes[place.sequence if slopes.shape[0] > 1 else 0, place.head]
            scores, capped = p.scores.modified(
                scores, distance, self.bias(column, bias), slope, keeps_capped=True
            )
        if masked:
            where = p.scores.hidden, lengths, self.row, column
            ids = self.ids(column) if p.mask.segments else None
            scores = p.mask.hide(scores, *where, ids)
        return jnp.exp2(scores * p.scores.factor - lse), capped

    def bias(self, column, block) -> Any:
        """Returns that of a tile, or of its columns, if there is one."""
        p, layout = self.p, plgpu.Layout.WGMMA
        if block is not None:
            return plgpu.load(block.at[self.own], layout=layout)
        if p.bias is None:
            return None
        columns = plgpu.ds(column, BLOCK_KV)
        part = p.bias_part(self.mem.bias, self.place, self.place.head, 0, columns)
        return plgpu.load(part, layout=layout.reduce(0), optimized=False)

    def ids(self, column) -> tuple[Any, Any]:
        """Returns the segments of its rows of Q, and of those of K and V."""
        layout, mem = plgpu.Layout.WGMMA, self.mem
        of_rows = mem.q_ids.at[self.place.batch, plgpu.ds(self.row, ROWS)]
        of_columns = mem.kv_ids.at[self.place.batch, plgpu.ds(column, BLOCK_KV)]
        return (
            plgpu.load(of_rows, layout=layout.reduce(1), optimized=False),
            plgpu.load(of_columns, layout=layout.reduce(0), optimized=False),
        )


@dataclasses.dataclass(frozen=True)
class _Consumer(Rows):
    """What one consumer warpgroup does."""

    stages: int

    def run(self, blocks: Any) -> None:
        """Computes and stores its rows of dQ."""
        p, mem = self.p, self.mem
        lse, delta = self.of_rows(mem.lse), self.of_rows(mem.delta)

        def over_blocks(dq):
            plgpu.barrier_wait(mem.q_full)

            def step(block, masked):
                position = integers.minus(block, blocks.first)
                self.step(dq, position, block, masked, lse, delta)

            for first, end, masked in (
                (blocks.first, blocks.first_whole, True),
                (blocks.first_whole, blocks.end_whole, False),
                (blocks.end_whole, blocks.end, True),
            ):
                if first is not end:
                    plgpu.loop(first, end)(functools.partial(step, masked=masked))
            return dq[...]

        dq = plgpu.run_scoped(over_blocks, plgpu.ACC((ROWS, p.head_dim)))
        place, buffer = self.place, mem.q_smem.at[self.own]
        result = (dq * p.scores.sm_scale).astype(p.dtype)
        first = integers.plus(place.q_first, self.row)
        target = mem.dq.at[place.batch, plgpu.ds(first, ROWS), place.head]
        if p.packed:
            store_some(result, place.lengths.rows - self.row, buffer, target)
        else:
            buffer[...] = result
            plgpu.commit_smem()
            some = self.row < p.q_len if p.q_len % BLOCK_Q else None
            plgpu.copy_smem_to_gmem(buffer, target, some)
        plgpu.wait_smem_to_gmem(0)

    def step(self, dq, position, block, masked, lse, delta) -> None:
        """Adds a block of K and V to dQ."""
        p, mem = self.p, self.mem
        slot = lax.rem(position, np.int32(self.stages))

        def derivatives(scores, dp):
            plgpu.barrier_wait(mem.k_full.at[slot])
            plgpu.wgmma(scores, mem.q_smem.at[self.own], mem.k_smem.at[slot].T)
            if p.wide and p.has_matrix:
                # Registers do not hold both products and a block of the bias.
                factors = self.factors(scores[...], position, block, masked, lse)
                self.start_dp(dp, slot)
            else:
                self.start_dp(dp, slot)
                shown = plgpu.wgmma_accumulator_load(scores, wait_n=1)
                factors = self.factors(shown, position, block, masked, lse)
            ds = factors.astype(jnp.float32) * (dp[...] - delta)
            return ds.astype(p.dtype)

        tile = plgpu.ACC((ROWS, BLOCK_KV))
        ds = plgpu.run_scoped(derivatives, tile, tile)
        plgpu.barrier_arrive(mem.v_empty.at[slot])
        plgpu.wgmma(dq, ds, mem.k_smem.at[slot])
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(mem.k_empty.at[slot])

    def start_dp(self, dp, slot) -> None:
        mem = self.mem
        plgpu.barrier_wait(mem.v_full.at[slot])
        plgpu.wgmma(dp, mem.do_smem.at[self.own], mem.v_smem.at[slot].T)

    def factors(self, scores, position, block, masked, lse) -> Any:
        """Returns the probabilities of a tile, times the derivative of a soft cap."""
        p, mem, of_bias = self.p, self.mem, None
        slot = lax.rem(position, np.int32(self.stages))
        if p.has_matrix:
            plgpu.barrier_wait(mem.bias_full.at[slot])
            of_bias = mem.bias_smem.at[slot]
        column = integers.times(block, BLOCK_KV)
        probabilities, capped = self.probabilities(scores, column, masked, lse, of_bias)
        if p.has_matrix:
            plgpu.barrier_arrive(mem.bias_empty.at[slot])
        if capped is not None:
            probabilities = probabilities * (1 - capped * capped)
        # Rounded, as the other kernel's are.
        return probabilities.astype(p.dtype)

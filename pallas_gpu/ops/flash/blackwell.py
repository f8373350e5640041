# SPDX-License-Identifier: Apache-2.0
"""The kernel of attention for Blackwell, forward: two query tiles take turns.

A block computes two tiles of 128 query rows. Scores, probabilities and results are in
tensor memory, separate for each tile. A block has three warpgroups:

    softmax 0, 1   the softmax of a tile's scores, one row per thread; the correction of
                   its result where a maximum has grown; the result at the end
    issuers        one warp copies Q and two rings of blocks of K and V by TMA, another
                   starts all products

While one tile's softmax is computed, the tensor core works for the other. They meet at
barriers, each of which has one for each tile, or for each buffer of a ring:

    barrier       completes when                                   releases
    scores_full   the scores of a block are complete               softmax
    ready         the scores have been read, the probabilities     the products
                  stored, and the result has been corrected
    result_full   probabilities times V has been added             softmax
    k_full, ...   TMA has filled a buffer                          the products
    k_empty, ...  the products of both tiles have read it          TMA

The scores of the next block are started before the probabilities times V of this one,
so that softmax need not wait for the latter before it begins. As in the kernel for
Hopper, blocks of K and V are visited from the last to the first.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.ops.flash.config import (
    BLACKWELL_ROWS,
    BLACKWELL_TILES,
    BlackwellAttentionConfig,
)
from pallas_gpu.ops.flash.problem import Problem, Tile, launch
from pallas_gpu.ops.flash.softmax import Softmax
from pallas_gpu.ops.memory import Memory
from pallas_gpu.ops.rules import cached
from pallas_gpu.ops.tiles import tiles

_ISSUERS = BLACKWELL_TILES
_TMA_WARP, _MMA_WARP = 0, 1
# Registers per thread: (2 * 216 + 72) * 128 threads use 64512 of an SM's 65536. Other
# splits spill a few words in ptxas 13.0, as does a tile that the roles share.
_ISSUER_REGISTERS, _SOFTMAX_REGISTERS = 72, 216
# One row per thread: maxima and sums of rows need no other thread. Eight elements of 16
# bits are the widest access to SMEM.
_ROW_PER_THREAD = plgpu.Layout.TCGEN05_TMEM_NATIVE(8)
# Columns of the result that are corrected at once, and stored at once: they bound the
# registers. The latter are the columns of a swizzled tile.
_CORRECTED, _STORED = 32, 64


@cached
def make_kernel(p: Problem[BlackwellAttentionConfig]) -> Any:
    c = p.config
    ring = plgpu.Ring(
        tiles((c.stages, c.block_kv, p.head_dim), p.dtype),
        plgpu.Barrier(num_barriers=c.stages, orders_tensor_core=True),
        plgpu.Barrier(num_barriers=c.stages),
    )
    of_tiles = plgpu.Barrier(num_barriers=BLACKWELL_TILES, orders_tensor_core=True)
    rows = BLACKWELL_TILES, BLACKWELL_ROWS
    scratch = {
        "q_smem": tiles((c.block_q, p.head_dim), p.dtype),
        "k_ring": ring,
        "v_ring": ring,
        "scores": plgpu.TMEM((*rows, c.block_kv), jnp.float32),
        "probabilities": plgpu.TMEM((*rows, c.block_kv), p.dtype, packed=True),
        "result": plgpu.TMEM((*rows, p.head_dim), jnp.float32),
        "q_full": plgpu.Barrier(),
        "scores_full": of_tiles,
        "ready": of_tiles,
        "result_full": of_tiles,
    }
    body = functools.partial(_body, p)
    return launch(
        *(p, "attention", body, ("q", "k", "v"), p.results, scratch),
        grid={"block": p.tiles},
        warpgroups=BLACKWELL_TILES + 1,
    )


def _body(p: Problem, mem: Memory) -> None:
    wg = lax.axis_index("wg")

    def work():
        batch, head, number = p.place(lax.axis_index("block"))
        tile = Tile(batch, batch, head, number * p.config.block_q, p.lengths())
        steps = p.blocks(tile).end
        if isinstance(steps, int):
            # The compiler would unroll a constant number of steps, and spill.
            steps = lax.optimization_barrier(jnp.int32(steps))
        return tile, steps

    @plgpu.when(wg == _ISSUERS)
    def _():
        plgpu.set_max_registers(_ISSUER_REGISTERS, action="decrease")
        tile, steps = work()

        @plgpu.warp_map
        def _(warp):
            plgpu.when(warp == _TMA_WARP)(lambda: _copy(p, mem, tile, steps))
            plgpu.when(warp == _MMA_WARP)(lambda: _multiply(mem, steps))

    @plgpu.when(wg < _ISSUERS)
    def _():
        plgpu.set_max_registers(_SOFTMAX_REGISTERS, action="increase")
        _Softmax(p, mem, wg).visit(*work())


# --- the issuers ----------------------------------------------------------------------


def _copy(p: Problem, mem: Memory, tile: Any, steps: Any) -> None:
    c = p.config
    batch, head, q_start = tile.batch, tile.head, tile.start
    kv_head = lax.div(head, np.int32(p.heads // p.kv_heads))
    rows = plgpu.ds(q_start, c.block_q)
    plgpu.copy_gmem_to_smem(mem.q.at[batch, rows, head], mem.q_smem, mem.q_full)

    def copy(source, ring, step):
        slot = ring.fill(step)
        rows = plgpu.ds((steps - 1 - step) * c.block_kv, c.block_kv)
        part = source.at[batch, rows, kv_head]
        plgpu.copy_gmem_to_smem(part, slot.buffers, slot.full)

    copy_k = functools.partial(copy, mem.k, mem.k_ring)
    copy_v = functools.partial(copy, mem.v, mem.v_ring)
    copy_k(jnp.int32(0))

    # Of a count that may be negative LLVM makes another loop; ptxas then spills values
    # of the consumers.
    @plgpu.loop(0, lax.max(steps - 1, np.int32(0)))
    def _(step):
        copy_k(step + 1)
        copy_v(step)

    copy_v(jnp.asarray(steps - 1, jnp.int32))


def _multiply(mem: Memory, steps: Any) -> None:
    def buffers_of(ring, tile, step):
        return (ring.take if tile == 0 else ring.slot)(step).buffers

    def start_scores(tile, step):
        k = buffers_of(mem.k_ring, tile, step)
        rows = mem.q_smem.at[plgpu.ds(tile * BLACKWELL_ROWS, BLACKWELL_ROWS)]
        full = mem.scores_full.at[tile]
        plgpu.tcgen05_mma(mem.scores.at[tile], rows, k.T, full, accumulate=False)
        if tile == BLACKWELL_TILES - 1:
            plgpu.tcgen05_commit_arrive(mem.k_ring.slot(step).empty)

    def add_to_result(tile, step):
        v = buffers_of(mem.v_ring, tile, step)
        plgpu.tcgen05_mma(
            mem.result.at[tile],
            mem.probabilities.at[tile],
            v,
            mem.result_full.at[tile],
            accumulate=step > 0,
        )
        if tile == BLACKWELL_TILES - 1:
            plgpu.tcgen05_commit_arrive(mem.v_ring.slot(step).empty)

    plgpu.barrier_wait(mem.q_full)
    for tile in range(BLACKWELL_TILES):
        start_scores(tile, jnp.int32(0))

    @plgpu.loop(1, steps)
    def _(step):
        for tile in range(BLACKWELL_TILES):
            plgpu.barrier_wait(mem.ready.at[tile])
            start_scores(tile, step)
            add_to_result(tile, step - 1)

    for tile in range(BLACKWELL_TILES):
        plgpu.barrier_wait(mem.ready.at[tile])
        add_to_result(tile, jnp.asarray(steps - 1, jnp.int32))


# --- softmax --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Softmax:
    p: Problem
    mem: Memory
    wg: Any

    def visit(self, tile, steps) -> None:
        p = self.p
        q_row = tile.start + self.wg * BLACKWELL_ROWS
        last = steps - 1

        def masked_step(step, state):
            return self.step(state, (q_row, last - step))

        def whole_step(_, state):
            return self.step(state)

        state, masked = self.first_step(q_row, last), 1
        if p.masks_more:
            rows = p.lengths(), q_row, BLACKWELL_ROWS
            whole = p.mask.blocks(*rows, p.config.block_kv).end_whole
            masked = steps - jnp.minimum(whole, last)
            state = plgpu.loop(1, masked, init_carry=state)(masked_step)
        _, row_sum = plgpu.loop(masked, steps, init_carry=state)(whole_step)
        self.store(row_sum, tile.batch, q_row, tile.head)

    def first_step(self, q_row, block) -> tuple[Any, Any]:
        scores = self.scores((q_row, block) if self.p.masks else None)
        row_max, row_sum, wide = self.softmax.begin(scores)
        self.mem.probabilities.at[self.wg][...] = wide.astype(self.p.dtype)
        plgpu.barrier_arrive(self.mem.ready.at[self.wg])
        return row_max, row_sum

    @property
    def softmax(self) -> Softmax:
        return Softmax(axis=1, factor=self.p.scores.factor)

    def step(self, state, masked=None) -> tuple[Any, Any]:
        """Computes the probabilities of a block, and corrects the result for them.

        The first row and the block are given where the block has to be masked.
        """
        p, mem = self.p, self.mem
        scores = self.scores(masked)
        new_max, row_sum, shrink, wide = self.softmax.step(state, scores)
        narrow = wide.astype(p.dtype)
        # All this is to happen while the products of the block before are under way.
        narrow, row_sum, shrink = lax.optimization_barrier((narrow, row_sum, shrink))

        plgpu.barrier_wait(mem.result_full.at[self.wg])
        plgpu.async_store_tmem(mem.probabilities.at[self.wg], narrow)
        for start in range(0, p.head_dim, _CORRECTED):
            part = self.result(start, _CORRECTED)
            values = plgpu.async_load_tmem(part, layout=_ROW_PER_THREAD)
            factors = lax.broadcast_in_dim(shrink, values.shape, (0,))
            plgpu.wait_load_tmem()
            plgpu.async_store_tmem(part, values * factors)
        plgpu.commit_tmem()
        plgpu.barrier_arrive(mem.ready.at[self.wg])
        return new_max, row_sum

    def store(self, row_sum, batch, q_row, head) -> None:
        """Divides the result by the sums, and stores it through SMEM."""
        p, mem = self.p, self.mem
        plgpu.barrier_wait(mem.result_full.at[self.wg])
        # All products that read these rows of Q are complete.
        buffer = mem.q_smem.at[plgpu.ds(self.wg * BLACKWELL_ROWS, BLACKWELL_ROWS)]
        for start in range(0, p.head_dim, _STORED):
            part = self.result(start, _STORED)
            values = plgpu.async_load_tmem(part, layout=_ROW_PER_THREAD)
            values *= lax.broadcast_in_dim(1 / row_sum, values.shape, (0,))
            buffer[:, plgpu.ds(start, _STORED)] = values.astype(p.dtype)
        plgpu.commit_smem()
        rows = plgpu.ds(q_row, BLACKWELL_ROWS)
        # Of the last block not every tile may have rows.
        some = q_row < p.q_len if p.q_len % p.config.block_q else None
        plgpu.copy_smem_to_gmem(buffer, mem.out.at[batch, rows, head], some)
        plgpu.wait_smem_to_gmem(0)

    # --- pieces -----------------------------------------------------------------------

    def result(self, start: int, columns: int) -> Any:
        return self.mem.result.at[self.wg, :, plgpu.ds(start, columns)]

    def scores(self, masked=None) -> Any:
        """Waits for the scores of a block, and returns them, masked if need be."""
        plgpu.barrier_wait(self.mem.scores_full.at[self.wg])
        ref = self.mem.scores.at[self.wg]
        scores = plgpu.async_load_tmem(ref, layout=_ROW_PER_THREAD)
        plgpu.wait_load_tmem()
        return scores if masked is None else self.mask(scores, *masked)

    def mask(self, scores, q_row, block) -> Any:
        """Hides what a row may not see, and what lies behind the end of K.

        Each thread compares the columns, constants, with the last one of its row.
        """
        p = self.p
        first = block * p.config.block_kv
        iota = functools.partial(
            plgpu.broadcasted_iota, jnp.int32, scores.shape, layout=_ROW_PER_THREAD
        )
        last = p.kv_len - 1 - first
        if p.mask.right is not None:
            last = jnp.minimum(iota(0) + (q_row - first), last)
        return jnp.where(iota(1) <= last, scores, p.scores.hidden)

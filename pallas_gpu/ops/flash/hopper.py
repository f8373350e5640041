# SPDX-License-Identifier: Apache-2.0
"""The kernel of attention for Hopper, forward: pipelined inside each warpgroup.

A block has one producer and two or three consumers. The producer copies rows of Q, and
blocks of K and V into two rings of SMEM buffers, by TMA. A consumer holds its rows of
the result in registers. In each step it starts two products, the scores of the next
block and the probabilities of the one before times V, and computes the softmax of the
scores while the second product is under way. Consumers take turns to start products, so
that the tensor cores work for one while another computes exponentials.

The softmax is online: a running maximum and a running sum for each row, in base 2.
Blocks of K and V are visited from the last to the first: those that a mask cuts come
first, and the long loop knows of no mask.
"""

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
from pallas_gpu.ops.flash.config import (
    REGISTERS,
    AttentionConfig,
    BlackwellAttentionConfig,
)
from pallas_gpu.ops.tiles import tiles

# The exponents of a masked score, scaled, and of the largest power of two in float32.
_MASKED_EXPONENT, _LARGEST_EXPONENT = 100, 127
_COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True)


@dataclasses.dataclass(frozen=True)
class Problem[Config: (AttentionConfig, BlackwellAttentionConfig)]:
    """Sizes, and which tiles a block computes in which order.

    Attributes:
      factor: of the scores; it makes the softmax one of powers of two.
    """

    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: Any
    causal: bool
    factor: float
    config: Config

    @property
    def q_tiles(self) -> int:
        return plgpu.cdiv(self.q_len, self.config.block_q)

    @property
    def tiles(self) -> int:
        return self.batch * self.heads * self.q_tiles

    @property
    def persistent(self) -> bool:
        """Whether a block computes more than one tile."""
        return self.workers < self.tiles

    @property
    def workers(self) -> int:
        """Blocks of the launch: no more than there is work for."""
        return min(self.config.blocks or self.tiles, self.tiles)

    def tile(self, linear: Any) -> tuple[Any, Any, Any]:
        """Returns (batch, head, first row of Q) of a tile.

        Under a causal mask the last rows have the most work: they come first, so that
        short tiles fill the gaps at the end.
        """
        pairs = self.batch * self.heads
        together = math.gcd(pairs, self.config.heads_together)
        strip, within = _divide(linear, together * self.q_tiles)
        qi, pair = _divide(within, together)
        batch, head = _divide(_plus(_times(strip, together), pair), self.heads)
        if self.causal:
            qi = self.q_tiles - 1 - qi
        return batch, head, _times(qi, self.config.block_q)

    def steps(self, q_start: Any) -> Any:
        """Returns the number of blocks of K and V that a tile of Q sees."""
        size = self.config.block_kv
        if not self.causal:
            return plgpu.cdiv(self.kv_len, size)
        end = jnp.minimum(q_start + self.config.block_q, self.kv_len)
        return _divide(end + (size - 1), size)[0]

    def whole_blocks(self, q_start: Any) -> Any:
        """Returns how many blocks, from the first on, no row of a causal tile cuts."""
        visible = jnp.minimum(q_start + 1, self.kv_len)
        return _divide(visible, self.config.block_kv)[0]

    @property
    def masked_score(self) -> float:
        """What a masked score becomes before it is scaled.

        It is finite, because a row may see nothing of the block that comes first, and
        infinity minus infinity is NaN; its first visible score then wipes out what the
        masked ones added. A power of two stays exact when it is scaled; it follows the
        factor, or a small one would let masked scores show and a large one overflow.
        """
        exponent = _MASKED_EXPONENT - round(math.log2(self.factor))
        return -(2.0 ** min(exponent, _LARGEST_EXPONENT))

    @property
    def masks(self) -> bool:
        """Whether the last block of a tile is masked."""
        return self.causal or self.kv_len % self.config.block_kv != 0

    @property
    def masks_more(self) -> bool:
        """Whether blocks before the last one may be masked, too."""
        return self.causal and self.config.block_kv % self.config.block_q != 0


# Index arithmetic in operations of lax: jnp's take several times as long to trace.


def _plus(a: Any, b: Any) -> Any:
    return lax.add(a, np.int32(b) if isinstance(b, int) else b)


def _times(a: Any, b: int) -> Any:
    return lax.mul(a, np.int32(b))


def _divide(a: Any, b: int) -> tuple[Any, Any]:
    divisor = np.int32(b)
    return lax.div(a, divisor), lax.rem(a, divisor)


# --- the kernel -----------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def make_kernel(p: Problem, compiler_params: Any, interpret: Any) -> Any:
    """Returns the function of q, k and v; see `attention`."""
    c = p.config
    q_tile = tiles((c.block_q, p.head_dim), p.dtype)
    ring = tiles((c.stages, c.block_kv, p.head_dim), p.dtype)
    full = plgpu.Barrier(num_barriers=c.stages)
    empty = plgpu.Barrier(num_arrivals=c.consumers, num_barriers=c.stages)
    scratch = {
        "q_smem": q_tile,
        "k_smem": ring,
        "v_smem": ring,
        "q_full": plgpu.Barrier(),
        "k_full": full,
        "v_full": full,
        "k_empty": empty,
        "v_empty": empty,
        "turn": plgpu.Barrier(num_barriers=c.consumers),
    }
    if p.persistent:
        # Rows of Q arrive for the next tile while this one's result leaves.
        scratch["out_smem"] = q_tile
        scratch["q_empty"] = plgpu.Barrier(num_arrivals=c.consumers)
    shape = (p.batch, p.q_len, p.heads, p.head_dim)
    return plgpu.kernel(
        functools.partial(_body, p),
        out_type=jax.ShapeDtypeStruct(shape, p.dtype),
        grid=(p.workers,),
        grid_names=("worker",),
        num_threads=c.consumers + 1,
        thread_name="wg",
        kernel_name="attention",
        interpret=interpret,
        compiler_params=compiler_params or _COMPILER_PARAMS,
        scratch_types=scratch,
    )


def _body(p: Problem, q: Any, k: Any, v: Any, out: Any, **scratch: Any) -> None:
    wg = lax.axis_index("wg")
    mem = _Memory(q=q, k=k, v=v, out=out, **scratch)
    producer_registers, consumer_registers = REGISTERS[p.config.consumers]

    @plgpu.when(wg == p.config.consumers)
    def _():
        plgpu.set_max_registers(producer_registers, action="decrease")
        _for_each_tile(p, functools.partial(_produce, p, mem))

    @plgpu.when(wg < p.config.consumers)
    def _():
        plgpu.set_max_registers(consumer_registers, action="increase")
        consumer = _Consumer(p, mem, wg)
        consumer.open_turns()
        _for_each_tile(p, consumer.visit)
        plgpu.wait_smem_to_gmem(0)


@dataclasses.dataclass(frozen=True)
class _Memory:
    """The references of a block."""

    q: Any
    k: Any
    v: Any
    out: Any
    q_smem: Any
    k_smem: Any
    v_smem: Any
    q_full: Any
    k_full: Any
    v_full: Any
    k_empty: Any
    v_empty: Any
    turn: Any
    out_smem: Any = None
    q_empty: Any = None


def _for_each_tile(p: Problem, visit: Any) -> None:
    """Calls `visit(number, tile, steps before it, its steps)` for a block's tiles."""

    @plgpu.nd_loop((p.tiles,), collective_axes="worker", init_carry=jnp.int32(0))
    def _(info, carry):
        tile = p.tile(info.index[0])
        steps = p.steps(tile[2])
        visit(info.local_index, tile, carry, steps)
        return _plus(carry, steps)


def _produce(p: Problem, mem: _Memory, number, tile, first, steps) -> None:
    """Copies the rows of Q of a tile, then K and V in the order of their use."""
    c = p.config
    batch, head, q_start = tile
    kv_head = lax.div(head, np.int32(p.heads // p.kv_heads))
    if p.persistent:

        @plgpu.when(number > 0)
        def _():
            plgpu.barrier_wait(mem.q_empty)

    rows = plgpu.ds(q_start, c.block_q)
    plgpu.copy_gmem_to_smem(mem.q.at[batch, rows, head], mem.q_smem, mem.q_full)

    last = jnp.asarray(steps - 1, jnp.int32)

    def copy(step, source, ring, full, empty):
        position = _plus(first, step)
        slot = lax.rem(position, np.int32(c.stages))

        @plgpu.when(lax.ge(position, np.int32(c.stages)))
        def _():
            plgpu.barrier_wait(empty.at[slot])

        from_last = lax.sub(last, step)
        rows = plgpu.ds(_times(from_last, c.block_kv), c.block_kv)
        plgpu.copy_gmem_to_smem(
            source.at[batch, rows, kv_head], ring.at[slot], full.at[slot]
        )

    def copy_k(step):
        copy(step, mem.k, mem.k_smem, mem.k_full, mem.k_empty)

    def copy_v(step):
        copy(step, mem.v, mem.v_smem, mem.v_full, mem.v_empty)

    copy_k(jnp.int32(0))

    @plgpu.loop(1, steps)
    def _(step):
        copy_k(step)
        copy_v(_plus(step, -1))

    copy_v(last)


# --- a consumer -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Consumer:
    """What one consumer warpgroup does."""

    p: Problem
    mem: _Memory
    wg: Any

    @property
    def own_rows(self) -> Any:
        """The consumer's part of a tile of Q."""
        rows = self.p.config.rows
        return plgpu.ds(_times(self.wg, rows), rows)

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
            following = lax.rem(_plus(self.wg, 1), np.int32(self.p.config.consumers))
            plgpu.barrier_arrive(self.mem.turn.at[following])

    def visit(self, number, tile, first, steps) -> None:
        """Computes and stores its rows of a tile."""
        del number
        p, mem = self.p, self.mem
        batch, head, q_start = tile
        q_row = _plus(q_start, _times(self.wg, p.config.rows))

        def over_blocks(acc):
            plgpu.barrier_wait(mem.q_full)
            last = steps - 1

            def masked_step(step, state):
                return self.step(acc, _plus(first, step), state, q_row, last - step)

            def whole_step(step, state):
                return self.step(acc, _plus(first, step), state)

            state, masked = self.first_step(first, q_row, last), 1
            if p.masks_more:
                masked = steps - jnp.minimum(p.whole_blocks(q_start), last)
                state = plgpu.loop(1, masked, init_carry=state)(masked_step)
            state = plgpu.loop(masked, steps, init_carry=state)(whole_step)
            if p.persistent:
                plgpu.barrier_arrive(mem.q_empty)
            return self.finish(acc, _plus(first, last), state)

        result = plgpu.run_scoped(over_blocks, plgpu.ACC((p.config.rows, p.head_dim)))
        self.store(result, batch, q_row, head)

    def slot(self, position) -> Any:
        return lax.rem(position, np.int32(self.p.config.stages))

    def first_step(self, position, q_row, block) -> tuple[Any, Any, Any]:
        """Returns maximum, sum and probabilities of the rows for the first block."""
        p, mem = self.p, self.mem
        slot = self.slot(position)

        def multiply(scores):
            plgpu.barrier_wait(mem.k_full.at[slot])
            plgpu.wgmma(scores, mem.q_smem.at[self.own_rows], mem.k_smem.at[slot].T)
            return scores[...]

        scores = plgpu.run_scoped(multiply, self.scores_type)
        plgpu.barrier_arrive(mem.k_empty.at[slot])
        if p.masks:
            scores = self.mask(scores, q_row, block)
        row_max = scores.max(axis=1) * p.factor
        probabilities = self.exponentials(scores, row_max)
        return row_max, probabilities.sum(axis=1), probabilities.astype(p.dtype)

    def step(self, acc, position, state, q_row=None, block=None) -> Any:
        """Starts the scores of a block and adds the block before it to the result.

        A block is given where it has to be masked.
        """
        p, mem = self.p, self.mem
        slot, before = self.slot(position), self.slot(_plus(position, -1))
        row_max, row_sum, probabilities = state

        def multiply(scores):
            plgpu.barrier_wait(mem.k_full.at[slot])
            self.take_turn()
            plgpu.wgmma(scores, mem.q_smem.at[self.own_rows], mem.k_smem.at[slot].T)
            plgpu.barrier_wait(mem.v_full.at[before])
            plgpu.wgmma(acc, probabilities, mem.v_smem.at[before])
            self.pass_turn()
            return plgpu.wgmma_accumulator_load(scores, wait_n=1)

        scores = plgpu.run_scoped(multiply, self.scores_type)
        plgpu.barrier_arrive(mem.k_empty.at[slot])
        if block is not None:
            scores = self.mask(scores, q_row, block)
        new_max = jnp.maximum(row_max, scores.max(axis=1) * p.factor)
        shrink = jnp.exp2(row_max - new_max)
        wide = self.exponentials(scores, new_max)
        row_sum = row_sum * shrink + wide.sum(axis=1)
        # All this is to happen while the second product is under way.
        wide, new_max, row_sum, shrink = lax.optimization_barrier(
            (wide, new_max, row_sum, shrink)
        )
        so_far = acc[...]
        plgpu.barrier_arrive(mem.v_empty.at[before])
        acc[...] = so_far * lax.broadcast_in_dim(shrink, so_far.shape, (0,))
        return new_max, row_sum, wide.astype(p.dtype)

    def finish(self, acc, position, state) -> Any:
        """Adds the last block to the result and divides by the sums."""
        mem, slot = self.mem, self.slot(position)
        _, row_sum, probabilities = state
        plgpu.barrier_wait(mem.v_full.at[slot])
        plgpu.wgmma(acc, probabilities, mem.v_smem.at[slot])
        total = acc[...]
        plgpu.barrier_arrive(mem.v_empty.at[slot])
        return total * lax.broadcast_in_dim(1 / row_sum, total.shape, (0,))

    def store(self, result, batch, q_row, head) -> None:
        """Starts the copy of its rows of the result, through SMEM, to GMEM."""
        p, mem = self.p, self.mem
        # Rows of Q are not needed any more.
        buffer = mem.out_smem if p.persistent else mem.q_smem
        buffer = buffer.at[self.own_rows]
        if p.persistent:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        buffer[...] = result.astype(p.dtype)
        plgpu.commit_smem()
        rows = plgpu.ds(q_row, p.config.rows)
        # Of the last tile not every consumer may have rows.
        some = q_row < p.q_len if p.q_len % p.config.block_q else None
        plgpu.copy_smem_to_gmem(buffer, mem.out.at[batch, rows, head], some)

    # --- pieces -----------------------------------------------------------------------

    @property
    def scores_type(self) -> Any:
        return plgpu.ACC((self.p.config.rows, self.p.config.block_kv))

    def exponentials(self, scores, row_max) -> Any:
        """Returns 2 to the scaled scores less the maximum, which is scaled already."""
        row_max = lax.broadcast_in_dim(row_max, scores.shape, (0,))
        return jnp.exp2(scores * self.p.factor - row_max)

    def mask(self, scores, q_row, block) -> Any:
        """Hides what a row may not see, and what lies behind the end of K.

        Columns are counted in groups of 8: a register's group is the same in every
        thread, so it is compared as a constant and takes no register of its own.
        """
        p = self.p
        rows, columns = scores.shape
        groups = (rows, columns // 8, 8)
        first = block * p.config.block_kv
        last = p.kv_len - 1 - first
        if p.causal:
            row = plgpu.broadcasted_iota(jnp.int32, (rows, 8), 0)
            last = jnp.minimum(row + (q_row - first), last)
        within = plgpu.broadcasted_iota(jnp.int32, (rows, 8), 1)
        last_group = lax.broadcast_in_dim((last - within) >> 3, groups, (0, 2))
        visible = plgpu.broadcasted_iota(jnp.int32, groups, 1) <= last_group
        masked = jnp.where(visible, scores.reshape(groups), p.masked_score)
        return masked.reshape(scores.shape)

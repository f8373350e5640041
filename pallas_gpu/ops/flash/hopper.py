# SPDX-License-Identifier: Apache-2.0
"""The kernel of attention for Hopper, forward: pipelined inside each warpgroup.

A block has one producer and two or three consumers. The producer copies rows of Q, and
blocks of K and V into two rings of SMEM buffers, by TMA. A consumer holds its rows of
the result in registers. In each step it starts two products, the scores of the next
block and the probabilities of the one before times V, and computes the softmax of the
scores while the second product is under way. Consumers take turns to start products, so
that the tensor cores work for one while another computes exponentials.

The softmax is online: a running maximum and a running sum for each row, in base 2.
Blocks of K and V are visited from the last to the first: those that a causal mask cuts
come first, and the long loop knows of no mask. Blocks that are hidden are not visited;
those that a window or a segment cuts at its start are masked in a loop of their own.
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
from pallas_gpu.ops.flash import masks
from pallas_gpu.ops.flash.config import REGISTERS, AttentionConfig
from pallas_gpu.ops.flash.masks import Blocks, Lengths, plus, times
from pallas_gpu.ops.flash.problem import Operands, Problem, Tile, packed_tiles
from pallas_gpu.ops.tiles import tiles

_COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True)
_ROW, _COLUMN = plgpu.Layout.WGMMA_ROW, plgpu.Layout.WGMMA_COL
# TMA addresses rows of multiples of 16 bytes.
_ROW_BYTES = 16


# --- around the kernel ----------------------------------------------------------------


def forward(
    p: Problem[AttentionConfig], x: Operands, compiler_params: Any, interpret: Any
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the result and, if the problem has it, logsumexp."""
    inputs = {name: value for name, value in x._asdict().items() if value is not None}
    c = p.config
    if x.q_ids is not None:
        inputs["of_segments"] = masks.segment_blocks(
            x.q_ids, x.kv_ids, c.block_q, c.block_kv
        )
        inputs["q_ids"] = _padded(x.q_ids, c.block_q)
        inputs["kv_ids"] = _padded(x.kv_ids, c.block_kv)
    if p.packed:
        inputs["of_tiles"] = packed_tiles(x.q_starts, p.q_tiles, c.block_q)
    if p.persistent and p.uneven:
        inputs["schedule"] = jnp.asarray(p.schedule())
    if x.bias is not None:
        row_elems = _ROW_BYTES // x.bias.dtype.itemsize
        inputs["bias"] = _padded(x.bias, row_elems)
    f = make_kernel(p, tuple(inputs), compiler_params, interpret)
    out, *others = f(*inputs.values())
    return out, others[0] if others else None


def _padded(x: Any, multiple: int) -> Any:
    """Returns the array with zeros up to a multiple along the last axis."""
    missing = -x.shape[-1] % multiple
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


@functools.lru_cache(maxsize=64)
def make_kernel(
    p: Problem[AttentionConfig],
    inputs: tuple[str, ...],
    compiler_params: Any,
    interpret: Any,
) -> Any:
    """Returns the function of the inputs of these names; see `forward`."""
    c = p.config
    full = plgpu.Barrier(num_barriers=c.stages)
    empty = plgpu.Barrier(num_arrivals=c.consumers, num_barriers=c.stages)
    # Rows of Q arrive for the next tile while those of this one are still in use.
    q_buffers = 2 if p.persistent else 1
    scratch = {
        "q_smem": tiles((q_buffers, c.block_q, p.head_dim), p.dtype),
        "k_smem": tiles((c.stages, c.block_kv, p.head_dim), p.dtype),
        "v_smem": tiles((c.stages, c.block_kv, p.v_dim), p.dtype),
        "q_full": plgpu.Barrier(num_barriers=q_buffers),
        "k_full": full,
        "v_full": full,
        "k_empty": empty,
        "v_empty": empty,
        "turn": plgpu.Barrier(num_barriers=c.consumers),
    }
    if p.bias is not None:
        scratch |= {"bias_full": full, "bias_empty": empty}
        scratch["bias_smem"] = _bias_ring(p)
    if p.persistent or p.v_dim != p.head_dim:
        # Rows of Q arrive for the next tile while this one's result leaves.
        scratch["out_smem"] = tiles((c.block_q, p.v_dim), p.dtype)
    if p.persistent:
        scratch["q_empty"] = plgpu.Barrier(
            num_arrivals=c.consumers, num_barriers=q_buffers
        )
    results = {"out": jax.ShapeDtypeStruct(p.out_shape, p.dtype)}
    if p.logsumexp:
        results["lse"] = jax.ShapeDtypeStruct(p.logsumexp_shape, jnp.float32)
    names = *inputs, *results

    def body(*refs: Any, **scratch: Any) -> None:
        _body(p, _Memory(**dict(zip(names, refs, strict=True)), **scratch))

    return plgpu.kernel(
        body,
        out_type=tuple(results.values()),
        grid=(p.workers,),
        grid_names=("worker",),
        num_threads=c.consumers + 1,
        thread_name="wg",
        kernel_name="attention",
        interpret=interpret,
        compiler_params=compiler_params or _COMPILER_PARAMS,
        scratch_types=scratch,
    )


def _bias_ring(p: Problem[AttentionConfig]) -> Any:
    """A bias that is the same for all rows is a vector for each block."""
    assert p.bias is not None
    c, dtype = p.config, p.bias_dtype
    if p.bias[2] == 1:
        # Each block starts at a multiple of 128 bytes, as TMA needs it.
        row = plgpu.align_to(c.block_kv, 128 // dtype.itemsize)
        return plgpu.SMEM((c.stages, row), dtype)
    return tiles((c.stages, c.block_q, c.block_kv), dtype)


# --- a block --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Memory:
    """The references of a block: inputs, results, scratch."""

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
    lse: Any = None
    bias: Any = None
    bias_smem: Any = None
    bias_full: Any = None
    bias_empty: Any = None
    slopes: Any = None
    q_ids: Any = None
    kv_ids: Any = None
    of_segments: Any = None
    q_lengths: Any = None
    kv_lengths: Any = None
    q_starts: Any = None
    kv_starts: Any = None
    of_tiles: Any = None
    schedule: Any = None


def _body(p: Problem[AttentionConfig], mem: _Memory) -> None:
    wg = lax.axis_index("wg")
    producer_registers, consumer_registers = REGISTERS[p.config.consumers]

    @plgpu.when(wg == p.config.consumers)
    def _():
        plgpu.set_max_registers(producer_registers, action="decrease")
        _Work(p, mem).for_each(functools.partial(_produce, p, mem), jnp.int32(0))

    @plgpu.when(wg < p.config.consumers)
    def _():
        plgpu.set_max_registers(consumer_registers, action="increase")
        consumer = _Consumer(p, mem, wg)
        consumer.open_turns()
        if p.persistent:
            consumer.visit_all(_Work(p, mem))
        else:
            consumer.visit(*_Work(p, mem).at(lax.axis_index("worker")))
        plgpu.wait_smem_to_gmem(0)


@dataclasses.dataclass(frozen=True)
class _Work:
    """The tiles of a block, in the order in which all its warpgroups visit them."""

    p: Problem[AttentionConfig]
    mem: _Memory

    @property
    def count(self) -> Any:
        """How many there are."""
        p, worker = self.p, lax.axis_index("worker")
        if self.mem.schedule is not None:
            return self.mem.schedule[worker, 0]
        return masks.divide(p.tiles + p.workers - 1 - worker, p.workers)

    def number(self, position: Any) -> Any:
        """Returns the position in the launch of one of them."""
        worker = lax.axis_index("worker")
        if self.mem.schedule is not None:
            return self.mem.schedule[worker, plus(position, 1)]
        return plus(worker, times(position, self.p.workers))

    def for_each(self, visit: Any, carry: Any) -> Any:
        """Calls `visit(position, number, following, carry)`; it returns the next carry.

        The number of the following tile is loaded before this one is visited; behind
        the last tile it is the number of any tile.
        """
        if not self.p.persistent:
            number = lax.axis_index("worker")
            return visit(jnp.int32(0), number, number, carry)
        start = self.number(jnp.int32(0)), carry

        @plgpu.loop(0, self.count, init_carry=start)
        def found(position, carried):
            number, carry = carried
            following = self.number(plus(position, 1))
            return following, visit(position, number, following, carry)

        return found[1]

    def at(self, number: Any) -> tuple[Tile, Blocks]:
        """Returns a tile and the blocks that it sees."""
        p, mem = self.p, self.mem
        tile = _tile(p, mem, number)
        of_segments = None
        if p.mask.segments:
            row = mem.of_segments.at[
                tile.batch, masks.divide(tile.q_start, p.config.block_q)
            ]
            of_segments = Blocks(*(row[i] for i in range(len(Blocks._fields))))
        return tile, p.blocks(tile, of_segments)


def _tile(p: Problem[AttentionConfig], mem: _Memory, linear: Any) -> Tile:
    batch, head, number = p.place(linear)
    if not p.packed:
        lengths = p.lengths
        if p.mask.ragged:
            lengths = Lengths(mem.q_lengths[batch], mem.kv_lengths[batch])
        return Tile(batch, head, times(number, p.config.block_q), lengths)
    batch, q_start = mem.of_tiles[number, 0], mem.of_tiles[number, 1]
    ends = plus(batch, 1)
    q_first, kv_first = mem.q_starts[batch], mem.kv_starts[batch]
    lengths = Lengths(mem.q_starts[ends] - q_first, mem.kv_starts[ends] - kv_first)
    return Tile(batch, head, q_start, lengths, q_first, kv_first)


def _rows(p: Any, ref: Any, tile: Tile, first: Any, size: int, head: Any) -> Any:
    """Returns rows of one head of an array; `first` counts in the array."""
    rows = plgpu.ds(first, size)
    return ref.at[rows, head] if p.packed else ref.at[tile.batch, rows, head]


def _produce(
    p: Problem[AttentionConfig], mem: _Memory, position, number, following, before
) -> Any:
    """Copies the rows of Q of a tile, then K and V in the order of their use.

    Returns the number of steps up to the end of the tile; `before` is that up to its
    beginning.
    """
    del following
    c = p.config
    tile, blocks = _Work(p, mem).at(number)
    kv_head = lax.div(tile.head, np.int32(p.heads // p.kv_heads))
    # Sequences that are packed may be empty, also at the end of the array.
    mode = plgpu.OOBFillMode.ZEROS if p.packed else None
    buffer = _q_buffer(p, position)
    if p.persistent:

        @plgpu.when(position > 1)
        def _():
            plgpu.barrier_wait(mem.q_empty.at[buffer])

    q_rows = _rows(
        p, mem.q, tile, plus(tile.q_first, tile.q_start), c.block_q, tile.head
    )
    plgpu.copy_gmem_to_smem(
        q_rows, mem.q_smem.at[buffer], mem.q_full.at[buffer], oob_mode=mode
    )

    steps = masks.minus(blocks.end, blocks.first)
    last = jnp.asarray(plus(blocks.end, -1), jnp.int32)

    def copy(step, source, ring, full, empty):
        position = plus(before, step)
        slot = lax.rem(position, np.int32(c.stages))

        @plgpu.when(lax.ge(position, np.int32(c.stages)))
        def _():
            plgpu.barrier_wait(empty.at[slot])

        part = source(times(lax.sub(last, step), c.block_kv))
        buffer = ring.at[slot]
        if buffer.shape != part.shape:
            buffer = buffer.at[plgpu.ds(0, c.block_kv)]
        plgpu.copy_gmem_to_smem(part, buffer, full.at[slot], oob_mode=mode)

    def rows_of(ref):
        def part(column):
            first = plus(tile.kv_first, column)
            return _rows(p, ref, tile, first, c.block_kv, kv_head)

        return part

    def copy_k(step):
        copy(step, rows_of(mem.k), mem.k_smem, mem.k_full, mem.k_empty)
        if p.bias is not None:
            part = functools.partial(_bias_part, p, mem, tile)
            copy(step, part, mem.bias_smem, mem.bias_full, mem.bias_empty)

    def copy_v(step):
        copy(step, rows_of(mem.v), mem.v_smem, mem.v_full, mem.v_empty)

    copy_k(jnp.int32(0))

    @plgpu.loop(1, steps)
    def _(step):
        copy_k(step)
        copy_v(plus(step, -1))

    copy_v(jnp.asarray(plus(steps, -1), jnp.int32))
    return plus(before, steps)


def _q_buffer(p: Problem[AttentionConfig], position: Any) -> Any:
    return lax.rem(position, np.int32(2)) if p.persistent else 0


def _bias_part(p: Any, mem: _Memory, tile: Tile, column: Any) -> Any:
    """Returns the bias of a tile and a block."""
    batch = tile.batch if p.bias[0] > 1 else 0
    head = tile.head if p.bias[1] > 1 else 0
    columns = plgpu.ds(column, p.config.block_kv)
    if p.bias[2] == 1:
        return mem.bias.at[batch, head, 0, columns]
    rows = plgpu.ds(tile.q_start, p.config.block_q)
    return mem.bias.at[batch, head, rows, columns]


# --- a consumer -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Own:
    """A tile as one consumer sees it.

    Attributes:
      q_row: its own first row, counted in the sequence.
      ids: segment ids of its rows, or None.
      slope: of ALiBi, or None.
    """

    tile: Tile
    q_row: Any
    ids: Any
    slope: Any


@dataclasses.dataclass(frozen=True)
class _Consumer:
    """What one consumer warpgroup does."""

    p: Problem[AttentionConfig]
    mem: _Memory
    wg: Any

    @property
    def own_rows(self) -> Any:
        """The consumer's part of a tile of Q."""
        rows = self.p.config.rows
        return plgpu.ds(times(self.wg, rows), rows)

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
        """Computes and stores its rows of a tile."""
        own, mem = self.own(tile), self.mem

        def over_blocks(acc):
            plgpu.barrier_wait(mem.q_full.at[0])
            q = mem.q_smem.at[0, self.own_rows]
            state = self.first_step(q, jnp.int32(0), own, plus(blocks.end, -1))
            state = self.other_steps(acc, q, jnp.int32(0), state, own, blocks)
            last = masks.minus(plus(blocks.end, -1), blocks.first)
            return self.finish(acc, last, state, own)

        result = plgpu.run_scoped(over_blocks, self.result_type)
        self.store(result, own)

    def visit_all(self, work: _Work) -> None:
        """Computes and stores its rows of all tiles of the block.

        The first scores of a tile are computed in the last step of the one before.
        """
        mem = self.mem

        def first(number):
            tile, blocks = work.at(number)
            return self.own(tile), plus(blocks.end, -1)

        def over_tiles(acc):
            count = work.count
            plgpu.barrier_wait(mem.q_full.at[0])
            q = mem.q_smem.at[0, self.own_rows]
            start = self.first_step(q, jnp.int32(0), *first(work.number(jnp.int32(0))))

            def visit(position, number, following, carry):
                before, state = carry
                tile, blocks = work.at(number)
                own, buffer = self.own(tile), _q_buffer(self.p, position)
                q = mem.q_smem.at[buffer, self.own_rows]
                state = self.other_steps(acc, q, before, state, own, blocks)
                plgpu.barrier_arrive(mem.q_empty.at[buffer])
                end = plus(before, masks.minus(blocks.end, blocks.first))

                def go_on():
                    buffer = _q_buffer(self.p, plus(position, 1))
                    plgpu.barrier_wait(mem.q_full.at[buffer])
                    q = mem.q_smem.at[buffer, self.own_rows]
                    place = first(following)
                    return self.step_between(acc, q, end, state, own, *place)

                def stop():
                    result = self.finish(acc, plus(end, -1), state, own)
                    self.store(result, own)
                    return state

                return end, lax.cond(plus(position, 1) < count, go_on, stop)

            work.for_each(visit, (jnp.int32(0), start))

        plgpu.run_scoped(over_tiles, self.result_type)

    def other_steps(self, acc, q, before, state, own, blocks) -> Any:
        """Visits the blocks of a tile from the last but one to the first.

        The first loop has those that are cut at the end, the last one those at the
        start of what the tile sees.
        """
        p = self.p
        steps = masks.minus(blocks.end, blocks.first)

        def step(step, state, masked):
            block = masks.minus(plus(blocks.end, -1), step)
            return self.step(acc, q, plus(before, step), state, own, block, masked)

        masked_step = functools.partial(step, masked=True)
        whole_step = functools.partial(step, masked=False)
        masked, whole = 1, steps
        if p.masks_more:
            masked = masks.maximum(masks.minus(blocks.end, blocks.end_whole), 1)
            state = plgpu.loop(1, masked, init_carry=state)(masked_step)
        if p.masks_first:
            whole = masks.minus(blocks.end, blocks.first_whole)
            whole = masks.maximum(whole, masked)
        state = plgpu.loop(masked, whole, init_carry=state)(whole_step)
        if p.masks_first:
            state = plgpu.loop(whole, steps, init_carry=state)(masked_step)
        return state

    def own(self, tile: Tile) -> _Own:
        """Returns what is the same for all blocks."""
        p, mem = self.p, self.mem
        q_row = plus(tile.q_start, times(self.wg, p.config.rows))
        ids = slope = None
        if p.mask.segments:
            rows = plgpu.ds(q_row, p.config.rows)
            ids = plgpu.load(mem.q_ids.at[tile.batch, rows], layout=_ROW)
        if p.scores.alibi:
            slope = mem.slopes[tile.batch if mem.slopes.shape[0] > 1 else 0, tile.head]
        return _Own(tile, q_row, ids, slope)

    def slot(self, position) -> Any:
        return lax.rem(position, np.int32(self.p.config.stages))

    def first_step(self, q, position, own, block) -> tuple[Any, Any, Any]:
        """Returns maximum, sum and probabilities of the rows for the first block."""
        mem = self.mem
        slot = self.slot(position)

        def multiply(scores):
            plgpu.barrier_wait(mem.k_full.at[slot])
            plgpu.wgmma(scores, q, mem.k_smem.at[slot].T)
            return scores[...]

        scores = plgpu.run_scoped(multiply, self.scores_type)
        plgpu.barrier_arrive(mem.k_empty.at[slot])
        row_max, row_sum, wide = self.first_softmax(scores, slot, own, block)
        return row_max, row_sum, wide.astype(self.p.dtype)

    def first_softmax(self, scores, slot, own, block) -> tuple[Any, Any, Any]:
        scores = self.modified(scores, slot, own, block, self.p.masks)
        row_max = scores.max(axis=1) * self.p.factor
        wide = self.exponentials(scores, row_max)
        return row_max, wide.sum(axis=1), wide

    def two_products(self, acc, q, position, probabilities) -> Any:
        """Starts the scores of a block, and adds the block before it to the result.

        Returns the scores; the second product is still under way.
        """
        mem = self.mem
        slot, before = self.slot(position), self.slot(plus(position, -1))

        def multiply(scores):
            plgpu.barrier_wait(mem.k_full.at[slot])
            self.take_turn()
            plgpu.wgmma(scores, q, mem.k_smem.at[slot].T)
            plgpu.barrier_wait(mem.v_full.at[before])
            plgpu.wgmma(acc, probabilities, mem.v_smem.at[before])
            self.pass_turn()
            return plgpu.wgmma_accumulator_load(scores, wait_n=1)

        scores = plgpu.run_scoped(multiply, self.scores_type)
        plgpu.barrier_arrive(mem.k_empty.at[slot])
        return scores

    def step(self, acc, q, position, state, own, block, masked) -> Any:
        """Computes the softmax of a block while the one before it is added."""
        p, mem = self.p, self.mem
        slot, before = self.slot(position), self.slot(plus(position, -1))
        row_max, row_sum, probabilities = state
        scores = self.two_products(acc, q, position, probabilities)
        scores = self.modified(scores, slot, own, block, masked)
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

    def step_between(self, acc, q, position, state, own, following, block) -> Any:
        """Begins a tile while the last block of the one before is added; stores that.

        Args:
          q: rows of the tile that begins, which is `following`; `block` is its first.
          own, state: of the tile that ends.
        """
        mem = self.mem
        slot, before = self.slot(position), self.slot(plus(position, -1))
        row_max, row_sum, probabilities = state
        scores = self.two_products(acc, q, position, probabilities)
        begun = self.first_softmax(scores, slot, following, block)
        begun = lax.optimization_barrier(begun)
        total = acc[...]
        plgpu.barrier_arrive(mem.v_empty.at[before])
        acc[...] = jnp.zeros_like(total)
        self.store(self.divided(total, row_max, row_sum, own), own)
        return begun[0], begun[1], begun[2].astype(self.p.dtype)

    def finish(self, acc, position, state, own) -> Any:
        """Adds the last block to the result and divides by the sums."""
        mem, slot = self.mem, self.slot(position)
        row_max, row_sum, probabilities = state
        plgpu.barrier_wait(mem.v_full.at[slot])
        plgpu.wgmma(acc, probabilities, mem.v_smem.at[slot])
        total = acc[...]
        plgpu.barrier_arrive(mem.v_empty.at[slot])
        return self.divided(total, row_max, row_sum, own)

    def divided(self, total, row_max, row_sum, own) -> Any:
        """Returns the rows of the result; stores logsumexp."""
        p = self.p
        share = 1 / row_sum
        lse = (row_max + jnp.log2(row_sum)) * math.log(2) if p.logsumexp else None
        if p.may_see_nothing or p.bias is not None:
            nothing = row_max <= p.scores.lowest_maximum
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
            inside = row < masks.minus(end, own.q_row)
        plgpu.store(self.mem.lse, at, lse, mask=inside)

    def store(self, result, own) -> None:
        """Starts the copy of its rows of the result, through SMEM, to GMEM."""
        p, mem, tile = self.p, self.mem, own.tile
        # Rows of Q are not needed any more.
        buffer = mem.q_smem.at[0] if mem.out_smem is None else mem.out_smem
        buffer = buffer.at[self.own_rows]
        if p.persistent:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        first = plus(tile.q_first, own.q_row)
        rows = _rows(p, mem.out, tile, first, p.config.rows, tile.head)
        result = result.astype(p.dtype)
        # Of the last tile not every consumer may have rows.
        some = own.q_row < p.q_len if p.q_len % p.config.block_q else None
        if not p.packed:
            buffer[...] = result
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, rows, some)
            return
        # TMA would also write the first rows of the next sequence.
        left = tile.lengths.rows - own.q_row
        whole = left >= p.config.rows

        @plgpu.when(whole)
        def _():
            buffer[...] = result
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, rows)

        @plgpu.when(jnp.logical_not(whole))
        def _():
            row = plgpu.broadcasted_iota(jnp.int32, result.shape, 0)
            plgpu.store(rows, (), result, mask=row < left)

    # --- pieces -----------------------------------------------------------------------

    @property
    def result_type(self) -> Any:
        return plgpu.ACC((self.p.config.rows, self.p.v_dim))

    @property
    def scores_type(self) -> Any:
        return plgpu.ACC((self.p.config.rows, self.p.config.block_kv))

    def exponentials(self, scores, row_max) -> Any:
        """Returns 2 to the scaled scores less the maximum, which is scaled already."""
        row_max = lax.broadcast_in_dim(row_max, scores.shape, (0,))
        return jnp.exp2(scores * self.p.factor - row_max)

    def modified(self, scores, slot, own, block, masked) -> Any:
        """Returns the scores of a block, modified, and masked if it has to be."""
        p, mem = self.p, self.mem
        lengths = own.tile.lengths
        column = times(block, p.config.block_kv)
        if p.scores.modifies:
            bias = None
            if p.bias is not None:
                plgpu.barrier_wait(mem.bias_full.at[slot])
                if p.bias[2] == 1:
                    columns = plgpu.ds(0, p.config.block_kv)
                    bias = plgpu.load(mem.bias_smem.at[slot, columns], layout=_COLUMN)
                else:
                    bias = mem.bias_smem.at[slot, self.own_rows][...]
                plgpu.barrier_arrive(mem.bias_empty.at[slot])
            origin = plus(own.q_row, p.mask.shift(lengths))
            distance = masks.minus(origin, column)
            scores = p.scores.modified(scores, distance, bias, own.slope)
        if not masked:
            return scores
        ids = None
        if p.mask.segments:
            columns = plgpu.ds(column, p.config.block_kv)
            of_columns = mem.kv_ids.at[own.tile.batch, columns]
            ids = own.ids, plgpu.load(of_columns, layout=_COLUMN)
        hidden = p.scores.hidden
        place = lengths, own.q_row, column
        return p.mask.hide(scores, hidden, *place, ids, layout=plgpu.Layout.WGMMA)

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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.ops.flash import masks, narrow
from pallas_gpu.ops.flash.config import REGISTERS, AttentionConfig
from pallas_gpu.ops.flash.forward.consumer import Consumer
from pallas_gpu.ops.flash.problem import (
    Operands,
    Problem,
    launch,
    packed_tiles,
    schedule,
)
from pallas_gpu.ops.folded import minus, plus, times
from pallas_gpu.ops.memory import Memory
from pallas_gpu.ops.rules import aligned, cached
from pallas_gpu.ops.tiles import tiles

# --- around the kernel ----------------------------------------------------------------


def forward(p: Problem[AttentionConfig], x: Operands) -> dict[str, jax.Array]:
    inputs = {name: value for name, value in x._asdict().items() if value is not None}
    c = p.config
    if x.q_ids is not None:
        inputs["of_segments"] = masks.segment_blocks(
            x.q_ids, x.kv_ids, c.block_q, c.block_kv
        )
        inputs["q_ids"] = aligned(x.q_ids, c.block_q)
        inputs["kv_ids"] = aligned(x.kv_ids, c.block_kv)
    if p.packed:
        inputs["of_tiles"] = packed_tiles(x.q_starts, p.q_tiles, c.block_q)
    if p.persistent and p.uneven:
        inputs["schedule"] = jnp.asarray(schedule(p))
    if p.narrow:
        inputs["v"] = narrow.transposed(x.v)
    if x.bias is not None:
        inputs["bias"] = aligned(x.bias)
    return make_kernel(p, tuple(inputs))(inputs)


@cached
def make_kernel(p: Problem[AttentionConfig], inputs: tuple[str, ...]) -> Any:
    c = p.config
    # Rows of Q arrive for the next tile while those of this one are still in use.
    q_buffers = 2 if p.persistent else 1
    ring = functools.partial(plgpu.Ring.of, consumers=c.consumers)
    q_ring = ring(tiles((q_buffers, c.block_q, p.head_dim), p.dtype))
    scratch = {
        "q_ring": q_ring if p.persistent else dataclasses.replace(q_ring, empty=None),
        "k_ring": ring(tiles((c.stages, c.block_kv, p.head_dim), p.dtype)),
        "v_ring": ring(tiles((c.stages, *p.v_block), p.dtype)),
        "turn": plgpu.Barrier(num_barriers=c.consumers),
    }
    if p.bias is not None:
        scratch["bias_ring"] = ring(_bias_buffers(p))
    if p.persistent or p.v_dim != p.head_dim or p.narrow:
        # Rows of Q arrive for the next tile while this one's result leaves.
        scratch["out_smem"] = tiles((c.block_q, p.v_dim), p.out_dtype)
    body = functools.partial(_body, p)
    return launch(
        *(p, "attention", body, inputs, p.results, scratch),
        grid={"block": p.workers},
        warpgroups=c.consumers + 1,
    )


def _bias_buffers(p: Problem[AttentionConfig]) -> Any:
    """A bias that is the same for all rows is a vector for each block."""
    c, dtype = p.config, p.bias_dtype
    if not p.has_matrix:
        # Each block starts at a multiple of 128 bytes, as TMA needs it.
        row = plgpu.align_to(c.block_kv, 128 // dtype.itemsize)
        return plgpu.SMEM((c.stages, row), dtype)
    return tiles((c.stages, c.block_q, c.block_kv), dtype)


# --- a block --------------------------------------------------------------------------


def _body(p: Problem[AttentionConfig], mem: Memory) -> None:
    wg = lax.axis_index("wg")

    def produce() -> None:
        p.visits(mem).for_each(functools.partial(_produce, p, mem), np.int32(0))

    def consume() -> None:
        consumer = Consumer(p, mem, wg)
        consumer.open_turns()
        if p.persistent:
            consumer.visit_all()
        else:
            consumer.visit(*p.tile_and_blocks(mem, lax.axis_index("block")))
        plgpu.wait_smem_to_gmem(0)

    consumers = p.config.consumers
    roles = plgpu.Roles(consumers, REGISTERS[consumers], two_branches=True)
    roles.run(wg, produce, consume)


def _produce(
    p: Problem[AttentionConfig], mem: Memory, position, number, following, before
) -> Any:
    """Copies the rows of Q of a tile, then K and V in the order of their use.

    Returns the number of steps up to the end of the tile; `before` is that up to its
    beginning.
    """
    del following
    c = p.config
    tile, blocks = p.tile_and_blocks(mem, number)
    kv_head = lax.div(tile.head, np.int32(p.group))
    # Sequences that are packed may be empty, also at the end of the array.
    mode = plgpu.OOBFillMode.ZEROS if p.packed else None
    slot = mem.q_ring.fill(position)
    first = plus(tile.q_first, tile.start)
    q = p.rows_of(mem.q, tile, first, c.block_q, tile.head)
    plgpu.copy_gmem_to_smem(q, slot.buffers, slot.full, oob_mode=mode)

    steps = minus(blocks.end, blocks.first)
    last = jnp.asarray(plus(blocks.end, -1), jnp.int32)

    def part(name, column):
        """Returns the rows of K or V, or the part of the bias, of a block."""
        columns = plgpu.ds(column, c.block_kv)
        if name == "bias":
            rows = plgpu.ds(tile.start, c.block_q) if p.has_matrix else 0
            return p.bias_part(mem, tile, tile.head, rows, columns)
        if name == "v" and p.narrow:
            return mem.v.at[tile.batch, kv_head, :, columns]
        first = plus(tile.kv_first, column)
        return p.rows_of(mem.get(name), tile, first, c.block_kv, kv_head)

    def copy(step, *names):
        for name in names:
            slot = mem.get(f"{name}_ring").fill(plus(before, step))
            source = part(name, times(lax.sub(last, step), c.block_kv))
            buffer = slot.buffers
            if buffer.shape != source.shape:
                buffer = buffer.at[plgpu.ds(0, c.block_kv)]
            plgpu.copy_gmem_to_smem(source, buffer, slot.full, oob_mode=mode)

    with_k = ("k",) if p.bias is None else ("k", "bias")
    copy(np.int32(0), *with_k)

    @plgpu.loop(1, steps)
    def _(step):
        copy(step, *with_k)
        copy(plus(step, -1), "v")

    copy(jnp.asarray(plus(steps, -1), jnp.int32), "v")
    return plus(before, steps)

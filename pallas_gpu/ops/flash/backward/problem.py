# SPDX-License-Identifier: Apache-2.0
"""Attention's derivatives: sizes, the order of blocks, the tiles that each visits."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.ops import integers
from pallas_gpu.ops.flash import persistent
from pallas_gpu.ops.flash.backward.config import (
    CONSUMERS,
    MAX_NARROW,
    ROWS,
    AttentionBackwardConfig,
)
from pallas_gpu.ops.flash.masks import Blocks, Lengths, Mask, Scores

# Copies of the statistics of packed sequences, each a number further: TMA starts at
# multiples of 16 bytes.
SHIFTS = 4
# What the beginning and the end of a tile cost, in steps: a guess.
_STEPS_OF_A_TILE = 1.0
_COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True)


class Place(NamedTuple):
    """A tile of rows of one head, and where its sequence is.

    Attributes:
      batch: index in the arrays; 0 where sequences are packed.
      sequence: its number.
      head: of Q, or of K and V.
      start: the tile's first row, counted in its sequence.
      lengths: of the sequence; rows are those of Q.
      q_first, kv_first: the sequence's first row in the arrays.
    """

    batch: Any
    sequence: Any
    head: Any
    start: Any
    lengths: Lengths
    q_first: Any = 0
    kv_first: Any = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """The references to the inputs of a kernel, see `BackwardProblem.inputs`."""

    q: Any
    k: Any
    v: Any
    do: Any
    lse: Any
    delta: Any
    slopes: Any = None
    bias: Any = None
    of_segments: Any = None
    q_ids: Any = None
    kv_ids: Any = None
    of_tiles: Any = None
    q_starts: Any = None
    kv_starts: Any = None
    q_lengths: Any = None
    kv_lengths: Any = None
    schedule: Any = None


@dataclasses.dataclass(frozen=True)
class BackwardProblem:
    """Sizes, mask, scores and configuration of the derivatives.

    Attributes:
      batch: of the arrays: 1 where sequences are packed.
      q_len, kv_len: rows of the arrays; of packed ones, tokens of all sequences.
      kv_heads: `parts` for each head of K and V; each part has blocks of its own.
      mask: rows are those of Q, as in the forward pass.
      packed: the number of sequences that are packed, or None.
      bias, bias_dtype: the shape and the type of the bias, or None.
    """

    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: Any
    mask: Mask
    scores: Scores
    config: AttentionBackwardConfig
    packed: int | None = None
    bias: tuple[int, ...] | None = None
    bias_dtype: Any = None
    parts: int = 1

    def divided(self, parts: int) -> BackwardProblem:
        """Returns it with so many parts of the heads of Q that share K and V.

        Persistent blocks alone add parts: others have no buffer for that.
        """
        heads = self.kv_heads * parts
        found = dataclasses.replace(self, kv_heads=heads, parts=parts)
        return found if found.persistent else self

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the kernels' arrays.

        lse and delta are (batch, heads, padded_q_len); see `gradients`.
        """
        names = ["q", "k", "v", "do", "lse", "delta"]
        if self.scores.alibi:
            names.append("slopes")
        if self.bias is not None:
            names.append("bias")
        if self.mask.segments:
            names += ["of_segments", "q_ids", "kv_ids"]
        if self.packed:
            names += ["of_tiles", "q_starts", "kv_starts"]
        elif self.mask.ragged:
            names += ["q_lengths", "kv_lengths"]
        if self.persistent:
            names.append("schedule")
        return tuple(names)

    @property
    def added(self) -> tuple[str, ...]:
        """Names of the results that the kernel adds to zeros of float32."""
        dq = () if self.config.deterministic else ("dq",)
        return dq if self.parts == 1 else (*dq, "dk", "dv")

    @property
    def returned(self) -> tuple[str, ...]:
        """Names of the results that the kernel returns."""
        return ("dk", "dv") if self.parts == 1 else ()

    @property
    def wide(self) -> bool:
        """Whether dK and dV of the same rows exceed the registers of a consumer.

        Then one consumer has dV, and the other one dK.
        """
        return self.head_dim + self.v_head_dim > MAX_NARROW

    @property
    def block_kv(self) -> int:
        """Rows of K and V of a block."""
        return ROWS if self.wide else CONSUMERS * ROWS

    @property
    def group(self) -> int:
        """Heads of Q of a head of dK and dV."""
        return self.heads // self.kv_heads

    @property
    def q_tiles(self) -> int:
        return plgpu.cdiv(self.q_len, self.config.block_q)

    @property
    def padded_q_len(self) -> int:
        """Rows of the statistics: those of whole tiles of any kernel.

        A tile of packed sequences may begin at any row.
        """
        rows = self.q_len + (ROWS - 1 if self.packed else 0)
        return plgpu.align_to(rows, CONSUMERS * ROWS)

    @property
    def has_matrix(self) -> bool:
        """Whether there is a bias that differs from row to row of Q."""
        return self.bias is not None and self.bias[2] > 1

    @property
    def bias_stages(self) -> int:
        """SMEM buffers of blocks of the bias."""
        return 1 if self.wide else 2

    def bias_part(self, ref: Any, place: Place, head: Any, rows: Any, cols: Any) -> Any:
        """Returns a block of the bias of a head of Q; `rows` is 0 if it has one row."""
        assert self.bias is not None
        batch = place.sequence if self.bias[0] > 1 else 0
        return ref.at[batch, head if self.bias[1] > 1 else 0, rows, cols]

    def of_statistics(self, batch: Any, q_first: Any) -> tuple[Any, Any]:
        """Returns which copy of the statistics to use, and a sequence's first row."""
        if not self.packed:
            return batch, 0
        first = integers.divide(integers.plus(q_first, SHIFTS - 1), SHIFTS)
        first = integers.times(first, SHIFTS)
        return integers.minus(first, q_first), first

    def head_of_kv(self, head: Any) -> Any:
        """Returns the head of K and V of a head of dK and dV."""
        return integers.divide(head, self.parts) if self.parts > 1 else head

    @functools.cached_property
    def kv_tiles(self) -> int:
        return self.tiles_of(self.kv_len, self.block_kv)

    def tiles_of(self, length: int, size: int) -> int:
        """Tiles of a head; of packed sequences an upper bound for all of them."""
        return plgpu.cdiv(length, size) + (self.packed or 0)

    @property
    def tiles(self) -> int:
        """Tiles of K and V of the launch."""
        return self.batch * self.kv_heads * self.kv_tiles

    @functools.cached_property
    def blocks(self) -> int:
        """Blocks of the launch."""
        unknown = self.packed or self.mask.ragged or self.mask.segments
        asked = self.config.blocks
        if asked is None or unknown or self.wide or self.config.deterministic:
            return self.tiles
        if self.head_dim != self.v_head_dim:
            # They share a buffer of results.
            return self.tiles
        # Persistent ones take two steps for a tile, at least. Those that it lacks visit
        # tiles of Q before the first, which the mask hides.
        for tile in range(self.kv_tiles):
            found = self.tiles_of_q(None, self.place(None, 0, 0, tile, self.block_kv))
            if found.first == 0 and found.end * self.group < 2:
                return self.tiles
        return min(asked, self.tiles)

    @property
    def persistent(self) -> bool:
        """Whether a block has more than one tile of K and V; they are in a schedule."""
        return self.blocks < self.tiles

    def k_buffer(self, number: Any) -> Any:
        """Returns the buffer of K of a block's tile."""
        return lax.rem(number, np.int32(2)) if self.persistent else 0

    @property
    def splits_columns(self) -> bool:
        """Whether a consumer computes columns of dQ, and not rows."""
        return self.config.block_q == ROWS

    @property
    def dq_pieces(self) -> int:
        """Parts of a tile of dQ that one consumer computes, one after the other."""
        return 2 if self.wide else 1

    @property
    def dq_part(self) -> tuple[int, int]:
        """Rows and columns of a part of a tile of dQ."""
        if self.splits_columns:
            return ROWS, self.head_dim // (CONSUMERS * self.dq_pieces)
        return ROWS, self.head_dim

    def tile(self, mem: Any, number: Any) -> Place:
        """Returns a tile of K and V: from the schedule, or that of a block."""
        if self.persistent:
            pair, tile = divide(number, self.kv_tiles)
        else:
            pair, tile = self.pair_and_tile(number)
        batch, head = divide(pair, self.kv_heads)
        return self.place(mem, batch, head, tile, self.block_kv)

    def pair_and_tile(self, linear: Any) -> tuple[Any, Any]:
        """Returns a head of K, of all sequences, and a tile: those of a place.

        Under a causal mask the first rows have the most work: they come first, so that
        short tiles fill the gaps at the end.
        """
        pairs = self.batch * self.kv_heads
        together = math.gcd(pairs, self.config.heads_together)
        strip, within = divide(linear, together * self.kv_tiles)
        tile, pair = divide(within, together)
        return integers.plus(integers.times(strip, together), pair), tile

    def place(self, mem: Any, batch: Any, head: Any, tile: Any, size: int) -> Place:
        """Returns where a tile of `size` rows is."""
        if not self.packed:
            start = integers.times(tile, size)
            return Place(batch, batch, head, start, self.lengths(mem, batch))
        sequence, start = mem.of_tiles[tile, 0], mem.of_tiles[tile, 1]
        first = mem.q_starts[sequence], mem.kv_starts[sequence]
        return Place(0, sequence, head, start, self.lengths(mem, sequence), *first)

    def lengths(self, mem: Any, sequence: Any) -> Lengths:
        """Returns those of a sequence; rows are those of Q."""
        if self.packed:
            end = integers.plus(sequence, 1)
            pairs = ((x[end], x[sequence]) for x in (mem.q_starts, mem.kv_starts))
            return Lengths(*(integers.minus(*x) for x in pairs))
        if self.mask.ragged:
            return Lengths(mem.q_lengths[sequence], mem.kv_lengths[sequence])
        return Lengths(self.q_len, self.kv_len)

    @property
    def has_tail(self) -> bool:
        """Whether a tile of K and V may have rows that do not exist."""
        return self.mask.ragged or self.kv_len % self.block_kv != 0

    def tiles_of_q(self, mem: Any, place: Place) -> Blocks:
        """Returns the tiles of Q that see a tile of K and V.

        Rows of Q beyond the last need no mask: their sum of exponentials is infinite.
        """
        size, transposed = self.block_kv, self.mask.transposed
        found = transposed.blocks(
            Lengths(*reversed(place.lengths)),
            place.start,
            size,
            self.config.block_q,
            only_inside=self.has_tail,
        )
        if self.mask.segments:
            row = mem.of_segments.at[place.batch, lax.div(place.start, np.int32(size))]
            return found.within(blocks_of(row))
        if transposed.right is not None or self.has_tail:
            return found
        return found._replace(end_whole=found.end)

    @property
    def hides(self) -> bool:
        """Whether there may be anything to mask."""
        return self.mask != Mask() or self.has_tail

    def total(self, blocks: Blocks) -> Any:
        """The number of steps of a block: one at least, which may mask everything."""
        each = integers.minus(blocks.end, blocks.first)
        least = 2 if self.persistent else 1
        return integers.maximum(integers.times(each, self.group), least)

    def visited(self, blocks: Blocks, position: Any) -> tuple[Any, Any]:
        """Returns the head of Q in its group, and the tile, that a step visits."""
        past, member = divide(position, self.group)
        tile = integers.minus(integers.plus(blocks.end, -1), past)
        return member, integers.maximum(integers.minimum(tile, self.q_tiles - 1), 0)


@functools.lru_cache(maxsize=64)
def schedule(p: BackwardProblem) -> np.ndarray:
    """Returns the tiles of each persistent block; see `persistent.schedule`."""

    def cost(tile: int) -> float:
        place = p.place(None, 0, 0, tile, p.block_kv)
        return p.total(p.tiles_of_q(None, place)) + _STEPS_OF_A_TILE

    of_tiles = list(map(cost, range(p.kv_tiles)))
    pairs = list(map(p.pair_and_tile, range(p.tiles)))
    numbers = [pair * p.kv_tiles + tile for pair, tile in pairs]
    costs = [of_tiles[tile] for _, tile in pairs]
    return persistent.schedule(numbers, costs, p.blocks)


def divide(a: Any, b: int) -> tuple[Any, Any]:
    if isinstance(a, int):
        return divmod(a, b)
    return lax.div(a, np.int32(b)), lax.rem(a, np.int32(b))


def blocks_of(row: Any) -> Blocks:
    """Returns those that `masks.segment_blocks` has found for a tile."""
    return Blocks(*(row[i] for i in range(len(Blocks._fields))))


def launch(
    body: Any,
    out_type: Any,
    scratch: dict[str, Any],
    *,
    blocks: int,
    name: str,
    compiler_params: Any,
    interpret: Any,
) -> Any:
    """Returns the kernel of blocks that have a producer beside the consumers."""
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        kernel_name=name,
        interpret=interpret,
        compiler_params=compiler_params or _COMPILER_PARAMS,
        scratch_types=scratch,
    )

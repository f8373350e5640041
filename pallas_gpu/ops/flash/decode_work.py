# SPDX-License-Identifier: Apache-2.0
"""Decode: how queries become columns, and which CTA reads which keys."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.ops.flash.config import DecodeConfig
from pallas_gpu.ops.folded import divide, maximum, minus, plus, split, times

# Tiles whose queries are in SMEM at once, so that the rings stay full between tiles.
QUERIES = 2
# Entries of the page table that are read at once: four in each lane of a warp.
ENTRIES = 128
# Blocks that are in SMEM after they have been widened.
WIDE_STAGES = 2
# Rows of one product; its columns are multiples of 8, and at most so many in one tile,
# or half of that for heads of more than 128 dimensions.
_ROWS = 64
_COLUMNS, _MOST_COLUMNS = 8, 64


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes and options of one call.

    The queries that read the same keys are the columns of one tile: those of one head
    of K, or of a part of its queries if they are more than 64.
    """

    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: Any
    kv_dtype: Any
    page_size: int | None
    heads_first: bool
    kv_axis: int | None
    has_lengths: bool
    v_factor: float
    causal: bool
    window: int | None
    soft_cap: float | None
    factor: float
    logsumexp: bool
    config: DecodeConfig
    compiler_params: plgpu.CompilerParams | None = None
    interpret: Any = None

    @property
    def dims(self) -> int:
        """Dimensions of a head in SMEM: rows of a product, padded with zeros."""
        return plgpu.align_to(self.head_dim, _ROWS)

    @property
    def share(self) -> int:
        """Dimensions that each CTA of a cluster combines."""
        return plgpu.cdiv(self.dims, self.config.cluster)

    @property
    def combiners(self) -> int:
        """Warpgroups of a CTA that combine what several CTAs have stored."""
        return math.gcd(self.dims, self.config.consumers)

    @property
    def has_equal_shares(self) -> bool:
        """Whether the CTAs of a cluster always read equally many blocks."""
        is_shared = self.config.cluster > 1 and not self.has_lengths
        return is_shared and self.blocks(self.kv_len) % self.config.cluster == 0

    @property
    def rows(self) -> int:
        return self.config.block_kv // self.config.consumers

    @property
    def warpgroups(self) -> int:
        """Those that multiply, one that copies, and those that widen."""
        return self.config.consumers * (2 if self.is_narrow else 1) + 1

    @property
    def is_narrow(self) -> bool:
        return self.kv_dtype != self.dtype

    @property
    def wide(self) -> Any:
        """The type that the tensor core reads: narrow elements are exact in float16."""
        return jnp.dtype(jnp.float16) if self.is_narrow else self.dtype

    @property
    def scales_queries(self) -> bool:
        """Whether queries have to be scaled to fit the range of `wide`."""
        return self.wide != self.dtype

    # --- columns ----------------------------------------------------------------------

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def tile_heads(self) -> int:
        most = _MOST_COLUMNS if self.dims <= 128 else _MOST_COLUMNS // 2
        by_head = most // _padded(self.q_len)
        by_query = most // self.q_len // _COLUMNS * _COLUMNS
        return min(self.group, max(by_head, by_query))

    @property
    def heads_within(self) -> bool:
        """Whether adjacent columns are heads of one query, or queries of one head.

        Either is padded to whole instructions.
        """
        by_query = self.q_len * _padded(self.tile_heads)
        return by_query <= self.tile_heads * _padded(self.q_len)

    @property
    def runs(self) -> int:
        return self.q_len if self.heads_within else self.tile_heads

    @property
    def run(self) -> int:
        return _padded(self.tile_heads if self.heads_within else self.q_len)

    @property
    def columns(self) -> int:
        return self.runs * self.run

    def query_and_head(self, column: Any) -> tuple[Any, Any]:
        outer, inner = split(column, self.run)
        return (outer, inner) if self.heads_within else (inner, outer)

    # --- tiles ------------------------------------------------------------------------

    @property
    def tiles_of_head(self) -> int:
        return plgpu.cdiv(self.group, self.tile_heads)

    @property
    def units(self) -> int:
        return self.kv_heads * self.tiles_of_head

    def head(self, unit: Any) -> tuple[Any, Any]:
        head, part = split(unit, self.tiles_of_head)
        return head, times(part, self.tile_heads)

    @property
    def abreast(self) -> int:
        """Heads that neighbouring CTAs read at the same time, from the same rows.

        The others of a sequence come one after the other. Of the divisors of all tiles
        it is the largest that leaves at most a sixteenth of the CTAs without work.
        """
        workers = self.config.workers
        fit = [n for n in range(1, workers + 1) if self.units % n == 0]
        return max(n for n in fit if workers % n * 16 <= workers)

    @property
    def lanes(self) -> int:
        """Groups of CTAs that divide the blocks of all sequences."""
        blocks = self.batch * (self.units // self.abreast) * self.most_blocks
        return min(self.config.workers // self.abreast, blocks)

    @property
    def divides_tiles(self) -> bool:
        """Whether a tile's blocks may belong to several persistent CTAs."""
        if self.has_lengths:
            return self.lanes > 1
        return self.blocks_of_lane % self.blocks(self.kv_len) != 0

    @property
    def blocks_of_lane(self) -> int:
        """Blocks of each lane where all sequences are as long as the cache."""
        tiles = self.batch * (self.units // self.abreast)
        return plgpu.cdiv(tiles * self.blocks(self.kv_len), self.lanes)

    # --- keys -------------------------------------------------------------------------

    @property
    def sees_whole_blocks(self) -> bool:
        """Whether some query sees each row of all blocks."""
        if self.has_lengths or self.window is not None:
            return False
        return self.kv_len % self.config.block_kv == 0

    @property
    def most_blocks(self) -> int:
        visible = self.kv_len
        if self.window is not None:
            # A window may begin within a block.
            most = self.window + self.q_len - 1 + self.config.block_kv - 1
            visible = min(visible, most)
        return max(plgpu.cdiv(visible, self.config.block_kv), 1)

    @property
    def blocks_of_entries(self) -> int:
        """Blocks whose pages are read from the page table at once."""
        assert self.page_size is not None
        size = self.config.block_kv
        return ENTRIES * min(self.page_size, size) // size

    def first_row(self, length: Any) -> Any:
        if self.window is None:
            return times(length, 0)
        return maximum(plus(length, 1 - self.q_len - self.window), 0)

    def first_block(self, length: Any) -> Any:
        return divide(self.first_row(length), self.config.block_kv)

    def blocks(self, length: Any) -> Any:
        """Returns the blocks that a tile reads, at least one."""
        size = self.config.block_kv
        end = divide(plus(length, size - 1), size)
        if self.window is not None:
            end = minus(end, self.first_block(length))
        return maximum(end, 1)


def _padded(n: int) -> int:
    return plgpu.align_to(n, _COLUMNS)


# --- pieces ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Piece:
    """Blocks of one tile that one CTA reads.

    Attributes:
      number: index among those of the CTA.
      position: blocks that the CTA has read before.
      sequence, unit: the tile.
      length: valid rows of the sequence's K and V.
      first, last: its blocks, `last` not included.
      blocks: those of the tile.
      start: the number of the tile's first block among all blocks.
    """

    number: Any
    position: Any
    sequence: Any
    unit: Any
    length: Any
    first: Any
    last: Any
    blocks: Any
    start: Any

    def read(self, block: Any) -> Any:
        return plus(self.position, minus(block, self.first))

    @property
    def is_whole(self) -> Any:
        return lax.eq(lax.sub(self.last, self.first), self.blocks)


def length_of(p: Problem, lengths: Any, sequence: Any) -> Any:
    if lengths is None:
        return jnp.int32(p.kv_len)
    return lax.clamp(np.int32(0), lengths[sequence], np.int32(p.kv_len))


@dataclasses.dataclass(frozen=True)
class Share:
    """The pieces of one of a cluster's CTAs: a part of one tile."""

    p: Problem
    lengths: Any

    def for_each(self, visit: Callable[[Piece], None]) -> None:
        p = self.p
        sequence, unit = split(lax.axis_index("tile"), p.units)
        length = length_of(p, self.lengths, sequence)
        blocks = p.blocks(length)
        part = divide(plus(blocks, p.config.cluster - 1), p.config.cluster)
        first = lax.min(times(lax.axis_index("split"), part), blocks)
        last = lax.min(plus(first, part), blocks)
        zero = jnp.int32(0)
        visit(Piece(zero, zero, sequence, unit, length, first, last, blocks, zero))


@dataclasses.dataclass(frozen=True)
class Lane:
    """The pieces of a persistent CTA: equally many blocks of the sequence of all.

    Attributes:
      p: sizes.
      lengths: reference to the lengths, or None.
      lane, neighbour: its group of CTAs, and its index in it.
      part: blocks of each lane.
      first: the sequence that its first block belongs to.
      before: blocks of the sequences before that one.
      total: all blocks.
    """

    p: Problem
    lengths: Any
    lane: Any
    neighbour: Any
    part: Any
    first: Any
    before: Any
    total: Any

    @classmethod
    def of(cls, p: Problem, lengths: Any) -> Lane:
        lane, neighbour = split(lax.axis_index("worker"), p.abreast)
        tiles = p.units // p.abreast
        if lengths is None:
            blocks = p.blocks(p.kv_len) * tiles
            first = divide(times(lane, p.blocks_of_lane), blocks)
            before, part = times(first, blocks), jnp.int32(p.blocks_of_lane)
            total = jnp.int32(p.batch * blocks)
            return cls(p, lengths, lane, neighbour, part, first, before, total)
        each = jnp.clip(lengths[...], 0, p.kv_len)
        blocks = times(p.blocks(each), tiles)
        ends = jnp.cumsum(blocks)
        total = jnp.sum(blocks)
        part = divide(plus(total, p.lanes - 1), p.lanes)
        past = ends <= times(lane, part)
        first = jnp.sum(past.astype(jnp.int32))
        before = jnp.max(jnp.where(past, ends, 0))
        return cls(p, lengths, lane, neighbour, part, first, before, total)

    @property
    def start(self) -> Any:
        return times(self.lane, self.part)

    @property
    def end(self) -> Any:
        return lax.min(plus(self.start, self.part), self.total)

    def first_piece(self, visit: Callable[[Piece], None]) -> None:
        @plgpu.when(lax.lt(self.start, self.end))
        def _():
            visit(self._piece(jnp.int32(0), self.start, self.first, self.before))

    def for_each(self, visit: Callable[[Piece], None]) -> None:
        tiles = self.p.units // self.p.abreast

        def more(carry):
            return lax.lt(carry[1], self.end)

        def advance(carry):
            number, position, sequence, before = carry
            piece = self._piece(*carry)
            visit(piece)
            position = plus(position, minus(piece.last, piece.first))
            after = plus(before, times(piece.blocks, tiles))
            is_last = lax.ge(position, after)
            sequence = lax.select(is_last, plus(sequence, 1), sequence)
            before = lax.select(is_last, after, before)
            return plus(number, 1), position, sequence, before

        lax.while_loop(
            more, advance, (jnp.int32(0), self.start, self.first, self.before)
        )

    def _piece(self, number: Any, position: Any, sequence: Any, before: Any) -> Piece:
        p = self.p
        length = length_of(p, self.lengths, sequence)
        blocks = p.blocks(length)
        tile, first = split(minus(position, before), blocks)
        return Piece(
            number=number,
            position=minus(position, self.start),
            sequence=sequence,
            unit=plus(times(tile, p.abreast), self.neighbour),
            length=length,
            first=first,
            last=lax.min(plus(first, minus(self.end, position)), blocks),
            blocks=blocks,
            start=minus(position, first),
        )

    def lanes_of(self, start: Any, blocks: Any) -> tuple[Any, Any]:
        """Returns the first and the last lane that read blocks of a tile."""
        last = plus(lax.add(start, blocks), -1)
        return lax.div(start, self.part), lax.div(last, self.part)

    def worker(self, lane: Any) -> Any:
        """Returns the CTA of another lane that reads the same heads."""
        return lax.add(times(lane, self.p.abreast), self.neighbour)


# --- the default configuration --------------------------------------------------------

# SMEM that is left to barriers, alignment and the exchange between warps.
_OTHER_BYTES = 6 * 1024
# Blocks in flight beyond which more do not help.
_MOST_STAGES = 16
# Registers of a thread for a result, scores and widened keys, beside a second consumer.
_MOST_REGISTERS = 44
# Every card has clusters of 8 (CUDA programming guide, "Thread Block Clusters").
_CLUSTERS = 8, 4
# Rows of a cache of 8 bits for a CTA of a cluster. With more it takes longer to widen
# them than it takes all SMs to combine results in GMEM.
_MOST_WIDENED = 1024
# Parts of a tile that one CTA combines: more take longer than they save.
_MOST_PARTS = 32


def default_config(p: Problem, target: Any) -> DecodeConfig:
    """Returns the configuration of a problem, whose own one is not regarded.

    Where there are few tiles the CTAs of a cluster share each: they exchange results
    faster than by GMEM. No more than half of the SMs, because a GPC may have room for
    one such cluster only.
    """
    per_thread = (p.dims + 64) * p.columns // 128
    if p.is_narrow:
        per_thread += p.dims // 4
    tiles, sms = p.batch * p.units, target.sm_count
    config = DecodeConfig(workers=min(sms, _MOST_PARTS * tiles))
    if per_thread <= _MOST_REGISTERS:
        config = dataclasses.replace(config, consumers=2, block_kv=128)
    visible = p.kv_len if p.window is None else min(p.kv_len, p.window)
    for cluster in _CLUSTERS:
        is_slow = p.is_narrow and visible > _MOST_WIDENED * cluster
        if sms // 4 <= tiles * cluster <= sms // 2 and not is_slow:
            config = dataclasses.replace(config, cluster=cluster)
            break
    stages = _stages(p, config, target.smem_bytes_per_block)
    return dataclasses.replace(config, stages=stages)


def _stages(p: Problem, c: DecodeConfig, smem_bytes: int) -> int:
    size = p.dtype.itemsize
    rows = c.block_kv // c.consumers
    parts = c.consumers - (c.cluster == 1)
    if c.cluster > 1:
        # What the other CTAs send.
        parts += c.consumers + 1
    used = QUERIES * p.columns * p.dims * size
    used += c.consumers * p.columns * rows * size
    used += p.scales_queries * c.consumers * p.columns * p.dims * size
    used += parts * (p.dims + 2) * p.columns * 4
    if p.is_narrow:
        used += WIDE_STAGES * c.block_kv * p.dims * size
    stage = 2 * c.block_kv * p.dims * p.kv_dtype.itemsize
    return min(max((smem_bytes - used - _OTHER_BYTES) // stage, 1), _MOST_STAGES)

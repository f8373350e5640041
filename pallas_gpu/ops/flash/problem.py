# SPDX-License-Identifier: Apache-2.0
"""What one call of attention computes: sizes, mask, and its tiles in their order."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu
from pallas_gpu.ops import integers
from pallas_gpu.ops.flash import narrow, persistent
from pallas_gpu.ops.flash.config import AttentionConfig, BlackwellAttentionConfig
from pallas_gpu.ops.flash.masks import Blocks, Lengths, Mask, Scores

# What the beginning and the end of a tile cost, in steps of the long loop; a guess that
# only decides how even the work of persistent blocks is.
_STEPS_OF_A_TILE = 0.75


class Operands(NamedTuple):
    """The arrays of a call; None for those that it does not have.

    Those of packed sequences have no batch dimension: (tokens, heads, head_dim), and
    `q_starts` and `kv_starts` have the first token of each sequence, and the end of the
    last one.

    Attributes:
      q: (batch, q_len, heads, head_dim).
      k, v: (batch, kv_len, kv_heads, head_dim or v_dim).
      bias: (batch or 1, heads or 1, q_len or 1, kv_len).
      slopes: (heads,) float32: of ALiBi.
      scales: (batch or 1, heads, 2) float32: factors of scores and result.
      q_ids, kv_ids: (batch, q_len) and (batch, kv_len), int32: segments.
      q_lengths, kv_lengths: (batch,), int32.
      q_starts, kv_starts: (batch + 1,), int32.
    """

    q: Any
    k: Any
    v: Any
    bias: Any = None
    slopes: Any = None
    scales: Any = None
    q_ids: Any = None
    kv_ids: Any = None
    q_lengths: Any = None
    kv_lengths: Any = None
    q_starts: Any = None
    kv_starts: Any = None


class Tile(NamedTuple):
    """Rows of Q of one head, and where their sequence is.

    Attributes:
      batch, head: the sequence and the head.
      q_start: the tile's first row, counted in its sequence.
      lengths: of the sequence.
      q_first, kv_first: the sequence's first row in the arrays.
    """

    batch: Any
    head: Any
    q_start: Any
    lengths: Lengths
    q_first: Any = 0
    kv_first: Any = 0


@dataclasses.dataclass(frozen=True)
class Problem[Config: (AttentionConfig, BlackwellAttentionConfig)]:
    """Everything that is known when a kernel is traced.

    Attributes:
      q_len, kv_len: rows of the arrays; of packed ones, tokens of all sequences.
      bias, bias_dtype: the shape and the type of the bias, or None.
      packed: whether the sequences are packed.
      logsumexp: whether that is a result, too.
      deterministic: whether the backward pass adds in a fixed order.
      out_dtype: of the result.
    """

    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    dtype: Any
    mask: Mask
    scores: Scores
    config: Config
    bias: tuple[int, ...] | None = None
    bias_dtype: Any = None
    packed: bool = False
    logsumexp: bool = False
    deterministic: bool = False
    out_dtype: Any = None

    @property
    def narrow(self) -> bool:
        """Whether the operands are of 8 bits."""
        return narrow.is_narrow(self.dtype)

    @property
    def v_block(self) -> tuple[int, int]:
        """The shape of a block of V in SMEM; 8-bit ones are transposed."""
        rows, columns = self.config.block_kv, self.v_dim
        return (columns, rows) if self.narrow else (rows, columns)

    @property
    def lengths(self) -> Lengths:
        """Of every sequence, where they are known when the kernel is traced."""
        return Lengths(self.q_len, self.kv_len)

    @property
    def factor(self) -> float:
        """Makes of scores exponents of two."""
        return self.scores.factor

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Of the result."""
        return self._shape(self.q_len, self.heads, self.v_dim)

    @property
    def logsumexp_shape(self) -> tuple[int, ...]:
        """(batch, heads, q_len), or (heads, tokens)."""
        return self._shape(self.heads, self.q_len)

    def _shape(self, *sizes: int) -> tuple[int, ...]:
        return sizes if self.packed else (self.batch, *sizes)

    # --- tiles ------------------------------------------------------------------------

    @property
    def q_tiles(self) -> int:
        """Tiles of a head; of packed sequences an upper bound for all of them."""
        own = plgpu.cdiv(self.q_len, self.config.block_q)
        return own + self.batch if self.packed else own

    @property
    def tiles(self) -> int:
        """Of the launch."""
        sequences = 1 if self.packed else self.batch
        return sequences * self.heads * self.q_tiles

    @property
    def persistent(self) -> bool:
        """Whether a block computes more than one tile."""
        return self.workers < self.tiles

    @property
    def workers(self) -> int:
        """Blocks of the launch: no more than there is work for."""
        return min(self.config.blocks or self.tiles, self.tiles)

    def place(self, linear: Any) -> tuple[Any, Any, Any]:
        """Returns (batch, head, number of the tile) of a position in the launch.

        Under a causal mask the last rows have the most work: they come first, so that
        short tiles fill the gaps at the end.
        """
        pairs = self.tiles // self.q_tiles
        together = math.gcd(pairs, self.config.heads_together)
        strip, within = _split(linear, together * self.q_tiles)
        qi, pair = _split(within, together)
        pair = integers.plus(integers.times(strip, together), pair)
        batch, head = _split(pair, self.heads)
        if self.last_rows_first:
            qi = integers.minus(self.q_tiles - 1, qi)
        return batch, head, qi

    @property
    def uneven(self) -> bool:
        """Whether tiles differ in their work, and that is static."""
        banded = self.mask.right is not None or self.mask.left is not None
        static = not self.mask.segments and not self.mask.ragged
        return (banded or self.idles) and static

    @property
    def idles(self) -> bool:
        """Whether consumers skip a head's last tile where they have no rows.

        Not with a bias: each of them waits for its blocks.
        """
        c = self.config
        if self.packed or self.bias is not None or not isinstance(c, AttentionConfig):
            return False
        return 0 < self.q_len % c.block_q <= c.block_q - c.rows

    def cost(self, number: int) -> float:
        """Returns the time of a tile of a head in steps, where the mask is static."""
        share, c = 1.0, self.config
        if self.idles and isinstance(c, AttentionConfig):
            rows = min(self.q_len - number * c.block_q, c.block_q)
            # A fixed part, and as much for each consumer with rows: a guess, too.
            share = (1 + plgpu.cdiv(rows, c.rows)) / (1 + c.consumers)
        return share * (self.steps(number) + _STEPS_OF_A_TILE)

    def steps(self, number: int) -> int:
        """Returns how many blocks a tile of a head sees, where the mask is static."""
        found = self._blocks_of_tiles[number]
        return found.end - found.first

    @property
    def last_rows_first(self) -> bool:
        """Whether the tiles of a head are computed in descending order."""
        grows = self.mask.right is not None and self.mask.left is None
        return grows and not self.packed

    # --- blocks of K and V ------------------------------------------------------------

    def blocks(self, tile: Tile, of_segments: Blocks | None = None) -> Blocks:
        """Returns those that a tile sees, at least one."""
        c = self.config
        found = self.mask.blocks(tile.lengths, tile.q_start, c.block_q, c.block_kv)
        if of_segments is not None:
            found = found.within(of_segments)
        return found.at_least_one() if self.may_see_nothing else found

    @property
    def may_see_nothing(self) -> bool:
        """Whether there may be rows without columns, a bias left aside."""
        return self.mask.may_see_nothing(self.lengths)

    @property
    def masks(self) -> bool:
        """Whether the last block of a tile may be masked."""
        return self._cut > 0

    @property
    def masks_more(self) -> bool:
        """Whether blocks before the last one may be, too, down from the last."""
        return self._cut > 1

    @property
    def masks_first(self) -> bool:
        """Whether the first blocks of a tile may be masked."""
        return self.mask.segments or self.mask.left is not None

    @functools.cached_property
    def _cut(self) -> int:
        """The largest number of blocks at the end of a tile that are cut."""
        if self.mask.segments:
            return 2
        if self.mask.ragged:
            return 1 if self.mask.right is None else 2
        return max(b.end - b.end_whole for b in self._blocks_of_tiles)

    @functools.cached_property
    def _blocks_of_tiles(self) -> list[Blocks]:
        """Of each tile of a head, where the mask is static."""
        return [
            self.blocks(Tile(0, 0, start, self.lengths))
            for start in range(0, self.q_len, self.config.block_q)
        ]


def _split(a: Any, b: int) -> tuple[Any, Any]:
    quotient = integers.divide(a, b)
    if b == 1:
        return quotient, 0
    return quotient, integers.minus(a, integers.times(quotient, b))


def packed_tiles(starts: Any, tiles: int, block_q: int) -> jax.Array:
    """Returns sequence and first row of each tile of packed sequences.

    Args:
      starts: (sequences + 1,), int32: first tokens, and the end of the last one.
      tiles: how many; those that are left over lie behind the end of a sequence.

    Returns:
      (tiles, 2), int32; rows are counted in the sequence.
    """
    own = (jnp.diff(starts) + (block_q - 1)) // block_q
    ends = jnp.cumsum(own)
    number = jnp.arange(tiles, dtype=jnp.int32)
    sequence = jnp.sum(number[:, None] >= ends[None, :], axis=1)
    sequence = jnp.minimum(sequence, own.shape[0] - 1)
    first = (number - (ends - own)[sequence]) * block_q
    return jnp.stack([sequence, first], axis=1).astype(jnp.int32)


@functools.lru_cache(maxsize=64)
def schedule(p: Problem[AttentionConfig]) -> np.ndarray:
    """Returns the tiles of each worker, for persistent blocks and uneven tiles."""
    tiles = range(p.tiles)
    costs = [p.cost(p.place(i)[2]) for i in tiles]
    return persistent.schedule(tiles, costs, p.workers)

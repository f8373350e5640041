# SPDX-License-Identifier: Apache-2.0
"""What one call of attention computes: sizes, mask, and its tiles in their order."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.ops import memory
from pallas_gpu.ops.flash import narrow
from pallas_gpu.ops.flash.backward.config import AttentionBackwardConfig
from pallas_gpu.ops.flash.config import AttentionConfig, BlackwellAttentionConfig
from pallas_gpu.ops.flash.masks import Blocks, Lengths, Mask, Scores
from pallas_gpu.ops.flash.persistent import Visits, of_workers
from pallas_gpu.ops.folded import divide, minus, plus, split, times
from pallas_gpu.ops.memory import Memory

# What the beginning and the end of a tile cost, in steps of the long loop; a guess that
# only decides how even the work of persistent blocks is.
_STEPS_OF_A_TILE = 0.75
# Rows that are stored without TMA at a time: those of a tile of the swizzle.
_STORED = 8
# Exponentials without this take twice as many instructions.
APPROXIMATE = plgpu.CompilerParams(approx_math=True)


def launch(
    p: Any,
    name: str,
    body: Callable[[Memory], None],
    inputs: Iterable[str],
    results: Mapping[str, Any],
    scratch: Mapping[str, Any],
    **axes: Any,
) -> Callable[[Mapping[str, Any]], dict[str, jax.Array]]:
    """Returns a kernel: a function of arrays by their names, of which it takes some.

    It returns the results by their names. The arguments are those of `memory.launch`.
    """
    inputs = tuple(inputs)
    kernel = memory.launch(p, name, body, inputs, results, scratch, **axes)

    def call(arrays: Mapping[str, Any]) -> dict[str, jax.Array]:
        found = kernel(*(arrays[x] for x in inputs))
        return dict(zip(results, found, strict=True))

    return call


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
    """Rows of one head, and where their sequence is.

    Attributes:
      batch: index in the arrays; packed ones that have this dimension have one.
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


@dataclasses.dataclass(frozen=True)
class Sizes[
    Config: (AttentionConfig, BlackwellAttentionConfig, AttentionBackwardConfig)
]:
    """What is known of a call when a kernel is traced, forward or backward.

    Attributes:
      batch: number of sequences.
      q_len, kv_len: rows of the arrays; of packed ones, tokens of all sequences.
      mask: rows are those of Q.
      bias, bias_dtype: the shape and the type of the bias, or None.
      packed: whether the sequences are packed.
      compiler_params, interpret: see `kernel`.
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
    compiler_params: plgpu.CompilerParams | None = None
    interpret: Any = None

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def has_matrix(self) -> bool:
        """Whether there is a bias that differs from row to row of Q."""
        return self.bias is not None and self.bias[2] > 1

    def bias_part(self, mem: Any, tile: Tile, head: Any, rows: Any, cols: Any) -> Any:
        """Returns a block of the bias of a head of Q; `rows` is 0 if it has one row."""
        assert self.bias is not None
        batch = tile.sequence if self.bias[0] > 1 else 0
        return mem.bias.at[batch, head if self.bias[1] > 1 else 0, rows, cols]

    def slope(self, mem: Any, tile: Tile, head: Any) -> Any:
        if not self.scores.alibi:
            return None
        return mem.slopes[tile.sequence if mem.slopes.shape[0] > 1 else 0, head]

    @property
    def known(self) -> bool:
        """Whether the blocks that a tile sees are, when a kernel is traced."""
        return not (self.packed or self.mask.ragged or self.mask.segments)

    def tiles_of(self, length: int, size: int) -> int:
        return plgpu.cdiv(length, size) + (self.batch if self.packed else 0)

    def tile_of(self, mem: Any, batch: Any, head: Any, tile: Any, size: int) -> Tile:
        """Returns where a tile of `size` rows is."""
        if not self.packed:
            start = times(tile, size)
            return Tile(batch, batch, head, start, self.lengths(mem, batch))
        sequence, start = mem.of_tiles[tile, 0], mem.of_tiles[tile, 1]
        first = mem.q_starts[sequence], mem.kv_starts[sequence]
        lengths = self.lengths(mem, sequence, first)
        return Tile(0, sequence, head, start, lengths, *first)

    def lengths(
        self, mem: Any = None, sequence: Any = None, first: Any = ()
    ) -> Lengths:
        """Returns those of a sequence, or of all if they are known.

        Args:
          first: its first rows, if they have been loaded already.
        """
        if mem is None or not self.mask.ragged:
            return Lengths(self.q_len, self.kv_len)
        if not self.packed:
            return Lengths(mem.q_lengths[sequence], mem.kv_lengths[sequence])
        end, starts = plus(sequence, 1), (mem.q_starts, mem.kv_starts)
        firsts = first or (None, None)
        return Lengths(
            *(
                minus(x[end], x[sequence] if n is None else n)
                for x, n in zip(starts, firsts, strict=True)
            )
        )

    def _place(self, linear: Any, tiles: int, pairs: int) -> tuple[Any, Any]:
        """Returns the head, of those of all sequences, and the tile of a position."""
        together = math.gcd(pairs, self.config.heads_together)
        strip, within = split(linear, together * tiles)
        tile, pair = split(within, together)
        return plus(times(strip, together), pair), tile


@dataclasses.dataclass(frozen=True)
class Problem[Config: (AttentionConfig, BlackwellAttentionConfig)](Sizes[Config]):
    """A forward pass.

    Attributes:
      logsumexp: whether that is a result, too.
      deterministic: whether the backward pass adds in a fixed order.
      backward: the configuration of the backward pass, if one is given.
      out_dtype: of the result.
    """

    logsumexp: bool = False
    deterministic: bool = False
    backward: AttentionBackwardConfig | None = None
    out_dtype: Any = None

    @property
    def narrow(self) -> bool:
        return narrow.is_narrow(self.dtype)

    @property
    def v_block(self) -> tuple[int, int]:
        """The shape of a block of V in SMEM; 8-bit ones are transposed."""
        rows, columns = self.config.block_kv, self.v_dim
        return (columns, rows) if self.narrow else (rows, columns)

    @property
    def results(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The result, and logsumexp: (batch, heads, q_len), or (heads, tokens)."""
        outer: tuple[int, ...] = () if self.packed else (self.batch,)
        shape: tuple[int, ...] = *outer, self.q_len, self.heads, self.v_dim
        found = {"out": jax.ShapeDtypeStruct(shape, self.out_dtype)}
        if self.logsumexp:
            shape = *outer, self.heads, self.q_len
            found["lse"] = jax.ShapeDtypeStruct(shape, jnp.float32)
        return found

    # --- tiles ------------------------------------------------------------------------

    @property
    def q_tiles(self) -> int:
        """Tiles of a head; of packed sequences an upper bound for all of them."""
        return self.tiles_of(self.q_len, self.config.block_q)

    @property
    def tiles(self) -> int:
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
        pair, qi = self._place(linear, self.q_tiles, self.tiles // self.q_tiles)
        batch, head = split(pair, self.heads)
        if self.last_rows_first:
            qi = minus(self.q_tiles - 1, qi)
        return batch, head, qi

    def visits(self, mem: Any) -> Visits:
        """Returns a block's tiles in the order in which its warpgroups visit them."""
        worker = lax.axis_index("block")
        return Visits(self.tiles, worker, self.workers, mem.get("schedule"))

    def tile_and_blocks(self, mem: Any, linear: Any) -> tuple[Tile, Blocks]:
        """Returns the tile at a position in the launch, and the blocks that it sees."""
        tile = self.tile_of(mem, *self.place(linear), self.config.block_q)
        of_segments = None
        if self.mask.segments:
            number = divide(tile.start, self.config.block_q)
            of_segments = Blocks.loaded(mem.of_segments.at[tile.batch, number])
        return tile, self.blocks(tile, of_segments)

    def rows_of(self, ref: Any, tile: Tile, first: Any, size: int, head: Any) -> Any:
        rows = plgpu.ds(first, size)
        return ref.at[rows, head] if self.packed else ref.at[tile.batch, rows, head]

    @property
    def uneven(self) -> bool:
        """Whether tiles differ in their work, and that is static."""
        banded = self.mask.right is not None or self.mask.left is not None
        return (banded or self.idles) and self.known

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
        found = self.mask.blocks(tile.lengths, tile.start, c.block_q, c.block_kv)
        if of_segments is not None:
            found = found.within(of_segments)
        return found.at_least_one() if self.may_see_nothing else found

    @property
    def may_see_nothing(self) -> bool:
        """Whether there may be rows without columns, a bias left aside."""
        return self.mask.may_see_nothing(self.lengths())

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
            self.blocks(Tile(0, 0, 0, start, self.lengths()))
            for start in range(0, self.q_len, self.config.block_q)
        ]


def store_rows(result: Any, buffer: Any, rows: Any, left: Any, some: Any) -> None:
    """Starts the copy of a tile, through SMEM, to rows of GMEM, if there are some.

    Of packed sequences only the first `left` rows are stored: TMA would also write the
    first rows of the next sequence. None: all are.
    """
    buffer[...] = result
    plgpu.commit_smem()
    if left is None:
        plgpu.copy_smem_to_gmem(buffer, rows, some)
        return
    whole = left >= result.shape[0]

    @plgpu.when(whole)
    def _():
        plgpu.copy_smem_to_gmem(buffer, rows)

    @plgpu.when(jnp.logical_not(whole))
    def _():
        # Few rows at a time, for few registers.
        @plgpu.loop(0, result.shape[0] // _STORED)
        def _(i):
            start = times(i, _STORED)
            part = plgpu.ds(start, _STORED)
            values = buffer[part]
            row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0)
            plgpu.store(rows, part, values, mask=row < left - start)


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
    tiles = range(p.tiles)
    costs = [p.cost(p.place(i)[2]) for i in tiles]
    return of_workers(tiles, costs, p.workers)

# SPDX-License-Identifier: Apache-2.0
"""Products of 16-bit tokens with narrow weights: what both of their kernels share."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_gpu import arch, errors, expect
from pallas_gpu.ops.gemm.epilogue import PLAIN, Epilogue
from pallas_gpu.ops.narrow import widen


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a kernel computes.

    Attributes:
      tokens, n, k: sizes.
      x, w, out: element types.
      group: elements of K that share a scale, or None.
      scaled: whether columns have scales.
      epilogue: activation, and whether there is a bias.
    """

    tokens: int
    n: int
    k: int
    x: jnp.dtype
    w: jnp.dtype
    out: jnp.dtype
    group: int | None = None
    scaled: bool = False
    epilogue: Epilogue = PLAIN

    @property
    def depth_bytes(self) -> int:
        """Bytes of a row of a tile of weights: those of the widest swizzle."""
        return 128

    @property
    def depth(self) -> int:
        """Elements of K of a tile of weights."""
        return self.depth_bytes * 8 // widen.bits(self.w)

    @property
    def operands(self) -> list[str]:
        """The names of a kernel's arguments after x and w, in order."""
        given = {
            "masks": widen.is_integer(self.w),
            "group_scale": self.group is not None,
            "scale": self.scaled,
            "bias": self.epilogue.bias,
        }
        return [name for name, present in given.items() if present]

    def units(self, columns: int) -> int:
        """Units (see `widen.py`) of so many columns of weights."""
        size = widen.unit_type(self.w).itemsize
        return columns * widen.bits(self.w) // 8 // size

    def groups(self, columns: int) -> int:
        """Groups that have elements in so many columns of weights, from a group's."""
        assert self.group is not None
        return max(columns // self.group, 1)

    def converter(self, masks: Any) -> widen.Converter:
        """The conversion of weights, with a reference to its masks."""
        values = None if masks is None else [masks[i] for i in range(3)]
        return widen.Converter(self.w, self.x, values)

    def load(self, ref: Any, columns: Any) -> Any:
        """Loads a value for each of some columns of the result; None if absent."""
        return None if ref is None else ref[columns].astype(jnp.float32)

    def finish(self, sums: Any, scale: Any, bias: Any) -> Any:
        """Returns the result, of sums and vectors of a part (columns, tokens)."""
        for vector, combine in ((scale, lax.mul), (bias, lax.add)):
            if vector is not None:
                sums = combine(sums, lax.broadcast_in_dim(vector, sums.shape, (0,)))
        return self.epilogue.function()(sums).astype(self.out)


@expect.arguments(
    rows=expect.choice_of(64, 128, 256),
    tokens=expect.integer(16, 128),
    stages=expect.integer(2),
    splits=expect.choice_of(1, 2, 4, 8),
    warpgroups=expect.choice_of(1, 2, 4),
    blocks=expect.optional(expect.integer(1)),
)
@dataclasses.dataclass(frozen=True)
class LinearFewConfig:
    """Tile sizes and schedule of `linear` for few tokens and narrow weights.

    Attributes:
      rows: columns of the result of a block's tile: 64, 128 or 256.
      tokens: of a tile, a multiple of 16 up to 128.
      stages: SMEM buffers of a warpgroup's ring, 2 or more.
      splits: blocks of a cluster, which divide K: 1, 2, 4 or 8.
      warpgroups: of a block that multiply: 1, 2 or 4. A warpgroup has 64 rows; if there
        are more, they divide the block's part of K.
      resident: whether the block's part of the tokens stays in SMEM, and only weights
        go through the rings.
      blocks: maximum number of blocks for a tile of tokens, which then loop over tiles
        of columns; None is no limit.

    Raises:
      ArgumentError: sizes that do not match the tensor core or each other.
    """

    rows: int = 64
    tokens: int = 16
    stages: int = 4
    splits: int = 1
    warpgroups: int = 1
    resident: bool = False
    blocks: int | None = None

    def __post_init__(self):
        if self.tokens % 16:
            raise errors.ArgumentError(
                "LinearFewConfig: the tensor core does not support this tile",
                expected="tokens a multiple of 16",
                got=f"tokens={self.tokens}",
                hint="start from LinearFewConfig()",
            )
        if self.warpgroups % self.across:
            raise errors.ArgumentError(
                "LinearFewConfig: the warpgroups do not divide the tile",
                expected="64 rows for each warpgroup, or for each that divides K",
                got=f"rows={self.rows}, warpgroups={self.warpgroups}",
                hint="rows=64 suits any number of warpgroups",
            )

    @property
    def across(self) -> int:
        """Warpgroups of a block that have different rows."""
        return self.rows // 64

    @property
    def parts(self) -> int:
        """Parts of K."""
        return self.splits * (self.warpgroups // self.across)


@expect.arguments(
    tokens=expect.choice_of(64, 128, 192, 256),
    depth=expect.choice_of(64, 128),
    stages=expect.integer(2),
    strip=expect.integer(1),
    blocks=expect.integer(2),
)
@dataclasses.dataclass(frozen=True)
class LinearManyConfig:
    """Tile sizes and schedule of `linear` for many tokens and narrow weights.

    Attributes:
      tokens: of a tile: 64, 128, 192 or 256; the tile has 128 columns of the result.
      depth: elements of K of a step: 64 or 128.
      stages: SMEM buffers of the ring, 2 or more.
      paired: whether two blocks form a cluster and share tokens.
      strip: width of a strip of the order of tiles, in tiles of columns.
      blocks: number of blocks, 2 or more; one per SM.

    Raises:
      ArgumentError: sizes that are not supported.
    """

    tokens: int = 256
    depth: int = 64
    stages: int = 4
    paired: bool = True
    strip: int = 8
    blocks: int = arch.SM_90A.sm_count

    @property
    def cluster_size(self) -> int:
        """Blocks of a cluster."""
        return 2 if self.paired else 1

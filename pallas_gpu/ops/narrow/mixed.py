# SPDX-License-Identifier: Apache-2.0
"""Products of 16-bit tokens with narrow weights: what both of their kernels share."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_gpu import arch, errors, expect
from pallas_gpu.ops.gemm.config import Tiling
from pallas_gpu.ops.gemm.epilogue import PLAIN, Epilogue
from pallas_gpu.ops.gemm.problem import Problem
from pallas_gpu.ops.narrow import widen

# Bytes of a row of a tile of weights: those of the widest swizzle.
DEPTH_BYTES = 128


def problem(
    tokens: int,
    n: int,
    k: int,
    x: jnp.dtype,
    w: jnp.dtype,
    out: jnp.dtype,
    group: int | None = None,
    scaled: bool = False,
    epilogue: Epilogue = PLAIN,
) -> Problem:
    """Returns the product of tokens and weights (N, K).

    Args:
      tokens, n, k: sizes.
      x, w, out: element types.
      group: elements of K that share a scale, or None.
      scaled: whether columns have scales.
      epilogue: activation, and whether there is a bias.
    """
    given = {
        "masks": widen.is_integer(w),
        "group_scale": group is not None,
        "scale": scaled,
    }
    return Problem(
        m=tokens,
        n=n,
        k=k,
        dtype=x,
        out_dtype=out,
        transpose_b=True,
        epilogue=epilogue,
        right=w,
        scales=tuple(name for name, present in given.items() if present),
        group=group,
    )


def groups(p: Problem, columns: int) -> int:
    """Groups that have elements in so many columns of weights, from a group's."""
    assert p.group is not None
    return max(columns // p.group, 1)


def converter(w: Any, x: Any, masks: Any) -> widen.Converter:
    """The conversion of weights to the type of x, with a reference to its masks."""
    return widen.Converter(
        w, x, None if masks is None else [masks[i] for i in range(3)]
    )


def finisher(p: Problem, mem: Any, columns: Any) -> Any:
    """Returns the function of sums of some columns: (columns, tokens) of the result."""
    refs = ((mem.scale, lax.mul), (mem.bias, lax.add))
    vectors = [
        (ref[columns].astype(jnp.float32), combine)
        for ref, combine in refs
        if ref is not None
    ]

    def finish(sums: Any) -> Any:
        for vector, combine in vectors:
            sums = combine(sums, lax.broadcast_in_dim(vector, sums.shape, (0,)))
        return p.epilogue.function()(sums).astype(p.out_dtype)

    return finish


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
class LinearManyConfig(Tiling):
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

    # Weights become the left operand of a transposed product.
    transposed = True
    tile_m = epilogue_m = epilogue_n = 64
    minor = "m"

    @property
    def tile_n(self) -> int:  # type: ignore[override]
        """Tokens of a tile."""
        return self.tokens

    @property
    def tile_k(self) -> int:
        """Depth of one step."""
        return self.depth

    @property
    def cluster(self) -> Any:  # type: ignore[override]
        """The dimension along which two blocks form a cluster."""
        return "m" if self.paired else None

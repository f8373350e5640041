# SPDX-License-Identifier: Apache-2.0
"""Tile sizes and schedules of the products."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, ClassVar, Literal

from pallas_gpu import arch, errors, expect
from pallas_gpu.ops.rules import Positive, Stages, Strip, TileK, TileM, TileN
from pallas_gpu.ops.tiles import CLUSTERS

CONSUMERS = 2
# Elements along K and N that share a scale of a block.
BLOCK = 128
# Rows of A of a block on Blackwell.
BLOCK_M = 128
# Groups of rows whose sums one warp computes, without scratch.
_FEW_GROUPS = 32


class Tiling:
    """Sizes that follow from those of a consumer's tile, and from the cluster."""

    feature: ClassVar[arch.Feature] = arch.Feature.WGMMA
    tile_m: int
    tile_n: int
    consumers: int = CONSUMERS
    cluster: Literal["n", "m"] | None = None
    transposed: bool = False
    parts: int = 1
    # See `ScaledMatmulConfig`.
    zigzag: bool = False
    # Whether a consumer's rows are counted after its products, for a register less.
    counts_late: ClassVar[bool] = False

    blocks: int
    epilogue_m: int
    epilogue_n: int

    def stored(self, p: Any) -> tuple[int, int]:
        """Rows and columns of a consumer's tile that are stored at once."""
        del p
        return self.epilogue_m, self.epilogue_n

    def require_cluster(self) -> None:
        if self.blocks < self.cluster_size:
            raise errors.ArgumentError(
                f"{type(self).__name__}: there are fewer blocks than in a cluster",
                expected=f"blocks of {self.cluster_size} or more",
                got=self.blocks,
                hint="use one per SM",
            )

    @property
    def block_m(self) -> int:
        return self.consumers * self.tile_m

    @property
    def columns(self) -> int:
        """Of what N has to be a multiple, if no tile is to exceed a bias."""
        return self.cluster_tile[0 if self.transposed else 1]

    @property
    def cluster_size(self) -> int:
        return 1 if self.cluster is None else 2

    @property
    def cluster_tile(self) -> tuple[int, int]:
        along_m, along_n = CLUSTERS[self.cluster]
        return self.block_m * along_m, self.tile_n * along_n


_CLUSTERS = "every GPU can run clusters of up to 8 blocks"
Splits = Annotated[int, expect.choice_of(1, 2, 4, 8, hint=_CLUSTERS)]


@expect.arguments(
    cluster=expect.optional(
        expect.choice("n", "m", hint="'n' shares rows of A, 'm' columns of B")
    )
)
@dataclasses.dataclass(frozen=True)
class MatmulConfig(Tiling):
    """Tile sizes and schedule of `matmul` on Hopper.

    Attributes:
      tile_m: rows of one consumer's tile; a block has twice as many.
      tile_n: columns of a block's tile.
      tile_k: depth of one step.
      stages: SMEM buffers of the ring.
      epilogue_m, epilogue_n: part of a consumer's tile that is stored at once.
      cluster: the dimension along which two blocks form a cluster: `"n"` shares rows of
        A, `"m"` the columns of B, None has no clusters.
      minor: dimension of the output that the order of tiles cuts into strips.
      strip: width of a strip in tiles.
      blocks: number of blocks; one per SM.
      transposed: the tensor core computes the transposed product: rows above are then
        columns of the result, and columns are its rows; A and B change places, too.
      parts: parts of K that are multiplied by different blocks, for few tiles of a long
        K. XLA adds the products and applies the epilogue.

    Raises:
      ArgumentError: sizes that do not match each other or the tensor core.
    """

    tile_m: TileM = 128
    tile_n: TileN = 128
    tile_k: TileK = 64
    stages: Stages = 4
    epilogue_m: TileM = 64
    epilogue_n: int = 64
    cluster: Literal["n", "m"] | None = "n"
    minor: Literal["m", "n"] = "m"
    strip: Strip = 8
    blocks: int = arch.SM_90A.sm_count
    transposed: bool = False
    parts: Positive = 1

    def __post_init__(self):
        m, n, parts = self.tile_m, self.tile_n, (self.epilogue_m, self.epilogue_n)
        if parts[1] < 1 or m % parts[0] or n % parts[1]:
            raise errors.ArgumentError(
                "MatmulConfig: the epilogue's parts do not divide the tile",
                expected=f"epilogue_m a divisor of {m}, epilogue_n of {n}",
                got=f"epilogue_m={parts[0]}, epilogue_n={parts[1]}",
                hint="64 and 64 fit most tiles",
            )
        self.require_cluster()


@expect.arguments()
@dataclasses.dataclass(frozen=True)
class SplitMatmulConfig(Tiling):
    """Tile sizes and schedule of `matmul` on Hopper for few rows or few tiles.

    Attributes:
      tile_m: rows of a tile, a multiple of 8 up to 256.
      tile_n: columns of a tile, a multiple of 64 for each of the warpgroups.
      tile_k: depth of one step.
      stages: SMEM buffers of the ring.
      warpgroups: warpgroups of a block that multiply.
      split: blocks of a cluster that divide K.
      clusters: clusters that divide K among each other.
      part_m: rows that are stored at once; None: up to 64.
      blocks: maximum number of blocks of the launch, which then loop over tiles.

    Raises:
      ArgumentError: sizes that do not match each other or the tensor core.
    """

    # wgmma: these are its columns.
    tile_m: Annotated[int, expect.multiple(8, 256)] = 64
    tile_n: int = 128
    tile_k: TileK = 64
    stages: Stages = 4
    warpgroups: Positive = 2
    split: Splits = 1
    clusters: Positive = 1
    part_m: int | None = None
    blocks: int = 2 * arch.SM_90A.sm_count

    def __post_init__(self):
        m, n = self.tile_m, self.tile_n
        if n < 1 or n % (64 * self.warpgroups):
            raise errors.ArgumentError(
                "SplitMatmulConfig: the warpgroups do not divide the columns",
                expected="tile_n a multiple of 64 for each warpgroup",
                got=f"tile_n={n}, warpgroups={self.warpgroups}",
                hint="start from SplitMatmulConfig()",
            )
        part = self.part
        if part < 8 or part % 8 or m % part:
            raise errors.ArgumentError(
                "SplitMatmulConfig: the parts do not divide the rows of a tile",
                expected=f"a multiple of 8 that divides {m}",
                got=f"part_m={part}",
                hint="None suits most tiles",
            )
        blocks = self.split * self.clusters
        if blocks > self.blocks:
            raise errors.ArgumentError(
                "SplitMatmulConfig: there are too few blocks",
                expected=f"{blocks} or more blocks",
                got=f"blocks={self.blocks}",
                hint="start from SplitMatmulConfig()",
            )

    @property
    def block_m(self) -> int:
        """Rows of a block's tile."""
        return self.tile_m

    @property
    def part(self) -> int:
        """Rows that are stored at once."""
        return math.gcd(self.tile_m, 64) if self.part_m is None else self.part_m

    @property
    def own_n(self) -> int:
        """Columns of one warpgroup."""
        return self.tile_n // self.warpgroups


@expect.arguments()
@dataclasses.dataclass(frozen=True)
class ScaledMatmulConfig(Tiling):
    """Tile sizes and schedule of `scaled_matmul` on Hopper.

    A step along K is 128 elements: one block of scales, one row of the widest swizzle.

    Attributes:
      tile_m: rows of one consumer's tile.
      tile_n: columns of a block's tile; 128 where there are scales of blocks.
      consumers: warpgroups that multiply, 2 or 3; a block has as many tiles of rows.
      stages: SMEM buffers of the ring.
      cluster, minor, strip, blocks: as of `MatmulConfig`.
      zigzag: whether every other tile of a block goes through K backwards: it often
        needs the same columns of B as the one before, whose last part the L2 still
        holds. The last bits of a sum then depend on the position of its tile: equal
        rows of A may have different results.

    Raises:
      ArgumentError: sizes that do not match each other or the tensor core.
    """

    tile_m: Annotated[int, expect.choice_of(64, 128)] = 128
    tile_n: Annotated[int, expect.multiple(32, 256)] = 128
    consumers: Annotated[int, expect.choice_of(2, 3)] = 2
    stages: Stages = 4
    cluster: Literal["n", "m"] | None = "n"
    minor: Literal["n", "m"] = "n"
    strip: Strip = 8
    blocks: int = arch.SM_90A.sm_count
    zigzag: bool = False

    tile_k: ClassVar[int] = BLOCK
    counts_late = True

    def __post_init__(self):
        self.require_cluster()

    def stored(self, p: Any) -> tuple[int, int]:
        # The bytes of a row of a swizzle; scales of blocks leave less SMEM.
        widest = (128 if p.group is None else 64) // p.out_dtype.itemsize
        return 64, math.gcd(self.tile_n, widest)


@expect.arguments(
    rows=expect.choice_of(64, 128, 256),
    tokens=expect.multiple(16, 128),
    stages=expect.integer(2),
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
    splits: Splits = 1
    warpgroups: int = 1
    resident: bool = False
    blocks: int | None = None

    def __post_init__(self):
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
    def along(self) -> int:
        """Warpgroups of a block that divide K."""
        return self.warpgroups // self.across

    @property
    def parts(self) -> int:
        """Parts of K."""
        return self.splits * self.along


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
    transposed = counts_late = True
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


@expect.arguments(
    consumers=expect.choice_of(2, 3), cluster=expect.optional(expect.choice("n"))
)
@dataclasses.dataclass(frozen=True)
class RaggedDotConfig(Tiling):
    """Tile sizes and schedule of `ragged_dot` on Hopper.

    Attributes:
      tile_m: rows of one consumer's tile; a block has a tile for each.
      tile_n: columns of a block's tile; 128 where there are scales of blocks.
      tile_k: depth of one step; 128 where there are scales of blocks.
      stages: SMEM buffers of each operand's ring.
      epilogue_n: columns of a tile that are stored at once.
      strip: tiles of rows of a group that are visited one after the other, for each
        tile of columns. Their part of the group's matrix is read from memory once; of a
        product over rows, one block computes them, and keeps the columns of the right
        operand in SMEM if they have no more steps than there are stages.
      blocks: number of blocks of products over rows; one per SM.
      consumers: warpgroups that multiply, 2 or 3; of products over rows 2.
      cluster: `"n"`: two blocks form a cluster and share rows.

    Raises:
      ArgumentError: sizes that do not match each other or the tensor core.
    """

    tile_m: TileM = 64
    tile_n: TileN = 256
    tile_k: TileK = 64
    stages: Stages = 4
    epilogue_n: TileN = 32
    strip: Strip = 16
    blocks: Positive = arch.SM_90A.sm_count
    consumers: int = CONSUMERS
    cluster: Literal["n"] | None = None

    minor: ClassVar[str] = "n"

    @property
    def epilogue_m(self) -> int:  # type: ignore[override]
        """Rows of a tile that are stored at once."""
        return self.tile_m

    @property
    def alone(self) -> RaggedDotConfig:
        """The configuration with the blocks of products over rows."""
        return dataclasses.replace(self, consumers=CONSUMERS, cluster=None)

    def __post_init__(self):
        if self.tile_n % self.epilogue_n:
            raise errors.ArgumentError(
                "RaggedDotConfig: the epilogue's parts do not divide the tile",
                expected=f"epilogue_n a multiple of 16 that divides {self.tile_n}",
                got=f"epilogue_n={self.epilogue_n}",
                hint="32 fits most tiles",
            )

    @classmethod
    @expect.arguments(groups=expect.integer(1))
    def default(
        cls,
        groups: int,
        *,
        contracted: bool = False,
        gated: bool = False,
        narrow: bool = False,
        blocked: bool = False,
    ) -> RaggedDotConfig:
        """Returns the configuration that `benchmarks/ragged_dot.py` measures.

        Args:
          groups: number of groups. The table of more than a few takes SMEM from the
            epilogue.
          contracted: for a product over the rows of each group.
          gated: for two products, whose accumulators share the registers.
          narrow: for operands of 8 bits: a step of as many bytes is twice as deep.
          blocked: for scales of blocks, whose sums take registers beside accumulators.
        """
        if blocked:
            return cls(tile_n=BLOCK, tile_k=BLOCK, consumers=3, cluster="n")
        is_small = groups <= _FEW_GROUPS
        # Products over many rows do not stay in SMEM: single tiles balance better.
        strip = (1 if is_small else 8) if contracted else 16
        return cls(
            tile_n=128 if gated else 256,
            tile_k=128 if narrow else 64,
            epilogue_n=64 if is_small else 32,
            strip=strip,
        )


class Pairs:
    """What configurations of blocks that may share a tile have in common."""

    feature: ClassVar[arch.Feature] = arch.Feature.TCGEN05
    collective: bool
    blocks: int
    # N is padded by zeros, whatever it is.
    columns = 1
    # Columns that are stored at once: None, or those of so many bytes.
    epilogue_n: int | None = None
    part_bytes = 128

    @property
    def ctas(self) -> int:
        return 2 if self.collective else 1

    def require_blocks(self) -> None:
        if self.blocks < self.ctas:
            name = type(self).__name__
            raise errors.ArgumentError(
                f"{name}: there are no blocks",
                expected=f"{self.ctas} or more blocks",
                got=f"blocks={self.blocks}",
                hint=f"start from {name}()",
            )


@expect.arguments()
@dataclasses.dataclass(frozen=True)
class BlackwellMatmulConfig(Pairs):
    """Tile sizes and schedule of products on Blackwell; a block has 128 rows of a tile.

    For `matmul` and `scaled_matmul`.

    Attributes:
      tile_n: columns of a tile.
      tile_k: depth of one step; 128 are as many bytes of 8-bit elements.
      stages: SMEM buffers of the ring.
      epilogue_n: columns that are stored at once; None: 128 bytes of the result.
      collective: whether two blocks share a tile of 256 rows. Each then needs SMEM for
        half of the columns of B, which leaves space for more stages.
      minor, strip, blocks: as of `MatmulConfig`.
      dynamic: whether blocks take the next tile when they are free, by cluster launch
        control, instead of every `blocks`-th one. Then the roles are warpgroups.

    Raises:
      ArgumentError: sizes that do not match each other or the tensor core.
    """

    tile_n: TileN = 256
    tile_k: TileK = 64
    stages: Positive = 4
    epilogue_n: Annotated[int | None, expect.optional(expect.multiple(16))] = None
    collective: bool = False
    minor: Literal["m", "n"] = "m"
    strip: Strip = 8
    blocks: int = arch.SM_100A.sm_count
    dynamic: bool = False

    def __post_init__(self):
        # Both accumulators share the 512 columns of TMEM, and the swizzle of B's rows
        # needs N in multiples of 16.
        n, step_n = self.tile_n, 16 * self.ctas
        if n % step_n:
            raise errors.ArgumentError(
                "BlackwellMatmulConfig: two blocks cannot share this tile",
                expected=f"tile_n a multiple of {step_n} up to 256",
                got=f"tile_n={n}",
                hint="start from BlackwellMatmulConfig()",
            )
        part = self.epilogue_n
        if part is not None and n % part:
            raise errors.ArgumentError(
                "BlackwellMatmulConfig: the epilogue's parts do not divide the tile",
                expected=f"a multiple of 16 that divides {n}",
                got=f"epilogue_n={part}",
                hint="None suits most tiles",
            )
        self.require_blocks()


@expect.arguments()
@dataclasses.dataclass(frozen=True)
class BlockScaledMatmulConfig(Pairs):
    """Tile sizes and schedule of `block_scaled_matmul`; a block has 128 rows.

    Attributes:
      tile_n: columns of a tile, 128 or 256. Two accumulators of 256 columns would leave
        no TMEM for scales: they share 128 columns, which the epilogue reads first, so
        that the other half of it overlaps with the next tile's products.
      tile_k: depth of one step; None: 128 bytes of a row.
      stages: SMEM buffers of the ring; None: as many as there is SMEM for.
      collective: whether two blocks share a tile of 256 rows. Each then loads half of
        the columns of B, and the scales of all.
      minor, strip, blocks, dynamic: as of `BlackwellMatmulConfig`.

    Raises:
      ArgumentError: sizes that do not match each other or the tensor core.
    """

    tile_n: Annotated[int, expect.choice_of(BLOCK_M, 2 * BLOCK_M)] = 256
    tile_k: Annotated[int | None, expect.optional(expect.multiple(64))] = None
    stages: Positive | None = None
    collective: bool = False
    minor: Literal["m", "n"] = "m"
    strip: Strip = 8
    blocks: int = arch.SM_100A.sm_count
    dynamic: bool = False

    # Scales take SMEM.
    part_bytes = 64

    def __post_init__(self):
        self.require_blocks()

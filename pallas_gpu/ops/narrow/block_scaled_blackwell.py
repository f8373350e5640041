# SPDX-License-Identifier: Apache-2.0
"""A product with scales of blocks along K, for Blackwell: the tensor core scales.

The schedule is that of `gemm/blackwell.py`: a warp fills a ring of SMEM buffers by TMA,
another one multiplies, and a warpgroup stores the tiles. A buffer also has the scales
of its step, which the second warp copies to TMEM before the product that reads them.
Copies and products of a thread are in order, so that TMEM has one set of scales.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import arch, errors, expect
from pallas_gpu.ops.gemm import blackwell
from pallas_gpu.ops.gemm.problem import Problem
from pallas_gpu.ops.rules import Positive, Strip, cached
from pallas_gpu.ops.tiles import tiles

# Rows of A of a block; scales lie in tiles of so many rows by four scales.
ROWS = 128
GROUP = 4
# Of a tile of scales in memory.
SCALE_TILE = (32, 16)
# TMEM: columns that there are, and those of a tile of scales.
_COLUMNS, _SCALE_COLUMNS = 512, 4
# Bytes of a row of the widest swizzle, and those that the epilogue stores of a row.
_STEP_BYTES, _PART_BYTES = 128, 64
# SMEM for barriers, and for what the compiler aligns.
_SMALL_BYTES = 2048
_ZEROS = plgpu.OOBFillMode.ZEROS


@expect.arguments()
@dataclasses.dataclass(frozen=True)
class BlockScaledMatmulConfig(blackwell.Pairs):
    """Tile sizes and schedule of `block_scaled_matmul`; a block has 128 rows.

    Attributes:
      tile_n: columns of a tile, 128 or 256. Two accumulators of 256 columns would leave
        no TMEM for scales: they share 128 columns, which the epilogue reads first, so
        that the other half of it overlaps with the next tile's products.
      tile_k: depth of one step; None: 128 bytes of a row.
      stages: SMEM buffers of the ring; None: as many as there is SMEM for.
      collective: whether two blocks share a tile of 256 rows. Each then loads half of
        the columns of B, and the scales of all.
      minor: dimension of the output that the order of tiles cuts into strips.
      strip: width of a strip in tiles.
      blocks: number of blocks; one per SM.
      dynamic: see `BlackwellMatmulConfig`.

    Raises:
      ArgumentError: sizes that do not match each other or the tensor core.
    """

    tile_n: int = 256
    tile_k: int | None = None
    stages: Positive | None = None
    collective: bool = False
    minor: Literal["m", "n"] = "m"
    strip: Strip = 8
    blocks: int = arch.SM_100A.sm_count
    dynamic: bool = False

    def __post_init__(self):
        k = self.tile_k
        if self.tile_n not in (ROWS, 2 * ROWS) or (
            k is not None and (k < 64 or k % 64)
        ):
            raise errors.ArgumentError(
                "BlockScaledMatmulConfig: this tile is not supported",
                expected="tile_n 128 or 256, tile_k a multiple of 64",
                got=f"tile_n={self.tile_n}, tile_k={k}",
                hint="start from BlockScaledMatmulConfig()",
            )
        self.require_blocks()


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Sizes of a tile, and of its scales."""

    p: Problem
    config: BlockScaledMatmulConfig

    @property
    def bits(self) -> int:
        """Of an element of A or B."""
        return jnp.finfo(self.p.dtype).bits

    @property
    def block(self) -> int:
        """Elements along K that share a scale."""
        assert self.p.group is not None
        return self.p.group

    @property
    def tile_k(self) -> int:
        """Depth of a step."""
        return self.config.tile_k or _STEP_BYTES * 8 // self.bits

    @property
    def step(self) -> tuple[int, int, int]:
        """A tile, and the depth of a step."""
        return ROWS * self.config.ctas, self.config.tile_n, self.tile_k

    @property
    def groups(self) -> int:
        """Tiles of scales along K in a step."""
        return self.tile_k // (self.block * GROUP)

    @property
    def across(self) -> int:
        """Tiles of scales along the columns of a tile."""
        return self.config.tile_n // ROWS

    @property
    def part_n(self) -> int:
        """Columns that the epilogue stores at once."""
        return _PART_BYTES // self.p.out_dtype.itemsize

    @property
    def accumulators(self) -> int:
        """Accumulators that TMEM has space for beside the scales."""
        return 2 if self._space >= 2 * self.config.tile_n - self.shared_n else 1

    @property
    def shared_n(self) -> int:
        """Columns that two accumulators share: half of 256."""
        n = self.config.tile_n
        half = n // 2
        return half if 2 * n - half <= self._space < 2 * n else 0

    @property
    def _space(self) -> int:
        """Columns of TMEM beside the scales."""
        return _COLUMNS - (1 + self.across) * self.groups * _SCALE_COLUMNS

    @property
    def stages(self) -> int:
        """Buffers of the ring."""
        if self.config.stages is not None:
            return self.config.stages
        n = self.config.tile_n
        one = (ROWS + n // self.config.ctas) * self.tile_k * self.bits // 8
        one += (ROWS + n) * self.groups * GROUP
        stored = 2 * ROWS * _PART_BYTES
        free = arch.SM_100A.smem_bytes_per_block - stored - _SMALL_BYTES
        return max(1, min(8, free // one))

    @property
    def schedule(self) -> blackwell.Schedule:
        """Which tiles a block computes."""
        p, c = self.p, self.config
        return blackwell.Schedule(
            p.m,
            p.n,
            p.k,
            self.step,
            c,
            self.accumulators,
            self.part_n,
            self.shared_n,
        )

    def check(self) -> None:
        """Checks a step against the blocks.

        Raises:
          ArgumentError: the scales of a step do not fill whole tiles.
        """
        if self.tile_k % (self.block * GROUP):
            raise errors.ArgumentError(
                "block_scaled_matmul: tile_k is not a multiple of four blocks",
                expected=f"a multiple of {self.block * GROUP}",
                got=f"tile_k={self.tile_k}",
                hint="omit tile_k",
            )


@cached
def make_kernel(
    p: Problem, config: BlockScaledMatmulConfig, compiler_params, interpret
):
    """Returns the function of A (M, K), B (N, K), their scales, and the factor, if any.

    The scales are (rows / 128, scales / 4, 32, 16), for all rows and steps of all tiles
    (`tiled_scales`); the factor is (1,).
    """
    shapes = Shapes(p, config)
    shapes.check()
    stages, across, groups = shapes.stages, shapes.across, shapes.groups

    def in_tmem(rows: int) -> Any:
        shape = rows * ROWS, groups * GROUP
        layout = plgpu.layouts.TmemLayout.scales()
        collective = config.collective
        return plgpu.TMEM(shape, p.scale_dtype, layout=layout, collective=collective)

    def windows(rows, columns):
        # Of tiles of scales: `columns` starts at a multiple of whole ones.
        tile_rows = plgpu.ds(lax.div(rows.start, ROWS), config.ctas)
        tile_columns = plgpu.ds(lax.div(columns.start, ROWS), across)

        def at(ki):
            depth = plgpu.ds(ki * shapes.tile_k, shapes.tile_k)
            along = plgpu.ds(ki * groups, groups)
            a, b = (1, (rows, depth)), (3, (columns, depth))
            return [a, b, (0, (tile_rows, along)), (2, (tile_columns, along))]

        return at

    def multiply(ki, tile, slot, axis, a_scale, b_scale):
        a_scales, a, b_scales, b = slot.buffers
        for buffer, scale in ((a_scales, a_scale), (b_scales, b_scale)):
            plgpu.async_copy_scales_to_tmem(buffer, scale, collective_axis=axis)
        plgpu.tcgen05_mma(
            tile,
            a,
            b.T,
            slot.empty,
            a_scale=a_scale,
            b_scale=b_scale,
            accumulate=ki > 0,
            collective_axis=axis,
        )

    # Of a pair each block loads half of the rows of each, but all scales of b.
    half, both = plgpu.CopyPartition.PARTITIONED(0), plgpu.CopyPartition.REPLICATED
    return blackwell.launch(
        shapes.schedule,
        [
            plgpu.SMEM((stages, 1, groups, *SCALE_TILE), p.scale_dtype),
            tiles((stages, ROWS, shapes.tile_k), p.dtype),
            plgpu.SMEM((stages, across, groups, *SCALE_TILE), p.scale_dtype),
            tiles((stages, config.tile_n // config.ctas, shapes.tile_k), p.types[1]),
        ],
        p.out_dtype,
        windows,
        multiply,
        shares=[half, half, half, both],
        oob_mode=_ZEROS,
        scratch={"a_scale": in_tmem(1), "b_scale": in_tmem(across)},
        kernel_name="block_scaled_matmul",
        compiler_params=compiler_params,
        interpret=interpret,
    )


def tiled_scales(scales: jax.Array, rows: int, columns: int) -> jax.Array:
    """Returns scales as the kernel reads them, padded by ones.

    Args:
      scales: (any, any): of rows by blocks.
      rows, columns: what they are padded to: multiples of 128 and 4.
    """
    widths = [
        (0, size - x) for size, x in zip((rows, columns), scales.shape, strict=True)
    ]
    one = jnp.ones((), scales.dtype)
    if any(high for _, high in widths):
        scales = jnp.pad(scales, widths, constant_values=one)
    split = scales.reshape(rows // ROWS, 4, 32, columns // GROUP, GROUP)
    shape = rows // ROWS, columns // GROUP, *SCALE_TILE
    return split.transpose(0, 3, 2, 1, 4).reshape(shape)

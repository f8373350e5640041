# SPDX-License-Identifier: Apache-2.0
"""Tiles of products: in SMEM, and the blocks that loop over them."""

from __future__ import annotations

import functools
import math
from typing import Any

from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import arch
from pallas_gpu.ops.rules import bits

# Blocks of a cluster along rows and columns of a result, by the dimension of a pair.
CLUSTERS = {None: (1, 1), "m": (2, 1), "n": (1, 2)}


def tiles(shape: tuple[int, ...], dtype: Any, columns: int | None = None) -> Any:
    """Declares an SMEM array, tiled and with the widest swizzle that fits its rows.

    Where products take parts of the rows, it fits these parts, of so many columns.

    Warpgroup semantics would infer the same; with the transforms given, a kernel lowers
    under Lane semantics, too.
    """
    swizzle = plgpu.find_swizzle((columns or shape[-1]) * bits(dtype))
    tiling = plgpu.TilingTransform((8, swizzle * 8 // bits(dtype)))
    return plgpu.SMEM(
        shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle))
    )


def operands_of(p: Any, c: Any, rows: int) -> list[Any]:
    """Declares the buffers of a ring of A, B and the gate of a product.

    Args:
      p: the problem.
      c: its configuration: stages, columns and depth of a tile.
      rows: of a tile.
    """
    a_tile = (c.tile_k, rows) if p.transpose_a else (rows, c.tile_k)
    b_tile = (c.tile_n, c.tile_k) if p.transpose_b else (c.tile_k, c.tile_n)
    a, b = (
        tiles((c.stages, *tile), dtype)
        for tile, dtype in zip((a_tile, b_tile), p.types, strict=True)
    )
    return [a, b, *[b] * p.epilogue.gated]


def in_cluster(ref: Any, axis: str, count: int) -> list[Any]:
    """Returns an array in SMEM of each block along an axis of the cluster."""
    if count == 1:
        return [ref]
    return [plgpu.cluster_ref(ref, {axis: i}) for i in range(count)]


def starts_inside(p: Any, tiles: Any, part: tuple[int, int], row: Any, column: Any):
    """Whether a part of a tile has elements of the result; None if all parts have."""
    sides = zip((row, column), (p.m, p.n), tiles.extent, part, strict=True)
    some = [start < size for start, size, end, n in sides if end - size >= n]
    return functools.reduce(lax.bitwise_and, some) if some else None


def persistent_blocks(plane: tuple[int, ...], cluster_size: int) -> int:
    """Returns the blocks, one per SM, that loop over a plane of tiles of clusters.

    Blocks beyond these would save no turn. Without them fewer SMs take power, and the
    tiles of a turn form a rectangle more often, whose operands the L2 holds once.
    """
    clusters = max(math.prod(plane), 1)
    turns = plgpu.cdiv(clusters, arch.SM_90A.sm_count // cluster_size)
    return plgpu.cdiv(clusters, turns) * cluster_size

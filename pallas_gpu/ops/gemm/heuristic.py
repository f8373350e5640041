# SPDX-License-Identifier: Apache-2.0
"""A configuration of Hopper's kernel for any problem, by a small cost model."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

import jax.numpy as jnp

import pallas_gpu as plgpu
from pallas_gpu import arch
from pallas_gpu.ops.gemm.config import CONSUMERS, MatmulConfig
from pallas_gpu.ops.gemm.epilogue import PLAIN
from pallas_gpu.ops.gemm.problem import Problem

type Axis = Literal["m", "n"] | None

_SMS = arch.SM_90A.sm_count
# (rows of a consumer, columns); beyond 192 registers of accumulators ptxas spills.
_TILES = [
    *((64, n) for n in (16, 32, 64, 96, 128, 160, 192, 224, 256)),
    *((128, n) for n in (32, 64, 96, 128, 160, 192)),
]
# Tiles that blocks compute for a part of K each; a part has at least so many steps.
_DIVIDED_TILES = [(64, 64), (64, 128)]
_LEAST_STEPS = 16
_MOST_PARTS = 32
_BARRIER_BYTES = 1024
_MEMORY_BYTES_PER_US = 4.27e6
# Of an SM: 128 bytes a cycle at 1.98 GHz.
_SMEM_BYTES_PER_US = 253e3


@functools.lru_cache(maxsize=4096)
def choose(p: Problem) -> MatmulConfig:
    return min(candidates(p), key=lambda c: cost(p, c))


def copy_us(p: Problem, name: str) -> float:
    elems = p.k * (p.m if name == "a" else p.n)
    elems *= 1 if (p.shared_a if name == "a" else p.shared_b) else p.batch
    return 2 + 2 * elems * p.dtype.itemsize / _MEMORY_BYTES_PER_US


def candidates(p: Problem) -> list[MatmulConfig]:
    """Returns the configurations that suit a problem, in no order."""
    if p.transposed.turns_a:
        found = candidates(p.transposed)
        return [dataclasses.replace(c, transposed=True) for c in found]
    tiles = _TILES
    if p.turns_a:
        # Rows of A are in registers, too; with 128 of them products wait for loads.
        tiles = [(m, n) for m, n in tiles if m == 64]
    if p.epilogue.gated:
        # Two accumulators, and two tiles of B.
        tiles = [(m, n) for m, n in tiles if m * n <= 64 * 128]
    found = [
        _config(p, *tile, cluster) for tile in tiles for cluster in _clusters(p, *tile)
    ]
    if p.epilogue.gated:
        return found
    return found + [c for tile in _DIVIDED_TILES if (c := _divided(p, *tile))]


def _divided(p: Problem, tile_m: int, tile_n: int) -> MatmulConfig | None:
    """Returns the configuration whose parts of K fill the device, if there is one."""
    sums = p.but(out_dtype=jnp.dtype(jnp.float32), epilogue=PLAIN, residual_dtype=None)
    c = _config(sums, tile_m, tile_n, None)
    tiles = p.tiles(c.block_m, tile_n)
    steps = plgpu.cdiv(p.k, c.tile_k)
    parts = min(_SMS // tiles, steps // _LEAST_STEPS, _MOST_PARTS)
    if parts < 2:
        return None
    # No part is empty.
    return dataclasses.replace(c, parts=plgpu.cdiv(steps, plgpu.cdiv(steps, parts)))


def _clusters(p: Problem, tile_m: int, tile_n: int) -> list[Axis]:
    found: list[Axis] = [None]
    if plgpu.cdiv(p.n, tile_n) % 2 == 0:
        found.append("n")
    if plgpu.cdiv(p.m, CONSUMERS * tile_m) % 2 == 0:
        found.append("m")
    return found


def cost(p: Problem, c: MatmulConfig) -> float:
    """Estimates the time of a product in microseconds.

    The slowest block computes `waves` tiles. A step of a tile takes as long as its
    products, as its copies from the L2, or as the accesses to its SMEM, which TMA
    fills and the tensor core reads. The numbers are fitted by hand to 250
    measurements on an H200 (bfloat16, 256 to 8192 rows).
    """
    if c.transposed:
        return cost(p.transposed, dataclasses.replace(c, transposed=False))
    tiles = c.parts * p.tiles(*c.cluster_tile)
    waves = plgpu.cdiv(tiles, _SMS // c.cluster_size)
    item = p.dtype.itemsize
    # FLOP per microsecond and SM; tf32 has half the rate of 16-bit types.
    rate = 860e6 / _SMS * 2 / item * min(1.0, c.tile_n * p.factors / 64)
    products = 2 * c.block_m * c.tile_n * c.tile_k * p.factors / rate
    if c.tile_m == 64 and c.tile_n * item % 128 and not p.transpose_b:
        # Rows of B are those of a narrower swizzle.
        products *= 1.04
    if c.tile_m == 64:
        # B is read from SMEM for half as many rows; by the widest instruction, the
        # fewest bytes are read, which takes less power.
        products *= 0.99 if c.tile_n == 256 else 1.02
    shared = 1 if c.cluster is None else 2
    rows = c.block_m / (shared if c.cluster == "n" else 1)
    columns = c.tile_n * p.factors / (shared if c.cluster == "m" else 1)
    # Bytes per microsecond that an SM receives from the L2; fewer where each block of a
    # cluster loads its own wide rows of B.
    bandwidth = 60e3 if c.cluster == "n" and c.tile_m == 64 else 78e3
    if c.parts > 1:
        bandwidth = 95e3
    copies = (rows + columns) * c.tile_k * item / bandwidth
    # Each instruction reads 64 rows of A, unless they are in registers, and all
    # columns of B.
    read = (
        CONSUMERS * c.tile_m // 64 * (c.tile_n + (0 if p.turns_a else 64)) * p.factors
    )
    filled = c.block_m + c.tile_n * p.factors
    if p.turns_a:
        filled += c.block_m
    accesses = (read + filled) * c.tile_k * item / _SMEM_BYTES_PER_US
    # Of two that are limited by products the one that copies less takes less power.
    step = max(products, copies, accesses) + 0.015 * copies
    stored = p.out_dtype.itemsize if c.parts == 1 else 4
    store = 0.3 + c.block_m * c.tile_n * stored / 60e3
    memory = p.bytes / _MEMORY_BYTES_PER_US
    launch = 2.0 if c.cluster is None else 3.0
    steps = plgpu.cdiv(plgpu.cdiv(p.k, c.tile_k), c.parts)
    busy = waves * (steps * step + store)
    if c.cluster is None and p.batch == 1 and p.m > c.block_m:
        # Beside much traffic from memory, what blocks load twice from the L2 shows.
        launch += 0.1 * max(0.0, memory - 0.4 * busy)
    if c.parts > 1:
        # XLA's kernel that adds, and reads from the L2.
        launch += 0.8 + c.parts * p.batch * p.m * p.n * 4 / 1.8e6
    return launch + max(busy, memory)


def _config(p: Problem, tile_m: int, tile_n: int, cluster: Axis) -> MatmulConfig:
    # Rows of the widest swizzle.
    stored = max(x.itemsize for x in (p.out_dtype, p.residual_dtype or p.out_dtype))
    c = MatmulConfig(
        tile_m=tile_m,
        tile_n=tile_n,
        tile_k=128 // p.dtype.itemsize,
        epilogue_n=math.gcd(tile_n, 128 // stored),
        cluster=cluster,
    )
    return dataclasses.replace(c, stages=_stages(p, c))


def _stages(p: Problem, c: MatmulConfig) -> int:
    stage = (c.block_m + p.factors * c.tile_n) * c.tile_k * p.dtype.itemsize
    elem = p.epilogue.buffers * p.out_dtype.itemsize
    if p.residual_dtype is not None:
        elem += 2 * p.residual_dtype.itemsize
    others = CONSUMERS * c.epilogue_m * c.epilogue_n * elem + _BARRIER_BYTES
    space = arch.SM_90A.smem_bytes_per_block - others
    return max(2, min(space // stage, 8))

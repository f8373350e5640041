# SPDX-License-Identifier: Apache-2.0
"""A configuration for products with few rows or few tiles, by a small cost model."""

from __future__ import annotations

import dataclasses
import functools
import math

import pallas_gpu as plgpu
from pallas_gpu import arch
from pallas_gpu.ops.gemm.few_config import SplitMatmulConfig
from pallas_gpu.ops.gemm.problem import Problem

_TARGET = arch.SM_90A
_SMS = _TARGET.sm_count
# What the launch adds to the SMEM of a block (CUDA programming guide, 9.0), and what
# the mbarriers take.
_RESERVED_BYTES, _BARRIER_BYTES = 1024, 512
_SM_BYTES = _TARGET.smem_bytes_per_block + _RESERVED_BYTES
# (columns, warpgroups) of a block.
_BLOCKS = [(64, 1), (128, 1), (128, 2), (256, 2)]
_MOST_ROWS = 256
# At least so many steps hide the latency of the first copies.
_LEAST_STEPS = 8
_MOST_STAGES = 10
# Blocks of a launch that does not loop over tiles.
_MANY = 1 << 20
# ptxas needs about so many beside the accumulators.
_OTHER_REGISTERS = 32
_PAD = 4
# A launch, the first copies and the last stores.
FIXED_US = 3.5
_BYTES_PER_US = 4.4e6
_L2_BYTES_PER_US = 60e3
_LEAST_ROWS = 32


@functools.lru_cache(maxsize=4096)
def choose(p: Problem) -> SplitMatmulConfig | None:
    """Returns the configuration with the lowest estimated time.

    None: there are more rows, and the tiles fill the device anyway.
    """
    if p.m > _MOST_ROWS and _tiles(p, 128, 128) > _SMS:
        return None
    found = candidates(p)
    return min(found, key=lambda c: cost(p, c)) if found else None


def candidates(p: Problem) -> list[SplitMatmulConfig]:
    """Returns the configurations that suit a problem, in no order."""
    return [
        c
        for tile_m in _rows(p)
        for tile_n, warpgroups in _BLOCKS
        for on_sm in (1, 2, 3)
        for split in (1, 2, 4, 8)
        for clusters in _clusters(p, tile_m, tile_n)
        if (c := _config(p, (tile_m, tile_n), warpgroups, on_sm, split, clusters))
    ]


def _tiles(p: Problem, tile_m: int, tile_n: int) -> int:
    return p.batch * plgpu.cdiv(p.m, tile_m) * plgpu.cdiv(p.n, tile_n)


def _rows(p: Problem) -> list[int]:
    """Returns the rows of tiles that suit a problem."""
    if p.transpose_a:
        # Rows of SMEM are those of a swizzle.
        return [m for m in (16, 32, 64, 128, 256) if m == 16 or m < 2 * p.m]
    step = 8 if p.m <= 64 else 32
    return sorted({min(m, plgpu.align_to(p.m, step)) for m in (64, 128, 256)})


def _clusters(p: Problem, tile_m: int, tile_n: int) -> tuple[int, ...]:
    """Returns into how many parts clusters divide K, where tiles are very few."""
    return (1, 2, 4, 8, 16) if 8 * _tiles(p, tile_m, tile_n) < _SMS else (1,)


def _config(
    p: Problem,
    tile: tuple[int, int],
    warpgroups: int,
    on_sm: int,
    split: int,
    clusters: int,
) -> SplitMatmulConfig | None:
    """Returns the configuration of which an SM runs `on_sm` blocks, if there is one."""
    (tile_m, tile_n), own_n = tile, tile[1] // warpgroups
    factors = 2 if p.epilogue.gated else 1
    tile_k = 128 // p.dtype.itemsize
    # Registers of a thread that are accumulators, and those of all threads.
    sums = factors * own_n * tile_m // 128
    registers = on_sm * (warpgroups + 1) * 128 * (sums + _OTHER_REGISTERS)
    least = _LEAST_STEPS if split * clusters > 1 else 1
    steps = plgpu.cdiv(p.k, tile_k) // (split * clusters)
    # The last cluster reads the sums of the others beside its accumulator.
    most = 128 if clusters == 1 else 64
    if sums > most or registers > 65536 or steps < least:
        return None
    c = SplitMatmulConfig(
        tile_m=tile_m,
        tile_n=tile_n,
        tile_k=tile_k,
        warpgroups=warpgroups,
        split=split,
        clusters=clusters,
        part_m=tile_m if tile_m <= 64 else math.gcd(tile_m, 64 if on_sm == 1 else 16),
        # Larger clusters do not all fit at once: they start as there is space.
        blocks=max(on_sm * _SMS if split <= 2 else _MANY, split * clusters),
    )
    space = _SM_BYTES // on_sm - _RESERVED_BYTES
    stages = (space - smem_bytes(p, c, 0)) // (
        smem_bytes(p, c, 1) - smem_bytes(p, c, 0)
    )
    if stages < 2:
        return None
    return dataclasses.replace(c, stages=min(stages, _MOST_STAGES, max(steps, 2)))


def smem_bytes(p: Problem, c: SplitMatmulConfig, stages: int) -> int:
    """Returns the SMEM of a block with a number of buffers."""
    factors = 2 if p.epilogue.gated else 1
    stage = (c.tile_m + factors * c.tile_n) * c.tile_k * p.dtype.itemsize
    sums = c.warpgroups * factors * c.part * (c.own_n + _PAD) * 4
    return stages * stage + sums + _BARRIER_BYTES


def cost(p: Problem, c: SplitMatmulConfig) -> float:
    """Estimates the time of a product in microseconds.

    The SM with the most blocks multiplies, or copies from the L2, or all of them wait
    for the device's memory.
    """
    factors = 2 if p.epilogue.gated else 1
    item = p.dtype.itemsize
    stage = smem_bytes(p, c, c.stages)
    on_sm = min(_SM_BYTES // (stage + _RESERVED_BYTES), 65536 // _registers(p, c))
    parts = c.split * c.clusters
    blocks = _tiles(p, c.tile_m, c.tile_n) * parts
    # SMs of a cluster are neighbours: a part of the device stays without.
    sms = _SMS if c.split <= 2 else _SMS * 7 // 8 if c.split == 4 else _SMS * 3 // 4
    waves = plgpu.cdiv(blocks, sms * on_sm)
    steps = plgpu.cdiv(plgpu.cdiv(p.k, c.tile_k), parts)
    rows = max(c.tile_m, _LEAST_ROWS)
    products = 2 * rows * c.tile_n * factors * c.tile_k / (810e6 / _SMS * 2 / item)
    copies = (c.tile_m + factors * c.tile_n) * c.tile_k * item / _L2_BYTES_PER_US
    on_one = plgpu.cdiv(blocks, _SMS) if waves == 1 else waves * on_sm
    sm = on_one * steps * max(products, copies)
    memory = p.bytes / _BYTES_PER_US
    exchange = 0.0
    if c.split > 1:
        exchange += 1.0 + 0.7 * (c.tile_m // c.part) * plgpu.cdiv(
            c.tile_m * c.tile_n, 128 * 128
        )
    if c.clusters > 1:
        exchange += 2.0 + 0.1 * c.clusters
    return FIXED_US + max(sm, memory) + waves * exchange


def _registers(p: Problem, c: SplitMatmulConfig) -> int:
    """Estimates the registers of a block."""
    factors = 2 if p.epilogue.gated else 1
    sums = factors * c.own_n * c.tile_m // 128
    return (c.warpgroups + 1) * 128 * (sums + _OTHER_REGISTERS)

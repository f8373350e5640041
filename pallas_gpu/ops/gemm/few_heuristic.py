# SPDX-License-Identifier: Apache-2.0
"""A configuration for products with few rows or few tiles, by a small cost model."""

from __future__ import annotations

import dataclasses
import functools
import math

import pallas_gpu as plgpu
from pallas_gpu import arch
from pallas_gpu.ops.gemm.config import SplitMatmulConfig
from pallas_gpu.ops.gemm.few import PAD, Schedule
from pallas_gpu.ops.gemm.problem import Problem

_TARGET = arch.SM_90A
_SMS = _TARGET.sm_count
# What the launch adds to the SMEM of a block (CUDA programming guide, 9.0), and what
# the mbarriers take.
_RESERVED_BYTES, _BARRIER_BYTES = 1024, 512
_SM_BYTES = _TARGET.smem_bytes_per_block + _RESERVED_BYTES
# (columns, warpgroups) of a block.
_BLOCKS = [
    (64, 1),
    (128, 1),
    (128, 2),
    (192, 1),
    (256, 1),
    (256, 2),
    (448, 1),
    (512, 2),
]
_MOST_ROWS = 256
# At least so many steps hide the latency of the first copies.
_LEAST_STEPS = 8
_MOST_STAGES = 10
# Blocks of a launch that does not loop over tiles.
_MANY = 1 << 20
# ptxas needs about so many beside the accumulators.
_OTHER_REGISTERS = 32
# Microseconds of a launch, the first copies and the last stores, and bytes per
# microsecond: of the device's memory; of an SM, copies from it and from the L2,
# accesses to SMEM, and sums that a cluster exchanges. Fitted to times on an H200.
FIXED_US = 2.5
_BYTES_PER_US = 4.6e6
# More bytes of a row at once are read faster; of so many columns or more.
_WIDE_COLUMNS, _NARROW = 192, 1.02
_SM_BYTES_PER_US = 46e3
_L2_BYTES_PER_US = 95e3
_SMEM_BYTES_PER_US = 235e3
_EXCHANGE_BYTES_PER_US = 60e3
_OTHERS_BYTES_PER_US = 90e3


@functools.lru_cache(maxsize=4096)
def choose(p: Problem) -> SplitMatmulConfig | None:
    """Returns the configuration with the lowest estimated time.

    None: there are more rows, and the tiles fill the device anyway.
    """
    if p.m > _MOST_ROWS and p.tiles(128, 128) > _SMS:
        return None
    found = candidates(p)
    return min(found, key=lambda c: cost(p, c)) if found else None


def candidates(p: Problem) -> list[SplitMatmulConfig]:
    """Returns the configurations that suit a problem; of equal ones the first is best.

    They are in the order of blocks on an SM, and of blocks that divide K.
    """
    return [
        c
        for on_sm in (1, 2, 3)
        for split in (1, 2, 4, 8)
        for tile_m in _rows(p)
        for tile_n, warpgroups in _BLOCKS
        for clusters in _clusters(p, tile_m, tile_n)
        if (c := _config(p, (tile_m, tile_n), warpgroups, on_sm, split, clusters))
    ]


def _rows(p: Problem) -> list[int]:
    if p.transpose_a:
        # Rows of SMEM are those of a swizzle.
        return [m for m in (16, 32, 64, 128, 256) if m == 16 or m < 2 * p.m]
    step = 8 if p.m <= 64 else 32
    return sorted({min(m, plgpu.align_to(p.m, step)) for m in (64, 128, 256)})


def _clusters(p: Problem, tile_m: int, tile_n: int) -> tuple[int, ...]:
    """Returns into how many parts clusters divide K, where tiles are very few."""
    return (1, 2, 4, 8, 16) if 8 * p.tiles(tile_m, tile_n) < _SMS else (1,)


def _config(
    p: Problem,
    tile: tuple[int, int],
    warpgroups: int,
    on_sm: int,
    split: int,
    clusters: int,
) -> SplitMatmulConfig | None:
    (tile_m, tile_n), parts = tile, split * clusters
    tile_k = 128 // p.dtype.itemsize
    sums = p.factors * tile_n // warpgroups * tile_m // 128
    registers = on_sm * (warpgroups + 1) * 128 * (sums + _OTHER_REGISTERS)
    steps = plgpu.cdiv(p.k, tile_k) // parts
    # The last cluster reads the sums of the others beside its accumulator.
    most = 128 if clusters == 1 else 64
    if sums > most or registers > 65536 or steps < (_LEAST_STEPS if parts > 1 else 1):
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
        blocks=max(on_sm * _SMS if split <= 2 else _MANY, parts),
    )
    space = _SM_BYTES // on_sm - _RESERVED_BYTES
    fitting = [n for n in range(2, _MOST_STAGES + 1) if smem_bytes(p, c, n) <= space]
    if not fitting:
        return None
    return dataclasses.replace(c, stages=min(fitting[-1], max(steps, 2)))


def smem_bytes(p: Problem, c: SplitMatmulConfig, stages: int) -> int:
    stage = (c.tile_m + p.factors * c.tile_n) * c.tile_k * p.dtype.itemsize
    s, ring = Schedule(p, c), stages * stage
    rows = c.split * s.share if s.sends else s.part_m
    sums = c.warpgroups * p.factors * rows * (c.own_n + PAD) * 4
    is_shared = s.is_once and not s.sends
    return (max(ring, sums) if is_shared else ring + sums) + _BARRIER_BYTES


def cost(p: Problem, c: SplitMatmulConfig) -> float:
    """Estimates the time of a product in microseconds.

    The SM with the most blocks multiplies, or its SMEM is read and written, or it
    copies from the L2; or all of them wait for the device's memory.
    """
    s, item = Schedule(p, c), p.dtype.itemsize
    blocks = s.count * c.split * c.clusters
    columns, depth = p.factors * c.tile_n, c.tile_k * item
    sums = p.factors * c.own_n * c.tile_m // 128
    registers = (c.warpgroups + 1) * 128 * (sums + _OTHER_REGISTERS)
    space = smem_bytes(p, c, c.stages) + _RESERVED_BYTES
    most = plgpu.cdiv(min(c.blocks, blocks), _SMS)
    on_sm = max(1, min(_SM_BYTES // space, 65536 // registers, most))
    # SMs of a cluster are neighbours: a part of the device stays without.
    sms = _SMS if c.split <= 2 else _SMS * 7 // 8 if c.split == 4 else _SMS * 3 // 4
    waves = plgpu.cdiv(blocks, sms * on_sm)
    on_one = plgpu.cdiv(blocks, _SMS) if waves == 1 else waves * on_sm
    steps = plgpu.cdiv(plgpu.cdiv(p.k, c.tile_k), c.split * c.clusters)
    copied = (c.tile_m + columns) * depth
    # An instruction reads 64 columns of B and the rows of A.
    read = columns // 64 * (64 + c.tile_m) * depth
    step = max(
        2 * c.tile_m * columns * c.tile_k / (810e6 / _SMS * 2 / item),
        (copied + read) / _SMEM_BYTES_PER_US,
        copied / _L2_BYTES_PER_US,
    )
    exchange = 0.0
    if s.sends:
        exchange = 0.4 + 0.4 * math.log2(c.split)
        exchange += c.tile_m * columns * 4 / _EXCHANGE_BYTES_PER_US
    elif c.split > 1:
        parts = 0 if s.is_once else c.tile_m // c.part
        exchange = 0.3 + 0.8 * math.log2(c.split) + 1.5 * parts
        exchange += c.tile_m * columns * 4 / _EXCHANGE_BYTES_PER_US
    if c.clusters > 1:
        # The last cluster reads the sums of the others.
        others = (c.clusters - 1) * c.tile_m * columns * 4 // c.split
        exchange += 2.0 + others / _OTHERS_BYTES_PER_US
    # Blocks that are left when all SMs have been busy have an SM to themselves.
    whole, rest = divmod(blocks, sms * on_sm)
    bytes_of_b = columns * depth * steps
    memory = whole * sms * on_sm * bytes_of_b / _BYTES_PER_US + max(
        rest * bytes_of_b / _BYTES_PER_US,
        plgpu.cdiv(rest, _SMS) * bytes_of_b / _SM_BYTES_PER_US,
    )
    if columns < _WIDE_COLUMNS:
        memory *= _NARROW
    busy = max(on_one * steps * step, memory, p.bytes / _BYTES_PER_US)
    return FIXED_US + busy + waves * exchange

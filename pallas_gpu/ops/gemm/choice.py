# SPDX-License-Identifier: Apache-2.0
"""Which kernel computes a product, and with which configuration.

A table has what was measured; else a small cost model ranks the candidates of both of
Hopper's kernels, that for many rows and that for few rows or few tiles.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

import jax.numpy as jnp

import pallas_gpu as plgpu
from pallas_gpu import arch
from pallas_gpu.ops import targets
from pallas_gpu.ops.gemm import blackwell, few, hopper
from pallas_gpu.ops.gemm.config import (
    CONSUMERS,
    BlackwellMatmulConfig,
    MatmulConfig,
    SplitMatmulConfig,
)
from pallas_gpu.ops.gemm.epilogue import PLAIN
from pallas_gpu.ops.gemm.problem import Problem

_SMS = arch.SM_90A.sm_count
# The type of a configuration says which kernel it is for.
KERNELS: dict[type, Any] = {
    MatmulConfig: hopper.make_kernel,
    SplitMatmulConfig: few.make_kernel,
    BlackwellMatmulConfig: blackwell.make_kernel,
}
# Rows and columns from which the costs of parts of K and of the kernel for few rows
# have been compared with measurements: those of a tile of the tensor core.
_LEAST_DIVIDED = 64


# Tiles of all rows.
_WHOLE = SplitMatmulConfig(
    tile_m=256, tile_n=64, stages=5, warpgroups=1, split=2, blocks=132
)

# (M, N, K) of one product of 16-bit types, measured on an H200 with random normal
# bfloat16 by benchmarks/matmul_shapes.py.
_MEASURED: dict[tuple[int, int, int], Any] = {
    (4096, 57344, 8192): MatmulConfig(),
    (8192, 8192, 8192): MatmulConfig(minor="n"),
    (4096, 8192, 28672): MatmulConfig(),
    (1024, 1024, 1024): SplitMatmulConfig(
        tile_m=128, tile_n=64, warpgroups=1, blocks=132
    ),
    (1000, 8192, 28672): MatmulConfig(tile_m=64, tile_n=256, cluster=None),
    (256, 256, 65536): MatmulConfig(
        tile_m=64, tile_n=64, stages=8, epilogue_n=32, cluster=None, parts=16
    ),
    (256, 4096, 4096): _WHOLE,
    (256, 4096, 14336): _WHOLE,
    (256, 6144, 4096): MatmulConfig(
        tile_m=64, tile_n=96, stages=7, epilogue_n=32, cluster="m"
    ),
    (256, 8192, 8192): SplitMatmulConfig(
        tile_m=128, stages=7, warpgroups=1, blocks=132
    ),
    (256, 8192, 28672): MatmulConfig(
        tile_m=64, tile_n=256, epilogue_n=32, cluster="m", parts=2
    ),
    (256, 57344, 8192): MatmulConfig(tile_m=64, tile_n=224, epilogue_n=32, cluster="m"),
    (64, 10240, 8192): SplitMatmulConfig(warpgroups=1, split=2),
    (64, 8192, 28672): SplitMatmulConfig(tile_n=64, stages=7, warpgroups=1),
    (16, 28672, 4096): SplitMatmulConfig(tile_m=16, stages=5, warpgroups=1),
    (16, 8192, 8192): SplitMatmulConfig(
        tile_m=16, tile_n=64, stages=20, warpgroups=1, blocks=132
    ),
    (16, 6144, 4096): SplitMatmulConfig(tile_m=16, stages=5, warpgroups=1, split=2),
    (1, 28672, 4096): SplitMatmulConfig(
        tile_m=8, tile_n=448, stages=3, warpgroups=1, split=2, blocks=132
    ),
    (1, 8192, 8192): SplitMatmulConfig(
        tile_m=8, tile_n=64, stages=20, warpgroups=1, blocks=132
    ),
    (1, 6144, 4096): SplitMatmulConfig(tile_m=8, stages=5, warpgroups=1, split=2),
}


def choose(problem: Problem) -> Any:
    """Returns the configuration for a problem on the target of its parameters."""
    if targets.chosen(problem.compiler_params).has(arch.Feature.TCGEN05):
        return BlackwellMatmulConfig()
    if (known := measured(problem)) is not None:
        return known
    if problem.turns_a or problem.transposed.turns_a:
        return best(problem)
    divided, plain = best_of_few(problem), best(problem)
    if divided is None:
        return plain
    if plain.parts > 1 and min(problem.m, problem.n) < _LEAST_DIVIDED:
        return divided
    estimate = cost(problem, plain)
    if plain.parts == 1:
        estimate += _FIXED_US
    return divided if cost(problem, divided) <= estimate else plain


def measured(p: Problem) -> Any:
    """Returns the configuration of a problem; None if it was not measured.

    Epilogues with another operand of the result's size need SMEM of their own.
    """
    e = p.epilogue
    is_like_measured = (
        p.batch == 1
        and p.dtype.itemsize == p.out_dtype.itemsize == 2
        and not (e.gated or e.residual)
    )
    is_plain = not (p.transpose_a or p.transpose_b)
    return _MEASURED.get((p.m, p.n, p.k)) if is_like_measured and is_plain else None


def turned(p: Problem) -> str:
    """Returns which operands, of "a" and "b", XLA transposes before the kernel.

    The tensor core reads types other than 16-bit ones along K alone. Hopper's kernel
    transposes one float32 operand on its way to the tensor core, its left one.
    """
    if p.dtype.itemsize == 2:
        return ""
    all_of = ("a" if p.transpose_a else "") + ("" if p.transpose_b else "b")
    if p.dtype != jnp.float32 or p.epilogue.gated or not all_of:
        return all_of
    # With both stored so, A is the one that is copied.
    kept = all_of[-1]
    if (config := p.config) is not None:
        is_left = isinstance(config, MatmulConfig) and (
            config.transposed == (kept == "b")
        )
        return all_of.replace(kept, "") if is_left else all_of
    if targets.chosen(p.compiler_params).has(arch.Feature.TCGEN05):
        return all_of
    copied = dataclasses.replace(p, transpose_a=False, transpose_b=True)
    p = dataclasses.replace(copied, transpose_a=kept == "a", transpose_b=kept != "b")
    is_faster = cost(p, choose(p)) < _copy_us(p, kept) + cost(copied, choose(copied))
    return all_of.replace(kept, "") if is_faster else all_of


def cost(p: Problem, c: Any) -> float:
    """Estimates the time of a product in microseconds."""
    is_few = isinstance(c, SplitMatmulConfig)
    return _cost_of_few(p, c) if is_few else _cost_of_many(p, c)


# --- many rows ------------------------------------------------------------------------

type Axis = Literal["m", "n"] | None

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
def best(p: Problem) -> MatmulConfig:
    """Returns the configuration of the kernel for many rows."""
    return min(candidates(p), key=lambda c: cost(p, c))


def _copy_us(p: Problem, name: str) -> float:
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


def _cost_of_many(p: Problem, c: MatmulConfig) -> float:
    """The slowest block computes `waves` tiles. A step of a tile takes as long as its
    products, as its copies from the L2, or as the accesses to its SMEM, which TMA
    fills and the tensor core reads. The numbers are fitted by hand to 250
    measurements on an H200 (bfloat16, 256 to 8192 rows).
    """
    if c.transposed:
        return _cost_of_many(p.transposed, dataclasses.replace(c, transposed=False))
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


# --- few rows, or few tiles -----------------------------------------------------------

# What the launch adds to the SMEM of a block (CUDA programming guide, 9.0), and what
# the mbarriers take.
_RESERVED_BYTES, _BARRIER_BYTES_OF_FEW = 1024, 512
_SM_BYTES = arch.SM_90A.smem_bytes_per_block + _RESERVED_BYTES
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
_LEAST_STEPS_OF_FEW = 8
_MOST_STAGES = 10
# Blocks of a launch that does not loop over tiles.
_MANY = 1 << 20
# ptxas needs about so many beside the accumulators.
_OTHER_REGISTERS = 32
# Microseconds of a launch, the first copies and the last stores, and bytes per
# microsecond: of the device's memory; of an SM, copies from it and from the L2,
# accesses to SMEM, and sums that a cluster exchanges. Fitted to times on an H200.
_FIXED_US = 2.5
_BYTES_PER_US = 4.6e6
# More bytes of a row at once are read faster; of so many columns or more.
_WIDE_COLUMNS, _NARROW = 192, 1.02
_SM_BYTES_PER_US = 46e3
_L2_BYTES_PER_US = 95e3
_SMEM_BYTES_PER_US_OF_FEW = 235e3
_EXCHANGE_BYTES_PER_US = 60e3
_OTHERS_BYTES_PER_US = 90e3


@functools.lru_cache(maxsize=4096)
def best_of_few(p: Problem) -> SplitMatmulConfig | None:
    """Returns the configuration of the kernel for few rows or few tiles.

    None: there are more rows, and the tiles fill the device anyway.
    """
    if p.m > _MOST_ROWS and p.tiles(128, 128) > _SMS:
        return None
    found = candidates_of_few(p)
    return min(found, key=lambda c: cost(p, c)) if found else None


def candidates_of_few(p: Problem) -> list[SplitMatmulConfig]:
    """Returns the configurations that suit a problem; of equal ones the first is best.

    They are in the order of blocks on an SM, and of blocks that divide K.
    """
    return [
        c
        for on_sm in (1, 2, 3)
        for split in (1, 2, 4, 8)
        for tile_m in _rows(p)
        for tile_n, warpgroups in _BLOCKS
        for clusters in _parts_of_clusters(p, tile_m, tile_n)
        if (
            c := _config_of_few(p, (tile_m, tile_n), warpgroups, on_sm, split, clusters)
        )
    ]


def _rows(p: Problem) -> list[int]:
    if p.transpose_a:
        # Rows of SMEM are those of a swizzle.
        return [m for m in (16, 32, 64, 128, 256) if m == 16 or m < 2 * p.m]
    step = 8 if p.m <= 64 else 32
    return sorted({min(m, plgpu.align_to(p.m, step)) for m in (64, 128, 256)})


def _parts_of_clusters(p: Problem, tile_m: int, tile_n: int) -> tuple[int, ...]:
    """Returns into how many parts clusters divide K, where tiles are very few."""
    return (1, 2, 4, 8, 16) if 8 * p.tiles(tile_m, tile_n) < _SMS else (1,)


def _config_of_few(
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
    if (
        sums > most
        or registers > 65536
        or steps < (_LEAST_STEPS_OF_FEW if parts > 1 else 1)
    ):
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
    s, ring = few.Schedule(p, c), stages * stage
    rows = c.split * s.share if s.sends else s.part_m
    sums = c.warpgroups * p.factors * rows * (c.own_n + few.PAD) * 4
    is_shared = s.is_once and not s.sends
    return (max(ring, sums) if is_shared else ring + sums) + _BARRIER_BYTES_OF_FEW


def _cost_of_few(p: Problem, c: SplitMatmulConfig) -> float:
    """The SM with the most blocks multiplies, or its SMEM is read and written, or it
    copies from the L2; or all of them wait for the device's memory.
    """
    s, item = few.Schedule(p, c), p.dtype.itemsize
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
        (copied + read) / _SMEM_BYTES_PER_US_OF_FEW,
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
    return _FIXED_US + busy + waves * exchange

# SPDX-License-Identifier: Apache-2.0
"""A product of 8-bit matrices with scales, for Hopper: persistent, warp-specialised.

The schedule is that of `hopper.py`: a producer fills a ring of SMEM buffers, two or
three consumers multiply their parts of a block's rows, clusters of two blocks share an
operand. The tensor core reads 8-bit operands with K in the minor dimension alone, so B
is stored as (N, K).

Sums stay in the tensor core's accumulator, or are promoted: then each step of 128 along
K has an accumulator of its own, whose contents are multiplied by the scales of the
step's blocks and added in float32 registers. A consumer has registers for the sums and
for half of its rows at a time in the accumulator.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import arch, errors, expect
from pallas_gpu.ops.gemm import hopper
from pallas_gpu.ops.memory import Memory
from pallas_gpu.ops.rules import Strip
from pallas_gpu.ops.tiles import tiles

# Warpgroups that multiply.
_CONSUMERS = 2, 3
# Elements along K and N that share a scale of a block.
BLOCK = 128
_ROWS = 64
_ZEROS = plgpu.OOBFillMode.ZEROS


@expect.arguments()
@dataclasses.dataclass(frozen=True)
class ScaledMatmulConfig:
    """Tile sizes and schedule of `scaled_matmul` on Hopper.

    A step along K is 128 elements: one block of scales, one row of the widest swizzle.

    Attributes:
      tile_m: rows of one consumer's tile.
      tile_n: columns of a block's tile; 128 where there are scales of blocks.
      consumers: warpgroups that multiply, 2 or 3; a block has as many tiles of rows.
      stages: SMEM buffers of the ring.
      cluster: the dimension along which two blocks form a cluster: `"n"` shares rows of
        A, `"m"` the columns of B, None has no clusters.
      minor: dimension of the output that the order of tiles cuts into strips.
      strip: width of a strip in tiles.
      blocks: number of blocks; one per SM.
      zigzag: whether every other tile of a block goes through K backwards: it often
        needs the same columns of B as the one before, whose last part the L2 still
        holds. The last bits of a sum then depend on the position of its tile: equal
        rows of A may have different results.

    Raises:
      ArgumentError: sizes that do not match each other or the tensor core.
    """

    tile_m: int = 128
    tile_n: int = 128
    consumers: int = 2
    stages: int = 4
    cluster: Literal["n", "m"] | None = "n"
    minor: Literal["n", "m"] = "n"
    strip: Strip = 8
    blocks: int = arch.SM_90A.sm_count
    zigzag: bool = False

    def __post_init__(self):
        m, n = self.tile_m, self.tile_n
        supported = m in (64, 128) and 32 <= n <= 256 and n % 32 == 0
        if not supported or self.consumers not in _CONSUMERS:
            raise errors.ArgumentError(
                "ScaledMatmulConfig: these tiles are not supported",
                expected="tile_m 64 or 128, tile_n a multiple of 32 up to 256, "
                "2 or 3 consumers",
                got=f"tile_m={m}, tile_n={n}, consumers={self.consumers}",
                hint="start from ScaledMatmulConfig()",
            )
        if self.stages < 2 or self.blocks < self.cluster_size:
            raise errors.ArgumentError(
                "ScaledMatmulConfig: there are too few stages or blocks",
                expected=f"2 stages and {self.cluster_size} blocks or more",
                got=f"stages={self.stages}, blocks={self.blocks}",
                hint="use 4 stages, and one block per SM",
            )

    @property
    def block_m(self) -> int:
        """Rows of a block's tile."""
        return self.consumers * self.tile_m

    @property
    def cluster_size(self) -> int:
        """Blocks of a cluster."""
        return 1 if self.cluster is None else 2


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a kernel computes.

    Attributes:
      m, n, k: sizes.
      a, b, out: element types.
      a_scaled, b_scaled: whether A, B has one scale.
      rows, columns: whether each row of A, each column of B has a scale.
      blocked: whether blocks of 1x128 of A and of 128x128 of B have scales.
      biased: whether a bias is added to each row.
      promoted: whether sums are promoted every 128 of K.
    """

    m: int
    n: int
    k: int
    a: jnp.dtype
    b: jnp.dtype
    out: jnp.dtype
    a_scaled: bool = False
    b_scaled: bool = False
    rows: bool = False
    columns: bool = False
    blocked: bool = False
    biased: bool = False
    promoted: bool = False

    batch: ClassVar[int] = 1

    @property
    def accumulator(self) -> Any:
        """The type of the tensor core's accumulator."""
        return jnp.float32 if jnp.issubdtype(self.a, jnp.floating) else jnp.int32

    @property
    def operands(self) -> list[str]:
        """The names of the kernel's arguments after A and B, in order."""
        given = {
            "a_blocks": self.blocked,
            "b_blocks": self.blocked,
            "a_scale": self.a_scaled,
            "b_scale": self.b_scaled,
            "row_scale": self.rows,
            "column_scale": self.columns,
            "bias": self.biased,
        }
        return [name for name, present in given.items() if present]


@functools.lru_cache(maxsize=64)
def make_kernel(p: Problem, config: ScaledMatmulConfig, compiler_params, interpret):
    """Returns the function of A (M, K), B (N, K) and `Problem.operands`.

    `a_blocks` is (K / 128, M), with M rounded up to a multiple of 4, and `b_blocks`
    (K / 128, N / 128), both rounded up; `a_scale` and `b_scale` are (1,), and the other
    operands have one element for each row or column of all tiles (`extent`).
    """
    c = config
    schedule = Schedule(p, c)
    operands = [
        tiles((c.stages, c.block_m, BLOCK), p.a),
        tiles((c.stages, c.tile_n, BLOCK), p.b),
    ]
    scratch = {
        "operands": plgpu.Ring.of(
            operands,
            copies=2 + p.blocked,
            consumers=c.consumers,
            collective_axes="pair" if c.cluster else (),
        ),
        "out_smem": tiles((c.consumers, 2, _ROWS, schedule.part_n), p.out),
    }
    if p.blocked:
        scratch["scale_smem"] = plgpu.SMEM((c.stages, c.block_m), jnp.float32)

    def visits(wg, a, b, *refs, **memory):
        *extra, out = refs
        named = dict(zip(p.operands, extra, strict=True))
        mem = Memory(schedule=schedule, a=a, b=b, out=out, **named, **memory)
        return (
            lambda: functools.partial(_produce, mem),
            lambda: functools.partial(_consume, mem, wg, _factors(mem)),
        )

    return hopper.persistent(
        schedule,
        visits,
        c.consumers,
        c.blocks,
        jax.ShapeDtypeStruct((p.m, p.n), p.out),
        scratch,
        kernel_name="scaled_matmul",
        compiler_params=compiler_params,
        interpret=interpret,
    )


class Schedule(hopper.Schedule):
    """Which tiles a cluster computes, and in which order."""

    @property
    def steps(self) -> int:
        """Steps along K of one tile."""
        return plgpu.cdiv(self.problem.k, BLOCK)

    def k_block(self, first_step: Any, step: Any) -> Any:
        """The block of K of a tile's step, given the steps before the tile."""
        if not self.config.zigzag:
            return step
        steps = np.int32(self.steps)
        odd = lax.rem(lax.div(first_step, steps), np.int32(2))
        return lax.select(lax.eq(odd, np.int32(1)), steps - 1 - step, step)

    @property
    def part_n(self) -> int:
        """Columns that a consumer stores at once."""
        # The bytes of a row of a swizzle; scales of blocks leave less SMEM.
        widest = (64 if self.problem.blocked else 128) // self.problem.out.itemsize
        return math.gcd(self.config.tile_n, widest)

    def for_each_tile(self, visit: Any) -> None:
        """Calls `visit(row, column, steps before it)`, row and column in tiles."""
        self.tiles.for_each(
            lambda _, mi, ni, number: visit(mi, ni, number * self.steps)
        )


def _factors(mem: Memory) -> list[Any]:
    """The scales of A and B. Their product may not be a float32."""
    found = mem.get("a_scale"), mem.get("b_scale")
    return [ref[0] for ref in found if ref is not None]


def _produce(mem: Memory, mi, ni, first_step) -> None:
    c = mem.schedule.config
    share_a, share_b = (("pair",) if c.cluster == d else () for d in ("n", "m"))
    rows = plgpu.ds(mi * c.block_m, c.block_m)
    columns = plgpu.ds(ni * c.tile_n, c.tile_n)

    @plgpu.loop(0, mem.schedule.steps)
    def _(ki):
        slot = mem.operands.fill(first_step + ki)
        block = mem.schedule.k_block(first_step, ki)
        depth = plgpu.ds(block * BLOCK, BLOCK)
        a, b = slot.buffers
        copies: list[tuple[Any, Any, tuple[str, ...]]] = [
            (mem.a.at[rows, depth], a, share_a),
            (mem.b.at[columns, depth], b, share_b),
        ]
        if mem.schedule.problem.blocked:
            scales = mem.scale_smem.at[slot.index]
            copies.append((mem.a_blocks.at[block, rows], scales, ()))
        for source, buffer, axes in copies:
            plgpu.copy_gmem_to_smem(
                source, buffer, slot.full, collective_axes=axes, oob_mode=_ZEROS
            )


def _consume(mem: Memory, wg, factors, mi, ni, first_step) -> None:
    c = mem.schedule.config
    sums = _promoted if mem.schedule.problem.promoted else _plain
    parts = sums(mem, wg, ni, first_step)
    for i, part in enumerate(parts):
        rows = part.shape[0]
        row = mi * c.block_m + wg * c.tile_m + i * rows
        _store(mem, wg, factors, part, row, ni * c.tile_n, i * rows // _ROWS)


def _plain(mem: Memory, wg, ni, first_step) -> list[jax.Array]:
    """Returns the consumer's tile, from the tensor core's accumulator."""
    del ni
    c, steps = mem.schedule.config, mem.schedule.steps
    own_rows = plgpu.ds(wg * c.tile_m, c.tile_m)

    def accumulate(acc):
        def multiply(_, slot):
            a, b = slot.buffers
            plgpu.wgmma(acc, a.at[own_rows], b.T)

        return mem.operands.accumulate([acc], steps, multiply, first=first_step)

    shape = c.tile_m, c.tile_n
    return plgpu.run_scoped(
        accumulate, plgpu.ACC(shape, mem.schedule.problem.accumulator)
    )


def _promoted(mem: Memory, wg, ni, first_step) -> list[jax.Array]:
    """Returns the consumer's tile in parts of 64 rows, each added up in registers."""
    p, c = mem.schedule.problem, mem.schedule.config
    shape = _ROWS, c.tile_n
    starts = range(0, c.tile_m, _ROWS)

    def step(ki, sums):
        slot = mem.operands.slot(first_step + ki)
        a, b = slot.buffers
        b_scale = None
        if p.blocked:
            block = mem.schedule.k_block(first_step, ki)
            b_scale = mem.b_blocks[block, _column_block(mem, ni)]
        mem.operands.take(first_step + ki)
        result = []
        for start, total in zip(starts, sums, strict=True):
            rows = plgpu.ds(wg * c.tile_m + start, _ROWS)

            def multiply(acc, rows=rows):
                plgpu.wgmma(acc, a.at[rows], b.T)
                return acc[...]

            part = plgpu.run_scoped(multiply, plgpu.ACC(shape, p.accumulator))
            part = part.astype(jnp.float32)
            if p.blocked:
                scale = mem.scale_smem[slot.index, rows] * b_scale
                part = part * lax.broadcast_in_dim(scale, shape, (0,))
            # The sums need the registers that the next product accumulates in.
            result.append(lax.optimization_barrier(total + part))
        mem.operands.release(first_step + ki)
        return tuple(result)

    zeros = tuple(jnp.zeros(shape, jnp.float32) for _ in starts)
    return list(plgpu.loop(0, mem.schedule.steps, init_carry=zeros)(step))


def _column_block(mem: Memory, ni) -> Any:
    """The block of scales of B; a cluster's last tile may lie behind the last one."""
    return jnp.minimum(ni, mem.b_blocks.shape[1] - 1)


def _store(mem: Memory, wg, factors, product, row, column, first: int) -> None:
    """Scales a tile and stores it part by part; copies overlap with what follows."""
    p, width = mem.schedule.problem, mem.schedule.part_n
    n_parts = product.shape[1] // width
    all_parts = mem.schedule.config.tile_m // _ROWS * n_parts
    store = plgpu.TileStore(mem.out_smem.at[wg], all_parts)
    parts = [(i, j) for i in range(product.shape[0] // _ROWS) for j in range(n_parts)]
    for i, j in parts:
        top, left = row + i * _ROWS, column + j * width
        part = product[i * _ROWS : (i + 1) * _ROWS, j * width : (j + 1) * width]
        if jnp.issubdtype(p.out, jnp.floating):
            part = _scaled(mem, factors, part.astype(jnp.float32), top, left)
        store.store(
            (first + i) * n_parts + j,
            part,
            mem.out.at[plgpu.ds(top, _ROWS), plgpu.ds(left, width)],
            predicate=_starts_inside(mem, top, left),
        )


def _starts_inside(mem: Memory, row, column) -> Any:
    """Whether a part has elements of the result; None if all have."""
    p, schedule = mem.schedule.problem, mem.schedule
    rows, columns = schedule.tiles.extent
    if rows - p.m < _ROWS and columns - p.n < schedule.part_n:
        return None
    return jnp.logical_and(row < p.m, column < p.n)


def _scaled(mem: Memory, factors, part, row, column) -> Any:
    """Multiplies by the scales of rows and columns, and adds the bias."""
    p, shape = mem.schedule.problem, part.shape

    def vector(ref, start, axis):
        values = ref[plgpu.ds(start, shape[axis])]
        return lax.broadcast_in_dim(values, shape, (axis,))

    for factor in factors:
        part = part * factor
    if p.rows:
        part = part * vector(mem.row_scale, row, 0)
    if p.columns:
        part = part * vector(mem.column_scale, column, 1)
    if p.biased:
        part = part + vector(mem.bias, column, 1).astype(jnp.float32)
    return part

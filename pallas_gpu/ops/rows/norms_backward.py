# SPDX-License-Identifier: Apache-2.0
"""Derivatives of norms in one pass over the rows: those of scale and bias, too.

Each warpgroup of a persistent block takes every n-th tile of rows. TMA copies the tile
of x and that of the derivative into SMEM, where they are read twice: for the sums over
a row, and for the result, which replaces x there and is stored by TMA. The sums over
rows stay in registers until the last tile; those of all warpgroups are few, and added
outside.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import arch
from pallas_gpu.ops.memory import Memory, launch
from pallas_gpu.ops.rows.rows import Rows

# Columns whose sums a warpgroup has in registers: 64 each a thread.
_MOST_COLUMNS = 8192
# Elements that are in registers at once: 16 bytes a thread, of 16-bit types.
_PART = 1024
# Warpgroups of a block by the number of sums, which take their registers. For one sum,
# 2, 3 and 4 are equally fast on an H200.
_WARPGROUPS = {0: 3, 1: 2, 2: 2}
_MOST_SLOTS = 4
_BLOCKS = arch.SM_90A.sm_count
# Where in SMEM a copy may begin (PTX ISA, cp.async.bulk.tensor).
_ALIGNMENT_BYTES = 128
# SMEM that is left to reductions and barriers.
_RESERVED_BYTES = 8 * 1024
_PROMISE = plgpu.OOBFillMode.PROMISE_IN_BOUNDS


@dataclasses.dataclass(frozen=True)
class OnePass:
    """How the rows are divided.

    Attributes:
      rows: the array.
      dtype: of x and its derivative.
      scale_dtype: of the scale, None without one.
      sums: number of sums over rows: of scale and bias.
    """

    rows: Rows
    dtype: Any
    scale_dtype: Any
    sums: int

    @property
    def fits(self) -> bool:
        """Whether TMA can copy the rows, and SMEM holds two tiles."""
        columns = self.rows.columns
        aligned = self._tile_bytes % _ALIGNMENT_BYTES == 0
        if self.scale_dtype is not None:
            aligned &= columns * jnp.dtype(self.scale_dtype).itemsize % 16 == 0
        return aligned and columns <= _MOST_COLUMNS and self._buffers >= 2

    @property
    def tile(self) -> tuple[int, int]:
        return self.rows.together, self.rows.columns

    @property
    def tiles(self) -> int:
        return self.rows.count // self.rows.together

    @property
    def _buffers(self) -> int:
        """Tiles of x and the derivative that SMEM holds."""
        smem_bytes = arch.SM_90A.smem_bytes_per_block - _RESERVED_BYTES
        if self.scale_dtype is not None:
            smem_bytes -= self.rows.columns * jnp.dtype(self.scale_dtype).itemsize
        return smem_bytes // (2 * self._tile_bytes)

    @property
    def _tile_bytes(self) -> int:
        return math.prod(self.tile) * jnp.dtype(self.dtype).itemsize

    @property
    def warpgroups(self) -> int:
        most = _WARPGROUPS[self.sums]
        return min(most, self._buffers // 2, self.tiles)

    @property
    def slots(self) -> int:
        return min(_MOST_SLOTS, self._buffers // self.warpgroups)

    @property
    def blocks(self) -> int:
        return min(_BLOCKS, plgpu.cdiv(self.tiles, self.warpgroups))

    def parts(self) -> Iterator[slice]:
        size = max(1, _PART // self.rows.together)
        for start in range(0, self.rows.columns, size):
            yield slice(start, min(start + size, self.rows.columns))


def backward(p: OnePass, norm: Any, x, d_y, scale) -> tuple[Any, list[Any]]:
    """Returns the derivatives of x, and those of scale and bias, where given.

    Args:
      p: the division; it fits.
      norm: `centred`, `epsilon`, `has_scale`, `has_bias`, and `launch`.
      x, d_y: the rows, and the derivative of the result.
      scale: of the columns, in a tuple; empty without one.
    """
    height, columns = p.tile
    workers = p.blocks * p.warpgroups
    buffers = plgpu.SMEM((p.warpgroups, p.slots, height, columns), p.dtype)
    scratch = {
        "x_smem": buffers,
        "d_smem": buffers,
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=p.warpgroups * p.slots),
    }
    if scale:
        scratch["scale_smem"] = plgpu.SMEM((columns,), p.scale_dtype)
        scratch["scale_full"] = plgpu.Barrier()
    sum_type = jax.ShapeDtypeStruct((workers, columns), jnp.float32)
    results = {"d_x": jax.ShapeDtypeStruct((p.rows.count, columns), p.dtype)}
    body = functools.partial(_body, p, norm)
    kernel = launch(
        *(norm.launch, norm.launch.backward.name, body),
        ("x", "d_y", *("scale",) * len(scale)),
        results | {f"d_{i}": sum_type for i in range(p.sums)},
        scratch,
        grid={"block": p.blocks},
        warpgroups=p.warpgroups,
    )
    d_x, *sums = kernel(p.rows.matrix(x), p.rows.matrix(d_y), *scale)
    return d_x.reshape(x.shape), [partial.sum(0) for partial in sums]


def _body(p: OnePass, norm: Any, mem: Memory) -> None:
    scale_smem = mem.get("scale_smem")
    has_scale = scale_smem is not None
    wg = lax.axis_index("wg")
    full = mem.full.at[plgpu.ds(wg * p.slots, p.slots)]
    ring = plgpu.Ring((mem.x_smem.at[wg], mem.d_smem.at[wg]), None, full)
    worker = lax.axis_index("block") * p.warpgroups + wg
    workers = p.blocks * p.warpgroups
    steps = lax.div(p.tiles - worker + (workers - 1), workers)

    if has_scale:

        @plgpu.when(wg == 0)
        def _():
            plgpu.copy_gmem_to_smem(mem.scale, scale_smem, mem.scale_full)

    def tile(ref: Any, step: Any) -> Any:
        # The last rows first: what was written last may still be in the L2 cache.
        last = p.tiles - 1 - worker
        start = (last - step * workers) * p.tile[0]
        return ref.at[plgpu.ds(start, p.tile[0])]

    def load(step: Any) -> None:
        slot = ring.fill(step)
        for ref, smem in zip((mem.x, mem.d_y), slot.buffers, strict=True):
            plgpu.copy_gmem_to_smem(tile(ref, step), smem, slot.full, oob_mode=_PROMISE)

    for first in range(p.slots):

        @plgpu.when(first < steps)
        def _(first=first):
            load(jnp.int32(first))

    if has_scale:
        plgpu.barrier_wait(mem.scale_full)

    def visit(step: Any, totals: Any) -> Any:
        x_tile, d_tile = ring.take(step).buffers
        row = _measured(p, norm, x_tile, d_tile, scale_smem)
        later = step + (p.slots - 1)

        @plgpu.when((step > 0) & (later < steps))
        def _():
            # The tile before has been stored: its buffer takes another one.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            load(later)

        totals = _written(p, norm, row, x_tile, d_tile, scale_smem, totals)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(x_tile, tile(mem.d_x, step))
        return totals

    zeros = [
        jnp.zeros((p.tile[0], part.stop - part.start), jnp.float32)
        for part in p.parts()
    ]
    totals = lax.fori_loop(0, steps, visit, (zeros,) * p.sums)
    for i, total in enumerate(totals):
        for part, of_part in zip(p.parts(), total, strict=True):
            mem.get(f"d_{i}")[worker, part] = of_part.sum(0)
    plgpu.wait_smem_to_gmem(0)


def _load(ref: Any, part: slice) -> Any:
    return ref[:, part].astype(jnp.float32)


def _scaled(d: Any, scale: Any, part: slice) -> Any:
    if scale is None:
        return d
    return d * lax.broadcast_in_dim(scale[part].astype(jnp.float32), d.shape, (1,))


def _mean(p: OnePass, terms: list[Any]) -> Any:
    """Returns the mean of each row of the terms, which are of parts of the columns."""
    *whole, last = terms
    if whole and last.shape == whole[0].shape:
        whole.append(last)
        last = None
    total = jnp.sum(functools.reduce(lax.add, whole), -1) if whole else 0.0
    if last is not None:
        total = total + jnp.sum(last, -1)
    return total / p.rows.columns


@dataclasses.dataclass(frozen=True)
class _Row:
    """What is known of each row of a tile.

    Attributes:
      mean: of x; None if it does not count.
      factor: that of x less its mean.
      along, total: means of the scaled derivative times y, and of itself.
    """

    mean: Any
    factor: Any
    along: Any
    total: Any


def _less(x: Any, of_rows: Any) -> Any:
    return x if of_rows is None else x - lax.broadcast_in_dim(of_rows, x.shape, (0,))


def _measured(p: OnePass, norm: Any, x_tile, d_tile, scale) -> _Row:
    """Reads a tile: once, and before that for the mean."""
    mean = None
    if norm.centred:
        mean = _mean(p, [_load(x_tile, part) for part in p.parts()])
    squares, along, alone = [], [], []
    for part in p.parts():
        x = _less(_load(x_tile, part), mean)
        d = _scaled(_load(d_tile, part), scale, part)
        squares.append(x * x)
        along.append(d * x)
        alone.append(d)
    factor = lax.rsqrt(_mean(p, squares) + norm.epsilon)
    total = _mean(p, alone) if norm.centred else None
    return _Row(mean, factor, _mean(p, along) * factor, total)


def _written(p: OnePass, norm: Any, row: _Row, x_tile, d_tile, scale, totals) -> Any:
    """Replaces x by its derivative; returns the new sums over rows."""
    found: list[list[Any]] = [[] for _ in totals]
    for number, part in enumerate(p.parts()):
        x, d = _less(_load(x_tile, part), row.mean), _load(d_tile, part)
        factor, along = (
            lax.broadcast_in_dim(v, x.shape, (0,)) for v in (row.factor, row.along)
        )
        y = x * factor
        terms = [d * y] * norm.has_scale + [d] * norm.has_bias
        for new, old, term in zip(found, totals, terms, strict=True):
            new.append(old[number] + term)
        d_x = _less(_scaled(d, scale, part) - y * along, row.total) * factor
        x_tile[:, part] = d_x.astype(x_tile.dtype)
    return tuple(found)

# SPDX-License-Identifier: Apache-2.0
"""Gathers rows from all devices and multiplies them, in one kernel for Hopper.

The product is that of `ops/gemm/hopper.py`: a result for each device's rows, beginning
with the device's own. Meanwhile a second warp of each producer stores the device's rows in
the other devices' memory, part by part, in the order in which they are multiplied there,
and signals each part. A producer waits for the parts of a tile's rows before it copies
them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import arch
from pallas_gpu.ops.collectives.devices import Group
from pallas_gpu.ops.gemm import heuristic, hopper
from pallas_gpu.ops.gemm.config import CONSUMERS, MatmulConfig
from pallas_gpu.ops.gemm.problem import Problem

# A piece that TMA copies at once, through two buffers: rows and columns.
_PIECE = 64, 64
_BUFFERS = 2
# Columns of a part, which has the rows of a tile: one CTA sends it, and signals once.
_PART_COLUMNS = 512


@functools.lru_cache(maxsize=64)
def make_kernel(
    p: Problem, config: MatmulConfig, group: Group, compiler_params, interpret
) -> Any:
    """Returns the kernel: a function of (1, M, K) and (1, K, N), of `p.batch` devices.

    The results are (devices, M, N), and the rows of the others, (devices - 1, M, K).
    """
    schedule = hopper.Schedule(p, config)
    scratch = {
        **hopper.scratch_of(p, config),
        "sent": plgpu.Ring(
            plgpu.SMEM((_BUFFERS, *_PIECE), p.dtype),
            None,
            plgpu.Barrier(num_barriers=_BUFFERS),
        ),
    }

    def visits(wg, x, w, out, gathered, *, sent, **memory):
        arrivals = Arrivals.of(schedule, group)
        mem = hopper.Memory(a=x, b=w, out=out, **memory)
        return (
            lambda: functools.partial(_produce, arrivals, mem, gathered),
            lambda: _Consumer(schedule, mem, wg, group).visit,
            lambda: _send(arrivals, x, gathered, sent),
        )

    kernel = hopper.persistent(
        schedule,
        visits,
        CONSUMERS,
        config.blocks,
        [
            jax.ShapeDtypeStruct(p.out_shape, p.out_dtype),
            jax.ShapeDtypeStruct((group.size - 1, p.m, p.k), p.dtype),
        ],
        scratch,
        kernel_name="all_gather_matmul",
        compiler_params=compiler_params,
        interpret=interpret,
    )
    return lambda x, w: kernel(x, w)[0]


def choose(p: Problem) -> MatmulConfig:
    """Returns a configuration that leaves SMEM for the pieces that are sent."""
    config = heuristic.choose(p)
    if config.transposed or config.parts > 1:
        config = MatmulConfig(tile_m=64, tile_n=min(128, p.n // 16 * 16), cluster=None)
    sent = _BUFFERS * _PIECE[0] * _PIECE[1] * p.dtype.itemsize
    return with_room(p, config, sent)


def with_room(p: Problem, c: MatmulConfig, bytes_: int) -> MatmulConfig:
    """Returns a configuration with buffers of stores and stages that leave SMEM."""
    if c.tile_n % 32 == 0:
        c = dataclasses.replace(c, epilogue_n=32)
    stores = CONSUMERS * 2 * c.epilogue_m * c.epilogue_n * p.out_dtype.itemsize
    stage = (c.block_m + c.tile_n) * c.tile_k * p.dtype.itemsize
    # Barriers, and buffers that are aligned to a swizzle's pattern.
    room = arch.SM_90A.smem_bytes_per_block - stores - bytes_ - 2048
    return dataclasses.replace(c, stages=max(2, min(c.stages, room // stage)))


@dataclasses.dataclass(frozen=True)
class Arrivals:
    """Semaphores that say which rows of other devices have arrived.

    Attributes:
      schedule: of the product.
      group: the devices.
      arrived: for each other device and tile of rows, the number of parts.
      seen: the number of tiles whose rows have been waited for.
    """

    schedule: hopper.Schedule
    group: Group
    arrived: Any
    seen: Any

    @classmethod
    def of(cls, schedule: hopper.Schedule, group: Group) -> Arrivals:
        """Allocates the semaphores of a launch."""
        rows = plgpu.cdiv(schedule.problem.m, schedule.config.block_m)
        regular = plgpu.SemaphoreType.REGULAR
        arrived = plgpu.get_global(regular((group.size - 1, rows)))
        return cls(schedule, group, arrived, plgpu.get_global(regular))

    @property
    def rows(self) -> int:
        """Tiles of rows of one device."""
        return self.arrived.shape[1]

    @property
    def parts(self) -> int:
        """Parts of the rows of a tile."""
        return plgpu.cdiv(self.schedule.problem.k, _PART_COLUMNS)

    def wait(self, other: Any, row: Any) -> None:
        """Waits for the rows of a tile."""
        at = lax.div(row, np.int32(self.schedule.config.block_m))
        # Tiles outside of the result need no rows.
        at = lax.min(at, np.int32(self.rows - 1))
        plgpu.semaphore_wait(self.arrived.at[other, at], self.parts, decrement=False)
        plgpu.semaphore_signal(self.seen, memory_scope="gpu")

    def reset(self) -> None:
        """Makes all semaphores zero again, when nobody waits for them any more."""
        tiles = self.schedule.tiles
        waits = (tiles.count // self.group.size) * (self.group.size - 1)
        ctas = int(np.prod(tiles.cluster))
        plgpu.semaphore_wait(self.seen, waits * ctas, memory_scope="gpu")

        @plgpu.loop(0, self.rows)
        def _(row: Any) -> None:
            plgpu.semaphore_signal_parallel(
                *[
                    plgpu.SemaphoreSignal(self.arrived.at[i, row], inc=-self.parts)
                    for i in range(self.group.size - 1)
                ]
            )


def _produce(arrivals, mem, gathered, batch, row, column, first_step) -> None:
    """Copies the operands of a tile of the rows of one device."""
    produce = functools.partial(hopper.produce, arrivals.schedule)
    others = dataclasses.replace(mem, a=gathered)

    @plgpu.when(lax.eq(batch, np.int32(0)))
    def _() -> None:
        produce(mem, np.int32(0), row, column, first_step)

    @plgpu.when(lax.gt(batch, np.int32(0)))
    def _() -> None:
        other = lax.sub(batch, np.int32(1))
        arrivals.wait(other, row)
        produce(others, other, row, column, first_step)


@dataclasses.dataclass(frozen=True)
class _Consumer(hopper.Consumer):
    """A consumer whose results begin with those of the device's own rows."""

    group: Group

    def window(self, part: int, batch, row, column) -> tuple[Any, Any]:
        """Returns the index of a part in the result, and whether it begins inside."""
        (batch, *place), is_inside = super().window(part, batch, row, column)
        device = lax.rem(self.group.me() + batch, np.int32(self.group.size))
        return (device, *place), is_inside


def _send(arrivals: Arrivals, x: Any, gathered: Any, sent: plgpu.Ring) -> None:
    """Stores this CTA's share of the device's rows at all other devices."""
    group, schedule = arrivals.group, arrivals.schedule
    p, c, tiles = schedule.problem, schedule.config, schedule.tiles
    me = group.me()
    pieces = plgpu.cdiv(c.block_m, _PIECE[0]), plgpu.cdiv(
        min(p.k, _PART_COLUMNS), _PIECE[1]
    )
    count = pieces[0] * pieces[1]
    parts = arrivals.rows * arrivals.parts
    ctas = tiles.clusters(c.blocks) * int(np.prod(tiles.cluster))
    axes = (tiles.axis, tiles.cluster_axis)
    per_device = plgpu.cdiv(parts, ctas)
    for i in range(group.size - 1):
        # The device that multiplies these rows as its (i + 1)th ones.
        there = group.after(me, -(i + 1))
        target = group.peer(gathered, there)

        @plgpu.nd_loop((parts,), collective_axes=axes)
        def _(info: Any, i=i, there=there, target=target) -> None:
            row, column = (
                f(info.index[0], np.int32(arrivals.parts)) for f in (lax.div, lax.rem)
            )
            first = (info.local_index + i * per_device) * count

            def window(piece: Any) -> Any:
                at = lax.div(piece, np.int32(pieces[1])), lax.rem(
                    piece, np.int32(pieces[1])
                )
                return (
                    plgpu.ds(row * c.block_m + at[0] * _PIECE[0], _PIECE[0]),
                    plgpu.ds(column * _PART_COLUMNS + at[1] * _PIECE[1], _PIECE[1]),
                )

            def load(piece: Any) -> None:
                slot = sent.slot(first + piece)
                plgpu.copy_gmem_to_smem(
                    x.at[(0, *window(piece))],
                    slot.buffers,
                    slot.full,
                    oob_mode=plgpu.OOBFillMode.ZEROS,
                )

            load(np.int32(0))

            @plgpu.loop(0, count)
            def _(piece: Any) -> None:
                # The buffer of the next piece is that of the one before.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.when(piece + 1 < count)(lambda: load(piece + 1))
                slot = sent.take(first + piece)
                plgpu.copy_smem_to_gmem(slot.buffers, target.at[(i, *window(piece))])

            plgpu.wait_smem_to_gmem(0)
            plgpu.semaphore_signal(
                arrivals.arrived.at[i, row], device_id=group.device(there)
            )

    first_cta = functools.reduce(lax.add, [lax.axis_index(axis) for axis in axes])
    plgpu.when(lax.eq(first_cta, np.int32(0)))(arrivals.reset)

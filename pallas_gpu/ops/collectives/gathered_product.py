# SPDX-License-Identifier: Apache-2.0
"""Gathers rows from all devices and multiplies them, in one kernel for Hopper.

The product is that of `ops/gemm/hopper.py`: a result for each device's rows, beginning
with the device's own. Meanwhile a second warp of each producer stores the device's rows
in the other devices' memory, part by part, in the order in which they are multiplied
there, and signals each part. A producer waits for the parts of a tile's rows before it
copies them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.ops.collectives import config
from pallas_gpu.ops.collectives.devices import Group, divided
from pallas_gpu.ops.gemm import hopper
from pallas_gpu.ops.gemm.config import MatmulConfig
from pallas_gpu.ops.gemm.problem import Problem
from pallas_gpu.ops.rules import cached

# A piece that TMA copies at once, through two buffers: rows and columns.
_PIECE = 64, 64
_BUFFERS = 2
# Tiles that are waited for ahead of the producer.
_AHEAD = 2
# Columns of a part, which has the rows of a tile: one CTA sends it, and signals once.
_PART_COLUMNS = 512


@cached
def make_kernel(
    p: Problem, c: MatmulConfig, group: Group, compiler_params, interpret
) -> Any:
    """Returns the kernel: a function of (1, M, K) and (1, K, N), of `p.batch` devices.

    The results are (devices, M, N), and the rows of the others, (devices - 1, M, K).
    """
    schedule = hopper.Schedule(p, c)
    scratch = {
        **hopper.scratch_of(schedule),
        "sent": plgpu.Ring(
            plgpu.SMEM((_BUFFERS, *_PIECE), p.dtype),
            None,
            plgpu.Barrier(num_barriers=_BUFFERS),
        ),
        # Tiles whose rows have arrived, which the producer does not wait for itself.
        "there": plgpu.Ring(
            (), *[plgpu.Barrier(num_barriers=_AHEAD) for _ in ("empty", "full")]
        ),
    }

    def visits(wg, x, w, out, gathered, *, sent, there, **memory):
        arrivals = Arrivals.of(schedule, group)
        mem = hopper.Memory(a=x, b=w, out=out, **memory)
        return (
            lambda: functools.partial(_produce, schedule, mem, gathered, there),
            lambda: _Consumer(schedule, mem, wg, group).visit,
            lambda: _send(arrivals, x, gathered, sent),
            lambda: arrivals.watch(there),
        )

    kernel = hopper.persistent(
        schedule,
        visits,
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
    return config.choose(p, _BUFFERS * _PIECE[0] * _PIECE[1] * p.dtype.itemsize)


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

    def watch(self, there: plgpu.Ring) -> None:
        """Waits for the rows of this CTA's tiles, one after the other."""
        schedule = self.schedule

        def visit(batch, row, column, first_step) -> None:
            del column
            slot = there.fill(lax.div(first_step, np.int32(schedule.steps)))

            @plgpu.when(lax.gt(batch, np.int32(0)))
            def _() -> None:
                at = lax.div(row, np.int32(schedule.config.block_m))
                # Tiles of a cluster may lie outside of the result.
                at = lax.min(at, np.int32(self.rows - 1))
                arrived = self.arrived.at[batch - 1, at]
                plgpu.semaphore_wait(arrived, self.parts, decrement=False)
                plgpu.semaphore_signal(self.seen, memory_scope="gpu")

            plgpu.barrier_arrive(slot.full)

        schedule.for_each_tile(visit)

    def reset(self) -> None:
        """Makes all semaphores zero again, when nobody waits for them any more."""
        tiles = self.schedule.tiles
        waits = tiles.count // self.group.size * (self.group.size - 1)
        waits *= math.prod(tiles.cluster)
        plgpu.semaphore_wait(self.seen, waits, memory_scope="gpu")

        @plgpu.loop(0, self.rows)
        def _(row: Any) -> None:
            plgpu.semaphore_signal_parallel(
                *[
                    plgpu.SemaphoreSignal(self.arrived.at[i, row], inc=-self.parts)
                    for i in range(self.group.size - 1)
                ]
            )


def _produce(schedule, mem, gathered, there, batch, row, column, first_step) -> None:
    """Copies the operands of a tile of the rows of one device."""
    produce = functools.partial(hopper.produce, schedule)
    others = mem.but(a=gathered)
    step = lax.div(first_step, np.int32(schedule.steps))
    there.take(step)

    @plgpu.when(lax.eq(batch, np.int32(0)))
    def _() -> None:
        produce(mem, np.int32(0), row, column, first_step)

    @plgpu.when(lax.gt(batch, np.int32(0)))
    def _() -> None:
        produce(others, batch - 1, row, column, first_step)

    there.release(step)


@dataclasses.dataclass(frozen=True)
class _Consumer(hopper.Consumer):
    """A consumer whose results begin with those of the device's own rows."""

    group: Group

    def window(self, part: int, batch, row, column) -> tuple[Any, Any]:
        """Returns the index of a part in the result, and whether it begins inside."""
        (batch, *place), is_inside = super().window(part, batch, row, column)
        return (self.group.at(self.group.me(), batch), *place), is_inside


def _send(arrivals: Arrivals, x: Any, gathered: Any, sent: plgpu.Ring) -> None:
    """Stores this CTA's share of the device's rows at all other devices."""
    group, tiles = arrivals.group, arrivals.schedule.tiles
    c = arrivals.schedule.config
    axes = tiles.axis, tiles.cluster_axis
    parts = arrivals.rows * arrivals.parts
    ctas = tiles.clusters(c.blocks) * math.prod(tiles.cluster)
    most = plgpu.cdiv(parts, ctas)

    @plgpu.loop(0, group.size - 1)
    def _(i: Any) -> None:
        # The device that multiplies these rows as its (i + 1)th ones.
        there = group.at(group.me(), np.int32(group.size - 1) - i)
        target = group.peer(gathered, there).at[i]

        @plgpu.nd_loop((parts,), collective_axes=axes)
        def _(info: Any) -> None:
            row, column = divided(info.index[0], arrivals.parts)
            start = row * c.block_m, column * _PART_COLUMNS
            before = info.local_index + i * most
            _send_part(arrivals, x.at[0], target, sent, start, before)
            plgpu.semaphore_signal(
                arrivals.arrived.at[i, row], device_id=group.device(there)
            )

    worker, pair = (lax.axis_index(axis) for axis in axes)
    plgpu.when(lax.eq(worker + pair, np.int32(0)))(arrivals.reset)


def _send_part(
    arrivals: Arrivals, x: Any, target: Any, sent: plgpu.Ring, start: Any, before: Any
) -> None:
    """Copies a part to another device, piece by piece, and waits until it is there."""
    p, c = arrivals.schedule.problem, arrivals.schedule.config
    rows, columns = _PIECE
    across = plgpu.cdiv(min(p.k, _PART_COLUMNS), columns)
    count = plgpu.cdiv(c.block_m, rows) * across
    first = before * count

    def place(piece: Any) -> Any:
        i, j = divided(piece, across)
        return start[0] + i * rows, start[1] + j * columns

    def window(piece: Any) -> Any:
        row, column = place(piece)
        return plgpu.ds(row, rows), plgpu.ds(column, columns)

    def is_inside(piece: Any) -> Any:
        row, column = place(piece)
        return (row < p.m) & (column < p.k)

    def load(piece: Any) -> None:
        slot = sent.slot(first + piece)
        plgpu.copy_gmem_to_smem(
            x.at[window(piece)],
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
        plgpu.copy_smem_to_gmem(
            slot.buffers, target.at[window(piece)], is_inside(piece)
        )

    plgpu.wait_smem_to_gmem(0)

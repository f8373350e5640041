# SPDX-License-Identifier: Apache-2.0
"""Kernels for Hopper that multiply and gather rows, or scatter them, at once.

The product is that of `ops/gemm/hopper.py`: a result for each device's rows.

The rows of all devices are gathered: a device begins with its own ones. Meanwhile a
second warp of each producer stores the device's rows in the other devices' memory, part
by part, in the order in which they are multiplied there, and signals each part. A
producer waits for the parts of a tile's rows before it copies them.

The results of all devices are added up and scattered: a device computes its own rows
last. A tile of another device's rows is stored in that device's memory while the next
tile is multiplied, and signalled. A tile of its own rows a device adds to those that it
has received, in the order of the distances of the devices.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import arch
from pallas_gpu.ops.collectives.devices import Group
from pallas_gpu.ops.folded import split
from pallas_gpu.ops.gemm import choice, hopper
from pallas_gpu.ops.gemm.config import CONSUMERS, MatmulConfig
from pallas_gpu.ops.gemm.problem import Problem
from pallas_gpu.ops.memory import Memory
from pallas_gpu.ops.rules import cached

# Columns of a part of a tile that is stored at once: half of those of other products.
STORED_COLUMNS = 32
# Barriers, and what is lost where buffers are aligned to a swizzle's pattern.
_RESERVED_BYTES = 2048


def choose(p: Problem, others_bytes: int = 0) -> MatmulConfig:
    """Returns a configuration whose buffers leave so many bytes of SMEM.

    Four stages hide the latency of copies: where a tile leaves room for three alone,
    one of 128 x 256 replaces it, in clusters that share columns. On two H200 that was
    the fastest of six for 16384 x 4096 by 4096 x 14336.
    """
    c = choice.best(p)
    if c.transposed or c.parts > 1 or c.tile_n % STORED_COLUMNS:
        c = MatmulConfig(tile_m=64, tile_n=128, cluster=None)
    c = dataclasses.replace(c, epilogue_m=64, epilogue_n=STORED_COLUMNS)
    if (stages := _stages(p, c, others_bytes)) < 4:
        c = dataclasses.replace(c, tile_m=64, tile_n=256, cluster="m")
        stages = _stages(p, c, others_bytes)
    return dataclasses.replace(c, stages=min(c.stages, stages) if stages < 4 else 4)


def _stages(p: Problem, c: MatmulConfig, others_bytes: int) -> int:
    """Returns how many buffers of the operands there is room for."""
    stores = CONSUMERS * 2 * c.epilogue_m * c.epilogue_n * p.out_dtype.itemsize
    stage = (c.block_m + c.tile_n) * c.tile_k * p.dtype.itemsize
    room = arch.SM_90A.smem_bytes_per_block - stores - others_bytes - _RESERVED_BYTES
    return max(2, room // stage)


# --- rows are gathered ----------------------------------------------------------------

# A piece that TMA copies at once, through two buffers: rows and columns.
_PIECE = 64, 64
_BUFFERS = 2
# Tiles that are waited for ahead of the producer.
_AHEAD = 2
# Columns of a part, which has the rows of a tile: one CTA sends it, and signals once.
_SENT_COLUMNS = 512


@cached
def gathering_kernel(p: Problem, group: Group) -> Any:
    """Returns the kernel: a function of (1, M, K) and (1, K, N), of `p.batch` devices.

    The results are (devices, M, N), and the rows of the others, (devices - 1, M, K).
    """
    schedule = hopper.Schedule(p, p.config)
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

    def visits(wg, mem):
        arrivals = Arrivals.of(schedule, group)
        return (
            lambda: functools.partial(_produce_rows, schedule, mem),
            lambda: _Gathering(schedule, mem, wg, group).visit,
            lambda: _send_rows(arrivals, mem),
            lambda: arrivals.watch(mem.there),
        )

    results = {
        "out": jax.ShapeDtypeStruct(p.out_shape, p.out_dtype),
        "gathered": jax.ShapeDtypeStruct((group.size - 1, p.m, p.k), p.dtype),
    }
    name = "all_gather_matmul"
    kernel = hopper.persistent(schedule, name, visits, results, scratch=scratch)
    return lambda x, w: kernel(x, w)[0]


def choose_gathering(p: Problem) -> MatmulConfig:
    """Returns a configuration that leaves SMEM for the pieces that are sent."""
    return choose(p, _BUFFERS * _PIECE[0] * _PIECE[1] * p.dtype.itemsize)


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
        return plgpu.cdiv(self.schedule.problem.k, _SENT_COLUMNS)

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


def _produce_rows(schedule, mem, batch, row, column, first_step) -> None:
    """Copies the operands of a tile of the rows of one device."""
    produce = functools.partial(hopper.produce, schedule)
    others = mem.but(a=mem.gathered)
    step = lax.div(first_step, np.int32(schedule.steps))
    mem.there.take(step)

    @plgpu.when(lax.eq(batch, np.int32(0)))
    def _() -> None:
        produce(mem, np.int32(0), row, column, first_step)

    @plgpu.when(lax.gt(batch, np.int32(0)))
    def _() -> None:
        produce(others, batch - 1, row, column, first_step)

    mem.there.release(step)


@dataclasses.dataclass(frozen=True)
class _Gathering(hopper.Consumer):
    """A consumer whose results begin with those of the device's own rows."""

    group: Group

    def window(self, part: int, batch, row, column) -> tuple[Any, Any]:
        """Returns the index of a part in the result, and whether it begins inside."""
        (batch, *place), is_inside = super().window(part, batch, row, column)
        return (self.group.at(self.group.me(), batch), *place), is_inside


def _send_rows(arrivals: Arrivals, mem: Memory) -> None:
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
        target = group.peer(mem.gathered, there).at[i]

        @plgpu.nd_loop((parts,), collective_axes=axes)
        def _(info: Any) -> None:
            row, column = split(info.index[0], arrivals.parts)
            start = row * c.block_m, column * _SENT_COLUMNS
            before = info.local_index + i * most
            _send_part(arrivals, mem.a.at[0], target, mem.sent, start, before)
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
    across = plgpu.cdiv(min(p.k, _SENT_COLUMNS), columns)
    count = plgpu.cdiv(c.block_m, rows) * across
    first = before * count

    def place(piece: Any) -> Any:
        i, j = split(piece, across)
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


# --- rows are scattered ---------------------------------------------------------------


@cached
def scattering_kernel(p: Problem, group: Group) -> Any:
    """Returns the kernel: a function of (devices, M, K) and (1, K, N).

    The results are (1, M, N), and what arrives of the others, (devices - 1, M, N). M
    and N are multiples of the parts that are stored at once.
    """
    schedule = hopper.Schedule(p, p.config)

    def visits(wg, mem):
        tiles = schedule.tiles
        plane = math.prod(tiles.plane) * math.prod(tiles.cluster)
        arrived = plgpu.get_global(plgpu.SemaphoreType.REGULAR((plane, CONSUMERS)))
        return (
            lambda: functools.partial(_produce_for, schedule, mem, group),
            lambda: _Scattering(schedule, mem, wg, group, arrived).visit,
        )

    results = {
        "out": jax.ShapeDtypeStruct((1, p.m, p.n), p.out_dtype),
        "received": jax.ShapeDtypeStruct((group.size - 1, p.m, p.n), p.out_dtype),
    }
    kernel = hopper.persistent(schedule, "matmul_reduce_scatter", visits, results)
    return lambda x, w: kernel(x, w)[0]


def _produce_for(schedule, mem, group, batch, row, column, first_step) -> None:
    """Copies the operands of a tile: the rows of the device at a distance."""
    device = group.at(group.me(), batch + np.int32(1))
    hopper.produce(schedule, mem, device, row, column, first_step)


@dataclasses.dataclass(frozen=True)
class _Scattering(hopper.Consumer):
    """A consumer that stores at other devices, and adds what they have stored.

    Attributes:
      group: the devices.
      arrived: semaphores for each tile and consumer: the devices that have stored.
    """

    group: Group
    arrived: Any

    def visit(self, batch, row, column, first_step) -> None:
        """Computes a tile and stores it at its device."""
        c = self.schedule.config
        acc = plgpu.ACC((c.tile_m, c.tile_n), jnp.float32)
        accumulate = functools.partial(self.accumulate, first_step)
        (product,) = plgpu.run_scoped(accumulate, acc)
        step = lax.div(first_step, np.int32(self.schedule.steps))
        tiles = self.schedule.tiles
        clusters = np.int32(tiles.clusters(c.blocks))
        at = step * clusters + lax.axis_index(tiles.axis)
        # The copies of the tile before have arrived while this one was computed.
        plgpu.when(step > 0)(lambda: self._signal(at - clusters))
        own = lax.eq(batch, np.int32(self.group.size - 1))
        row = row + self.wg * c.tile_m

        @plgpu.when(lax.bitwise_not(own))
        def _() -> None:
            self._send(product, batch, row, column)
            plgpu.when(at + clusters >= tiles.count)(lambda: self._signal(at))

        @plgpu.when(own)
        def _() -> None:
            plgpu.semaphore_wait(self._semaphore(at), self.group.size - 1)
            self._add(product, row, column)

    def _signal(self, at: Any) -> None:
        """Tells the device that the tile at a position is for that it has arrived."""
        batch = lax.div(at, np.int32(self._plane))

        @plgpu.when(lax.lt(batch, np.int32(self.group.size - 1)))
        def _() -> None:
            plgpu.wait_smem_to_gmem(0)
            there = self.group.at(self.group.me(), batch + np.int32(1))
            plgpu.semaphore_signal(
                self._semaphore(at), device_id=self.group.device(there)
            )

    def _semaphore(self, at: Any) -> Any:
        """Returns the semaphore of this warpgroup's rows of the tile at a position."""
        tiles = self.schedule.tiles
        tile = lax.rem(at, np.int32(self._plane))
        if math.prod(tiles.cluster) > 1:
            tile = tile * np.int32(math.prod(tiles.cluster))
            tile = tile + lax.axis_index(tiles.cluster_axis)
        return self.arrived.at[tile, self.wg]

    @property
    def _plane(self) -> int:
        return math.prod(self.schedule.tiles.plane)

    @property
    def _parts(self) -> Any:
        c = self.schedule.config
        store = plgpu.TileStore(self.mem.out_smem.at[self.wg], len(self.parts))
        for part, (i, j) in enumerate(self.parts):
            yield part, store, (slice(i, i + c.epilogue_m), slice(j, j + c.epilogue_n))

    def _send(self, product: Any, batch: Any, row: Any, column: Any) -> None:
        """Starts the copies of a tile to the device at a distance."""
        there = self.group.at(self.group.me(), batch + np.int32(1))
        target = self.group.peer(self.mem.received, there)
        for part, store, place in self._parts:
            (_, *window), is_inside = self.window(part, batch, row, column)
            store.store(
                part, product[place], target.at[(batch, *window)], predicate=is_inside
            )

    def _add(self, product: Any, row: Any, column: Any) -> None:
        """Adds what the other devices have stored, and stores the sum."""
        for part, store, place in self._parts:
            (_, *window), is_inside = self.window(part, np.int32(0), row, column)

            def with_others(total: Any, window: Any = window) -> Any:
                for i in range(self.group.size - 1):
                    other = self.mem.received.at[(i, *window)]
                    other = plgpu.load(other, layout=plgpu.Layout.WGMMA)
                    total = total + other.astype(jnp.float32)
                return total

            total = product[place]
            if is_inside is None:
                total = with_others(total)
            else:
                total = lax.cond(is_inside, with_others, lambda x: x, total)
            store.store(part, total, self.mem.out.at[(0, *window)], predicate=is_inside)

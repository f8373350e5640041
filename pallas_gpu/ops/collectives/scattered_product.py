# SPDX-License-Identifier: Apache-2.0
"""Multiplies, adds up over all devices and scatters rows, in one kernel for Hopper.

The product is that of `ops/gemm/hopper.py`: a result for each device that gets rows,
the executing one last. A tile of another device's rows is stored in that device's
memory while the next tile is multiplied, and signalled. A tile of its own rows a device
adds to those that it has received, in the order of the distances of the devices.
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
from pallas_gpu.ops.collectives import config
from pallas_gpu.ops.collectives.devices import Group
from pallas_gpu.ops.gemm import hopper
from pallas_gpu.ops.gemm.config import CONSUMERS, MatmulConfig
from pallas_gpu.ops.gemm.problem import Problem
from pallas_gpu.ops.rules import cached


@cached
def make_kernel(
    p: Problem, c: MatmulConfig, group: Group, compiler_params, interpret
) -> Any:
    """Returns the kernel: a function of (devices, M, K) and (1, K, N).

    The results are (1, M, N), and what arrives of the others, (devices - 1, M, N). M
    and N are multiples of the parts that are stored at once.
    """
    schedule = hopper.Schedule(p, c)

    def visits(wg, x, w, out, received, **memory):
        mem = hopper.Memory(a=x, b=w, out=out, **memory)
        tiles = schedule.tiles
        plane = math.prod(tiles.plane) * math.prod(tiles.cluster)
        arrived = plgpu.get_global(plgpu.SemaphoreType.REGULAR((plane, CONSUMERS)))
        return (
            lambda: functools.partial(_produce, schedule, mem, group),
            lambda: _Consumer(schedule, mem, wg, group, received, arrived).visit,
        )

    kernel = hopper.persistent(
        schedule,
        visits,
        [
            jax.ShapeDtypeStruct((1, p.m, p.n), p.out_dtype),
            jax.ShapeDtypeStruct((group.size - 1, p.m, p.n), p.out_dtype),
        ],
        hopper.scratch_of(schedule),
        kernel_name="matmul_reduce_scatter",
        compiler_params=compiler_params,
        interpret=interpret,
    )
    return lambda x, w: kernel(x, w)[0]


choose = config.choose


def _produce(schedule, mem, group, batch, row, column, first_step) -> None:
    """Copies the operands of a tile: the rows of the device at a distance."""
    device = group.at(group.me(), batch + np.int32(1))
    hopper.produce(schedule, mem, device, row, column, first_step)


@dataclasses.dataclass(frozen=True)
class _Consumer(hopper.Consumer):
    """A consumer that stores at other devices, and adds what they have stored.

    Attributes:
      group: the devices.
      received: what the others have stored, by distance.
      arrived: semaphores for each tile and consumer: the devices that have stored.
    """

    group: Group
    received: Any
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
        target = self.group.peer(self.received, there)
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
                    other = plgpu.load(
                        self.received.at[(i, *window)], layout=plgpu.Layout.WGMMA
                    )
                    total = total + other.astype(jnp.float32)
                return total

            total = product[place]
            if is_inside is None:
                total = with_others(total)
            else:
                total = lax.cond(is_inside, with_others, lambda x: x, total)
            store.store(part, total, self.mem.out.at[(0, *window)], predicate=is_inside)

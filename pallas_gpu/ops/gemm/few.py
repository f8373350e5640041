# SPDX-License-Identifier: Apache-2.0
"""A matrix product for Hopper with few rows, or few tiles: K divided among a cluster.

With few rows the time is that of reading B. So a block computes its tile transposed:
columns of B are the rows of the tensor core's product, of which an instruction has 64,
and the rows of A are its columns, of which it has any multiple of 8. The last warpgroup
of a block copies tiles of A and B into a ring of SMEM buffers by TMA; each of the
others multiplies its columns of B.

Where the tiles are fewer than the SMs, the blocks of a cluster each take a part of K.
Each then adds the sums of all blocks for its share of the rows, in a fixed order:
results are the same in every run, and no sum goes through GMEM. Few sums are sent to
the block that adds them, which has SMEM for them; many are stored to the memory of the
ring, where that block reads them. Only for one or a few tiles of a long K several
clusters divide it further; the last one then adds the sums of the others from GMEM.

    barrier    completes when                              releases
    full       a buffer of the ring has been loaded        the consumers
    empty      the products that read it are complete      the producer
    written    all blocks have stored or sent their sums   the sum over the cluster
    read       all blocks of the cluster have added them   the next sums
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
from pallas_gpu import errors
from pallas_gpu.ops.gemm import hopper
from pallas_gpu.ops.gemm.config import SplitMatmulConfig
from pallas_gpu.ops.gemm.problem import Problem
from pallas_gpu.ops.memory import Memory, launch
from pallas_gpu.ops.rules import cached
from pallas_gpu.ops.tiles import in_cluster, operands_of

# Rows of a tile whose sums the blocks of a cluster send each other: for more there is
# no SMEM beside the ring.
_MOST_SENT = 32
# Elements between the rows of sums in SMEM: 8 columns of 4 pairs of rows, the elements
# that a warp stores at once, are then in different banks.
PAD = 4
# Rows that a warpgroup adds at once, 64 columns of which are 16 registers.
_ROWS = 32


@cached
def make_kernel(p: Problem) -> Any:
    c = p.config
    _check_depth(p, c)
    schedule = Schedule(p, c)
    scratch: dict[str, Any] = {
        "memory": _memory(schedule, operands_of(p, c, c.tile_m)),
        "full": plgpu.Barrier(num_arrivals=1 + p.factors, num_barriers=c.stages),
        "empty": plgpu.Barrier(
            num_arrivals=c.warpgroups, num_barriers=c.stages, initially_complete=True
        ),
    }
    if schedule.is_once and not schedule.sends and c.warpgroups > 1:
        scratch["drained"] = plgpu.Barrier(num_arrivals=c.warpgroups)
    # An arrival of a cluster is expensive, so none where the sums are stored once.
    if schedule.sends:
        scratch["written"] = plgpu.Barrier(
            num_arrivals=c.split * p.factors, num_barriers=c.warpgroups
        )
    many = [] if schedule.is_once else ["read"]
    for name in ("written", *many) if c.split > 1 and not schedule.sends else ():
        scratch[name] = plgpu.ClusterBarrier(
            collective_axes="split",
            num_barriers=c.warpgroups,
            initially_complete=name == "read",
        )
    return launch(
        *(p, "split_matmul", functools.partial(_body, schedule)),
        ("a", "b", *p.operands),
        jax.ShapeDtypeStruct(p.out_shape, p.out_dtype),
        scratch,
        # The last part waits for those before it: blocks start in this order.
        grid={"part": c.clusters, "worker": schedule.workers},
        cluster={"split": c.split},
        warpgroups=c.warpgroups + 1,
    )


def _memory(schedule: Schedule, ring: list[Any]) -> Any:
    """Returns the ring and the sums, which use the same memory where they can."""
    p, c = schedule.problem, schedule.config
    columns = c.own_n + PAD
    if schedule.sends:
        sent = c.warpgroups, c.split, p.factors, schedule.share, columns
        return [ring, plgpu.SMEM(sent, p.accumulator)]
    stored = c.warpgroups, p.factors, schedule.part_m, columns
    sums = plgpu.SMEM(stored, p.accumulator)
    return plgpu.RefUnion(ring, sums) if schedule.is_once else [ring, sums]


def _check_depth(p: Problem, c: SplitMatmulConfig) -> None:
    steps = plgpu.cdiv(p.k, c.tile_k)
    if c.split * c.clusters <= steps:
        return
    raise errors.ArgumentError(
        "matmul: a block has no part of K",
        expected=f"at most {steps} blocks that divide K={p.k} in steps of {c.tile_k}",
        got=f"split={c.split}, clusters={c.clusters}",
        hint="omit config",
    )


@dataclasses.dataclass(frozen=True)
class Schedule(hopper.Schedule):
    """Which tiles a cluster computes, and which part of K a block."""

    # B is the larger operand.
    order = 1, 0, 2
    oob_mode = None

    @property
    def plane(self) -> tuple[int, int]:
        p, c = self.problem, self.config
        return plgpu.cdiv(p.m, c.tile_m), plgpu.cdiv(p.n, c.tile_n)

    @property
    def count(self) -> int:
        return self.problem.tiles(self.config.tile_m, self.config.tile_n)

    @property
    def workers(self) -> int:
        """Clusters for each part of K: no more than there are tiles."""
        c = self.config
        return min(c.blocks // (c.split * c.clusters), self.count)

    @property
    def is_once(self) -> bool:
        """Whether no block has a second tile: sums then use the memory of the ring."""
        return self.workers >= self.count

    @property
    def part_m(self) -> int:
        """Rows whose sums are in SMEM at once."""
        return self.config.tile_m if self.is_once else self.config.part

    @property
    def sends(self) -> bool:
        """Whether the blocks of a cluster send sums to the block that adds them."""
        c = self.config
        return c.split > 1 and self.is_once and c.tile_m <= _MOST_SENT

    @property
    def share(self) -> int:
        """Rows that a block of a cluster adds; where they are sent, at most."""
        if not self.sends:
            return self.part_m // self.config.split
        # An instruction has 8 columns in the registers of a warp.
        return plgpu.align_to(plgpu.cdiv(self.config.tile_m, self.config.split), 8)

    def part_of_k(self, batch: Any = 0) -> tuple[Any, Any, Any]:
        c = self.config
        parts = c.split * c.clusters
        every, more = divmod(plgpu.cdiv(self.problem.k, c.tile_k), parts)
        if parts == 1:
            return batch, 0, every
        i = lax.mul(lax.axis_index("part"), np.int32(c.split))
        i = lax.add(i, lax.axis_index("split"))
        if more == 0:
            return batch, lax.mul(i, np.int32(every)), every
        first = lax.add(lax.mul(i, np.int32(every)), lax.min(i, np.int32(more)))
        return batch, first, lax.add(np.int32(every), (i < more).astype(np.int32))

    def for_each_tile(self, visit: Any) -> None:
        c, (rows, columns) = self.config, self.plane
        steps = self.part_of_k()[2]

        @plgpu.nd_loop((self.count,), collective_axes="worker")
        def _(info):
            # Neighbours share columns of B, which is the larger operand.
            mi = lax.rem(info.index[0], np.int32(rows))
            ni = lax.div(info.index[0], np.int32(rows))
            batch = lax.div(ni, np.int32(columns))
            ni = lax.rem(ni, np.int32(columns))
            visit(batch, mi * c.tile_m, ni * c.tile_n, info.local_index * steps)


def _body(schedule: Schedule, mem: Memory) -> None:
    buffers, sums = mem.memory
    ring = plgpu.Ring(buffers, mem.empty, mem.full)
    mem = mem.but(operands=ring, sums=sums)
    wg = lax.axis_index("wg")
    plgpu.Roles(schedule.config.warpgroups).run(
        wg,
        lambda: schedule.for_each_tile(functools.partial(schedule.produce, mem)),
        lambda: schedule.for_each_tile(_Consumer(schedule, mem, wg).visit),
    )


@dataclasses.dataclass(frozen=True)
class _Consumer(hopper.Consumer):
    schedule: Schedule

    def visit(self, batch, row, column, first_step) -> None:
        c, products = self.schedule.config, self.products(batch, column, first_step)
        if (drained := self.mem.get("drained")) is not None:
            plgpu.barrier_arrive(drained)
            plgpu.barrier_wait(drained)
        column = column + self.wg * c.own_n
        part = self.schedule.part_m
        for start in range(0, c.tile_m, part):
            parts = [x[:, start : start + part] for x in products]
            self.store(parts, batch, row + start, column)

    @property
    def shape(self) -> tuple[int, int]:
        return self.schedule.config.own_n, self.schedule.config.tile_m

    def accumulate(self, first_step, *accumulators) -> list[Any]:
        p, c = self.schedule.problem, self.schedule.config
        own = plgpu.ds(self.wg * c.own_n, c.own_n)

        def multiply(_, slot):
            a, *right = slot.buffers
            for acc, b in zip(accumulators, right, strict=True):
                columns = b.at[own] if p.transpose_b else b.at[:, own].T
                plgpu.wgmma(acc, columns, a if p.transpose_a else a.T)

        return self.mem.operands.accumulate(
            accumulators, self.schedule.part_of_k()[2], multiply, first=first_step
        )

    def store(self, products, batch, row, column) -> None:
        """Adds the products of the cluster's blocks, and stores a share of the rows."""
        c, mem, share = self.schedule.config, self.mem, self.schedule.share
        first: Any = 0
        if c.split > 1:
            first = lax.axis_index("split") * np.int32(share)
        if self.schedule.sends:
            self.send(products)

            @plgpu.when(first < c.tile_m)
            def _():
                plgpu.barrier_wait(mem.written.at[self.wg])
                self.add_share(len(products), batch, row, first, column)

            return
        read = mem.get("read")
        if read is not None:
            plgpu.barrier_wait(read.at[self.wg])
        for i, product in enumerate(products):
            mem.sums.at[self.wg, i, :, plgpu.ds(0, c.own_n)].T[...] = product
        if c.split > 1:
            plgpu.barrier_arrive(mem.written.at[self.wg])
            plgpu.barrier_wait(mem.written.at[self.wg])
        self.add_share(len(products), batch, row, first, column)
        if read is not None:
            plgpu.barrier_arrive(read.at[self.wg])

    def send(self, products) -> None:
        c, mem, share = self.schedule.config, self.mem, self.schedule.share
        own = lax.axis_index("split")
        for block, first in enumerate(range(0, c.tile_m, share)):
            rows = min(share, c.tile_m - first)
            for i, product in enumerate(products):
                place = mem.sums.at[
                    self.wg, own, i, plgpu.ds(0, rows), plgpu.ds(0, c.own_n)
                ]
                plgpu.async_store_smem(
                    product[:, first : first + rows],
                    place.T,
                    mem.written.at[self.wg],
                    cluster_idx=block,
                    cluster_dim="split",
                    sem="relaxed",
                )

    def add_share(self, count, batch, row, first, column) -> None:
        share = self.schedule.share
        rows = math.gcd(share, self.schedule.part_m, _ROWS)
        for start in range(0, share, rows):
            self.add(count, batch, row, first, start, rows, column)

    def add(self, count, batch, row, first, start, rows, column) -> None:
        """Adds the rows from `start` of its share, which begins at `first`."""
        c, p, mem = self.schedule.config, self.schedule.problem, self.mem
        of_sums = start if self.schedule.sends else first + start
        first = first + start
        is_inside = (row + first < p.m) & (column < p.n)
        if self.schedule.part_m % self.schedule.share:
            is_inside &= first < self.schedule.part_m

        @plgpu.when(is_inside)
        def _():
            own = plgpu.ds(of_sums, rows), plgpu.ds(0, c.own_n)
            if self.schedule.sends:
                blocks = [mem.sums.at[self.wg, i] for i in range(c.split)]
            else:
                every = in_cluster(mem.sums, "split", c.split)
                blocks = [x.at[self.wg] for x in every]
            totals = [_sum([x[(i, *own)] for x in blocks]) for i in range(count)]
            place = batch, plgpu.ds(row + first, rows), plgpu.ds(column, c.own_n)
            if c.clusters == 1:
                self.finish(totals, place)
            else:
                self.add_clusters(totals, place)

    def add_clusters(self, totals, place) -> None:
        c, p = self.schedule.config, self.schedule.problem
        last = c.clusters - 1
        batch, rows, columns = place
        share = totals[0].shape
        grid = plgpu.cdiv(p.m, share[0]), plgpu.cdiv(p.n, share[1])
        shape = grid[0] * share[0], grid[1] * share[1]
        others = plgpu.get_global(
            plgpu.GMEM((last, p.batch, len(totals), *shape), totals[0].dtype)
        )
        stored = plgpu.get_global(plgpu.SemaphoreType.REGULAR((p.batch, *grid)))
        stored = stored.at[
            batch,
            lax.div(rows.start, np.int32(share[0])),
            lax.div(columns.start, np.int32(share[1])),
        ]
        part = lax.axis_index("part")

        @plgpu.when(part < last)
        def _():
            for i, total in enumerate(totals):
                others[part, batch, i, rows, columns] = total
            plgpu.semaphore_signal(stored, memory_scope="gpu")

        @plgpu.when(part == last)
        def _():
            # The wait leaves zero, for the next launch.
            plgpu.semaphore_wait(stored, last, memory_scope="gpu")
            sums = [
                _sum(
                    [*(others[k, batch, i, rows, columns] for k in range(last)), total]
                )
                for i, total in enumerate(totals)
            ]
            self.finish(sums, place)

    def finish(self, totals, place) -> None:
        p, mem = self.schedule.problem, self.mem
        _, rows, columns = place
        row, column = (
            plgpu.broadcasted_iota(jnp.int32, totals[0].shape, axis) + part.start
            for axis, part in enumerate((rows, columns))
        )
        # The share begins inside.
        mask = None
        if p.m % rows.size:
            mask = row < p.m
        if p.n % columns.size:
            mask = column < p.n if mask is None else mask & (column < p.n)
        product, gate = totals if p.epilogue.gated else (totals[0], None)
        if not p.epilogue.is_identity:
            bias = residual = None
            if p.epilogue.bias:
                bias = mem.bias[column].astype(jnp.float32)
            if p.epilogue.residual:
                residual = plgpu.load(mem.residual, place, mask=mask)
            product = p.epilogue.apply(
                product.astype(jnp.float32), bias=bias, gate=gate, residual=residual
            )
        plgpu.store(mem.out, place, product.astype(mem.out.dtype), mask=mask)


def _sum(terms: list[Any]) -> Any:
    return functools.reduce(lax.add, terms)

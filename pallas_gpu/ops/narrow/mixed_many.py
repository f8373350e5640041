# SPDX-License-Identifier: Apache-2.0
"""Many tokens times weights of 8 or 4 bits: persistent, warp-specialised, clustered.

The product is computed transposed, as in `mixed_few.py`: weights become the tensor
core's left operand in registers, tokens are its right one in SMEM. A producer fills a
ring of SMEM buffers; each of two consumers loads its rows of the next step's weights
while the tensor core multiplies those of the step before, and converts them then or
after. The blocks of a cluster need the same tokens: each loads one half and multicasts
it to both.
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
from pallas_gpu.ops import roles
from pallas_gpu.ops.narrow import widen
from pallas_gpu.ops.narrow.mixed import LinearManyConfig, Problem
from pallas_gpu.ops.tiles import tiles

_CONSUMERS = 2
# Registers per thread of the producer and of a consumer; (2 * 232 + 40) * 128 threads
# use 64512 of an SM's 65536.
_REGISTERS = 40, 232
# Rows of weights of a consumer and of a block; tokens that are stored at once.
_ROWS = 64
_TILE = _CONSUMERS * _ROWS
_PART = 64
_ZEROS = plgpu.OOBFillMode.ZEROS


def columns(p: Problem, config: LinearManyConfig) -> int:
    """Columns of all tiles: those of the result, and more."""
    return Schedule(p, config).plane[0] * config.cluster_size * _TILE


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which tiles a cluster computes, and in which order."""

    p: Problem
    c: LinearManyConfig

    @property
    def plane(self) -> tuple[int, int]:
        """Tiles of clusters: of weights, and of tokens."""
        p, c = self.p, self.c
        return (
            plgpu.cdiv(p.n, _TILE * c.cluster_size),
            plgpu.cdiv(p.tokens, c.tokens),
        )

    @property
    def clusters(self) -> int:
        """Clusters of the launch: no more than there is work for."""
        return min(self.c.blocks // self.c.cluster_size, math.prod(self.plane))

    @property
    def steps(self) -> int:
        """Steps along K of one tile."""
        return plgpu.cdiv(self.p.k, self.c.depth)

    def for_each(self, visit: Any) -> None:
        """Calls `visit(first row of weights, first token, steps before)`."""

        @plgpu.nd_loop((math.prod(self.plane),), collective_axes="worker")
        def _(info):
            ni, ti = plgpu.planar_snake(info.index[0], self.plane, 0, self.c.strip)
            ni = ni * self.c.cluster_size + lax.axis_index("pair")
            steps = info.local_index * self.steps
            visit(ni * _TILE, ti * self.c.tokens, steps)


@functools.lru_cache(maxsize=64)
def make_kernel(p: Problem, config: LinearManyConfig, compiler_params, interpret):
    """Returns the function of x (tokens, K), w (N, K) and `Problem.operands`.

    `group_scale` is (K / group, N); scale and bias are (N,), with `columns` elements.
    """
    c, schedule = config, Schedule(p, config)
    packed = tiles((c.stages, _TILE, c.depth), p.w)
    unit = widen.unit_type(p.w)
    units = tiles((c.stages, _TILE, p.units(c.depth)), unit)
    weights = packed if unit == p.w else plgpu.RefUnion(packed, units)
    buffers = {"w": weights, "x": tiles((c.stages, c.tokens, c.depth), p.x)}
    if p.group is not None:
        shape = (c.stages, p.groups(c.depth), _TILE)
        buffers["scale"] = plgpu.SMEM(shape, jnp.float32)
    scratch = {
        "out_smem": tiles((_CONSUMERS, 2, _PART, _ROWS), p.out),
        "ring": plgpu.Ring.of(
            buffers,
            consumers=_CONSUMERS,
            collective_axes="pair" if c.paired else (),
        ),
    }

    def body(x, w, *refs, out_smem, ring):
        *extra, out = refs
        named = dict(zip(p.operands, extra, strict=True))
        weights = ring.buffers["w"]
        packed, units = (weights, weights) if unit == p.w else weights
        buffers = {**ring.buffers, "w": packed, "units": units}
        ring = dataclasses.replace(ring, buffers=buffers)
        _Block(schedule, x=x, w=w, out=out, out_smem=out_smem, ring=ring, **named).run()

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((p.tokens, p.n), p.out),
        grid=(schedule.clusters,),
        grid_names=("worker",),
        cluster=(c.cluster_size,),
        cluster_names=("pair",),
        num_threads=_CONSUMERS + 1,
        thread_name="wg",
        kernel_name="linear_many",
        compiler_params=compiler_params,
        interpret=interpret,
        scratch_types=scratch,
    )


@dataclasses.dataclass(frozen=True)
class _Block:
    """One block: its references, and what its warpgroups do."""

    schedule: Schedule
    x: Any
    w: Any
    out: Any
    out_smem: Any
    ring: plgpu.Ring
    masks: Any = None
    group_scale: Any = None
    scale: Any = None
    bias: Any = None

    @property
    def c(self) -> LinearManyConfig:
        return self.schedule.c

    @property
    def p(self) -> Problem:
        return self.schedule.p

    def run(self) -> None:
        """Divides the work among the warpgroups."""
        wg = lax.axis_index("wg")

        def produce() -> None:
            self.schedule.for_each(self.produce)

        def consume() -> None:
            self.schedule.for_each(functools.partial(self.consume, wg))
            plgpu.wait_smem_to_gmem(0)

        roles.split(wg, _CONSUMERS, _REGISTERS, produce, consume)

    def produce(self, row, token, first) -> None:
        """Loads the steps of a tile."""
        p, c = self.p, self.c
        rows, tokens = plgpu.ds(row, _TILE), plgpu.ds(token, c.tokens)

        @plgpu.loop(0, self.schedule.steps)
        def _(ki):
            slot = self.ring.fill(first + ki)
            depth = plgpu.ds(ki * c.depth, c.depth)

            def copy(source, name, share=()):
                plgpu.copy_gmem_to_smem(
                    source,
                    slot.buffers[name],
                    slot.full,
                    collective_axes=share,
                    oob_mode=_ZEROS,
                )

            copy(self.w.at[rows, depth], "w")
            copy(self.x.at[tokens, depth], "x", ("pair",) if c.paired else ())
            if p.group is not None:
                group = lax.div(ki * c.depth, np.int32(p.group))
                groups = plgpu.ds(group, p.groups(c.depth))
                copy(self.group_scale.at[groups, rows], "scale")

    def consume(self, wg, row, token, first) -> None:
        """Computes and stores a consumer's rows of a tile."""
        last = first + self.schedule.steps - 1
        p, rows = self.p, plgpu.ds(wg * _ROWS, _ROWS)
        converter = p.converter(self.masks)
        # Those of 8 bits with scales of groups are converted beside the product before;
        # for those of 4 an H200 takes 4 to 13% more time so.
        ahead = p.group is not None and widen.bits(p.w) == 8

        def load(step):
            buffers = self.ring.take(step).buffers
            loaded = converter.load(buffers["units"].at[rows])
            if not ahead:
                return loaded
            # Only the product with the scales writes the tensor core's operand.
            exact = converter.finish(loaded)
            scales = buffers["scale"].at[:, rows]
            return exact, widen.factors(scales, exact.dtype)

        def finish(step, loaded):
            if ahead:
                return widen.multiplied(*loaded)
            wide = converter.finish(loaded)
            if p.group is None:
                return wide
            scales = self.ring.slot(step).buffers["scale"]
            return widen.scaled(wide, scales.at[:, rows])

        def multiply(acc, step, wide):
            plgpu.wgmma(acc, wide, self.ring.slot(step).buffers["x"].T)

        def accumulate(acc):
            @plgpu.loop(first, last, init_carry=finish(first, load(first)))
            def final(step, wide):
                multiply(acc, step, wide)
                # This happens while the product is under way, not after it.
                following = lax.optimization_barrier(load(step + 1))
                plgpu.wgmma_wait(0)
                self.ring.release(step)
                return finish(step + 1, following)

            multiply(acc, last, final)
            total = acc[...]
            self.ring.release(last)
            return total

        total = plgpu.run_scoped(accumulate, plgpu.ACC((_ROWS, self.c.tokens)))
        self.store(wg, total, row + wg * _ROWS, token)

    def store(self, wg, total, row, token) -> None:
        """Scales the sums (rows, tokens) and stores them part by part."""
        p, c = self.p, self.c
        columns = plgpu.ds(row, _ROWS)
        vectors = [p.load(ref, columns) for ref in (self.scale, self.bias)]
        parts = c.tokens // _PART
        for i in range(parts):
            part = total[:, i * _PART : (i + 1) * _PART]
            buffer = self.out_smem.at[wg, i % 2]
            # As in `hopper.py`: the copy before the last one has read this buffer.
            repeated = i == 0 and parts % 2 == 1
            plgpu.wait_smem_to_gmem(0 if repeated else 1, wait_read_only=True)
            buffer.T[...] = p.finish(part, *vectors)
            plgpu.commit_smem()
            start = token + i * _PART
            target = self.out.at[plgpu.ds(start, _PART), columns]
            some = jnp.logical_and(row < p.n, start < p.tokens)
            plgpu.copy_smem_to_gmem(buffer, target, some)

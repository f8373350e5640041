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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.ops.gemm.hopper import persistent
from pallas_gpu.ops.narrow import widen
from pallas_gpu.ops.narrow.mixed import LinearManyConfig, Problem
from pallas_gpu.ops.tiles import tiles

_CONSUMERS = 2
# Rows of weights of a consumer and of a block; tokens that are stored at once.
_ROWS = 64
_TILE = _CONSUMERS * _ROWS
_PART = 64
_ZEROS = plgpu.OOBFillMode.ZEROS


def columns(p: Problem, config: LinearManyConfig) -> int:
    """Columns of all tiles: those of the result, and more."""
    return Schedule(p, config).tiles.extent[0]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which tiles a cluster computes, and in which order."""

    p: Problem
    c: LinearManyConfig

    @property
    def tiles(self) -> plgpu.TileSchedule:
        """The tiles, of weights and of tokens, and their order."""
        p, c = self.p, self.c
        return plgpu.TileSchedule(
            (p.n, p.tokens),
            (_TILE, c.tokens),
            cluster=(c.cluster_size, 1),
            strip=c.strip,
        )

    @property
    def steps(self) -> int:
        """Steps along K of one tile."""
        return plgpu.cdiv(self.p.k, self.c.depth)

    def for_each_tile(self, visit: Any) -> None:
        """Calls `visit(first row of weights, first token, steps before)`."""

        def at(_, ni, ti, number):
            visit(ni * _TILE, ti * self.c.tokens, number * self.steps)

        self.tiles.for_each(at)


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

    def visits(wg, x, w, *refs, out_smem, ring):
        *extra, out = refs
        named = dict(zip(p.operands, extra, strict=True))
        weights = ring.buffers["w"]
        packed, units = (weights, weights) if unit == p.w else weights
        buffers = {**ring.buffers, "w": packed, "units": units}
        ring = dataclasses.replace(ring, buffers=buffers)
        block = _Block(schedule, x, w, out, out_smem, ring, **named)
        return lambda: block.produce, lambda: functools.partial(block.consume, wg)

    return persistent(
        schedule,
        visits,
        _CONSUMERS,
        c.blocks,
        jax.ShapeDtypeStruct((p.tokens, p.n), p.out),
        scratch,
        kernel_name="linear_many",
        compiler_params=compiler_params,
        interpret=interpret,
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
        store = plgpu.TileStore(self.out_smem.at[wg], c.tokens // _PART)
        for i in range(store.parts):
            part, start = total[:, i * _PART : (i + 1) * _PART], token + i * _PART
            store.store(
                i,
                functools.partial(p.finish, part, *vectors),
                self.out.at[plgpu.ds(start, _PART), columns],
                predicate=jnp.logical_and(row < p.n, start < p.tokens),
                transposed=True,
            )

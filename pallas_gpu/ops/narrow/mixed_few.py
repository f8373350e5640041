# SPDX-License-Identifier: Apache-2.0
"""Few tokens times weights of 8 or 4 bits: as fast as the weights are read.

The product is computed transposed: the rows of a tile of weights are the rows of the
tensor core's instruction, and the tokens its columns, of which 8 suffice. A block is
one warpgroup, several of which share an SM: it waits for a tile of weights, converts it
to 16 bits in registers, multiplies it with the tokens in SMEM, and starts the copy of a
later tile. The blocks of a cluster divide K; each adds up a part of the rows for all of
them, through distributed SMEM.
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
from pallas_gpu.ops.narrow import widen
from pallas_gpu.ops.narrow.mixed import LinearFewConfig, Problem
from pallas_gpu.ops.tiles import tiles

_ZEROS = plgpu.OOBFillMode.ZEROS


def _depth(p: Problem, c: LinearFewConfig) -> int:
    """Elements of K of a tile of weights."""
    return c.depth_bytes * 8 // widen.bits(p.w)


def columns(p: Problem, config: LinearFewConfig) -> int:
    """Columns of all tiles: those of the result, and more."""
    return plgpu.align_to(p.n, config.rows)


@functools.lru_cache(maxsize=64)
def make_kernel(p: Problem, config: LinearFewConfig, compiler_params, interpret):
    """Returns the function of x (tokens, K), w (N, K) and `Problem.operands`.

    `group_scale` is (K / group, N); scale and bias are (N,), with `columns` elements.
    """
    c, depth = config, _depth(p, config)
    packed = tiles((c.stages, c.rows, depth), p.w)
    unit = jnp.dtype(jnp.uint32) if c.words else widen.unit_type(p.w)
    units = tiles(
        (c.stages, c.rows, depth * widen.bits(p.w) // 8 // unit.itemsize), unit
    )
    weights = packed if unit == p.w else plgpu.RefUnion(packed, units)
    grouped = p.group is not None
    own = c.rows // c.splits
    scratch = {
        "w_smem": weights,
        "x_smem": tiles((c.stages, c.tokens, depth), p.x),
        "out_smem": plgpu.SMEM((c.tokens, own), p.out),
        "full": plgpu.Barrier(num_arrivals=2 + grouped, num_barriers=c.stages),
    }
    if grouped:
        shape = (c.stages, p.groups(depth), c.rows)
        scratch["scale_smem"] = plgpu.SMEM(shape, jnp.float32)
    if c.splits > 1:
        scratch["part_smem"] = plgpu.SMEM((c.rows, c.tokens), jnp.float32)
        scratch["written"] = plgpu.ClusterBarrier(collective_axes="split")

    def body(x, w, *refs, w_smem, **memory):
        *extra, out = refs
        named = dict(zip(p.operands, extra, strict=True))
        packed, units = (w_smem, w_smem) if unit == p.w else w_smem
        block = _Block(
            p, c, x=x, w=w, out=out, w_smem=packed, units=units, **named, **memory
        )
        block.run()

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((p.tokens, p.n), p.out),
        grid=(plgpu.cdiv(p.n, c.rows), plgpu.cdiv(p.tokens, c.tokens)),
        grid_names=("tile", "token_tile"),
        cluster=(c.splits,),
        cluster_names=("split",),
        kernel_name="linear_few",
        compiler_params=compiler_params,
        interpret=interpret,
        scratch_types=scratch,
    )


@dataclasses.dataclass(frozen=True)
class _Block:
    """One block: its references, and what it does."""

    p: Problem
    c: LinearFewConfig
    x: Any
    w: Any
    out: Any
    w_smem: Any
    units: Any
    x_smem: Any
    out_smem: Any
    full: Any
    masks: Any = None
    group_scale: Any = None
    scale: Any = None
    bias: Any = None
    scale_smem: Any = None
    part_smem: Any = None
    written: Any = None

    @property
    def row(self) -> Any:
        """First column of the result."""
        return lax.axis_index("tile") * self.c.rows

    @property
    def token(self) -> Any:
        """First row of the result."""
        return lax.axis_index("token_tile") * self.c.tokens

    def run(self) -> None:
        """Computes the block's part of K, and with its cluster a tile of the result."""
        p, c = self.p, self.c
        steps = plgpu.cdiv(p.k, _depth(p, c))
        each = plgpu.cdiv(steps, c.splits)
        first = lax.axis_index("split") * each
        count = jnp.clip(steps - first, 0, each) if steps % c.splits else each
        for i in range(min(c.stages, each)):

            @plgpu.when(i < count)
            def _(i=i):
                self.start_copies(first + i, i)

        converter = p.converter(self.masks)

        def release(i):
            @plgpu.when(i + c.stages < count)
            def _():
                # All threads have read the tile of weights.
                plgpu.commit_smem()
                self.start_copies(first + i + c.stages, lax.rem(i, np.int32(c.stages)))

        def load(i):
            slot = lax.rem(i, np.int32(c.stages))
            plgpu.barrier_wait(self.full.at[slot])
            load = converter.load_words if c.words else converter.load
            return load(self.units.at[slot])

        def finish(i, loaded):
            wide = converter.finish(loaded)
            if p.group is None:
                return wide
            slot = lax.rem(i, np.int32(c.stages))
            return widen.scaled(wide, self.scale_smem.at[slot])

        def multiply(acc, i, wide):
            slot = lax.rem(i, np.int32(c.stages))
            plgpu.wgmma(acc, wide, self.x_smem.at[slot].T)

        def accumulate(acc):
            @plgpu.loop(0, count)
            def _(i):
                multiply(acc, i, finish(i, load(i)))
                plgpu.wgmma_wait(0)
                release(i)

            return acc[...]

        def accumulate_ahead(acc):
            def step(i, wide):
                multiply(acc, i, wide)
                following = lax.optimization_barrier(load(i + 1))
                plgpu.wgmma_wait(0)
                release(i)
                return finish(i + 1, following)

            last = count - 1
            wide = plgpu.loop(
                0, last, init_carry=finish(jnp.int32(0), load(jnp.int32(0)))
            )(step)
            multiply(acc, jnp.int32(last), wide)
            return acc[...]

        if c.ahead:
            accumulate = accumulate_ahead
        part = plgpu.run_scoped(accumulate, plgpu.ACC((c.rows, c.tokens)))
        self.store(part if c.splits == 1 else self.combine(part))

    def start_copies(self, step, slot) -> None:
        """Starts to load a step's weights and tokens, and scales of groups."""
        p, c = self.p, self.c
        start = step * _depth(p, c)
        depth = plgpu.ds(start, _depth(p, c))
        rows = plgpu.ds(self.row, c.rows)
        tokens = plgpu.ds(self.token, c.tokens)
        copies: list[tuple[Any, Any, str | None]] = [
            (self.w.at[rows, depth], self.w_smem, "evict_first"),
            (self.x.at[tokens, depth], self.x_smem, "evict_last"),
        ]
        if p.group is not None:
            first = lax.div(start, np.int32(p.group))
            groups = plgpu.ds(first, self.scale_smem.shape[1])
            copies.append((self.group_scale.at[groups, rows], self.scale_smem, None))
        for source, target, hint in copies:
            plgpu.copy_gmem_to_smem(
                source,
                target.at[slot],
                self.full.at[slot],
                oob_mode=_ZEROS,
                cache_hint=hint,
            )

    def combine(self, part) -> Any:
        """Returns the sums of all blocks for this one's part of the rows."""
        c = self.c
        self.part_smem[...] = part
        plgpu.barrier_arrive(self.written)
        plgpu.barrier_wait(self.written)
        own = c.rows // c.splits
        rows = plgpu.ds(lax.axis_index("split") * own, own)
        parts = [
            plgpu.cluster_ref(self.part_smem.at[rows], {"split": i})[...]
            for i in range(c.splits)
        ]
        return functools.reduce(lax.add, parts)

    def store(self, total) -> None:
        """Scales the sums (rows, tokens) and stores them."""
        p, c = self.p, self.c
        own = total.shape[0]
        row = self.row + lax.axis_index("split") * own
        rows = plgpu.ds(row, own)
        vectors = (p.load(ref, rows) for ref in (self.scale, self.bias))
        self.out_smem.T[...] = p.finish(total, *vectors)
        plgpu.commit_smem()
        target = self.out.at[plgpu.ds(self.token, c.tokens), rows]
        some = row < p.n if p.n % c.rows else None
        plgpu.copy_smem_to_gmem(self.out_smem, target, some)
        plgpu.wait_smem_to_gmem(0)

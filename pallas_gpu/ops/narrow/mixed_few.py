# SPDX-License-Identifier: Apache-2.0
"""Few tokens times weights of 8 or 4 bits: as fast as the weights are read.

The product is computed transposed: the rows of a tile of weights are the rows of the
tensor core's instruction, and the tokens its columns, of which 16 suffice. Several
warpgroups share an SM, each with a ring of SMEM buffers of its own: it waits for tiles
of weights and tokens, converts the weights to 16 bits in registers, and multiplies; a
buffer is filled again one step later, when all warps have read it. The warpgroups of a
block and the blocks of a cluster divide K; each adds up a part of the rows for all of
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
# A tile of weights is as deep as the widest swizzle: 128 bytes.
_DEPTH_BYTES = 128


def _depth(p: Problem) -> int:
    """Elements of K of a tile of weights."""
    return _DEPTH_BYTES * 8 // widen.bits(p.w)


def columns(p: Problem, config: LinearFewConfig) -> int:
    """Columns of all tiles: those of the result, and more."""
    return plgpu.align_to(p.n, config.rows)


@functools.lru_cache(maxsize=64)
def make_kernel(p: Problem, config: LinearFewConfig, compiler_params, interpret):
    """Returns the function of x (tokens, K), w (N, K) and `Problem.operands`.

    Beside integers, x is in the order of `widen.reordered`.
    `group_scale` is (K / group, N); scale and bias are (N,), with `columns` elements.
    """
    c, depth, wgs = config, _depth(p), config.warpgroups
    packed = tiles((wgs, c.stages, c.rows, depth), p.w)
    by_words = widen.is_integer(p.w)
    words = tiles((wgs, c.stages, c.rows, _DEPTH_BYTES // 4), jnp.dtype(jnp.uint32))
    grouped = p.group is not None
    parts = c.splits * wgs
    scratch = {
        "w_smem": plgpu.RefUnion(packed, words) if by_words else packed,
        "x_smem": tiles((wgs, c.stages, c.tokens, depth), p.x),
        "out_smem": plgpu.SMEM((wgs, c.tokens, c.rows // parts), p.out),
        "full": plgpu.Barrier(num_arrivals=2 + grouped, num_barriers=wgs * c.stages),
    }
    if grouped:
        shape = (wgs, c.stages, p.groups(depth), c.rows)
        scratch["scale_smem"] = plgpu.SMEM(shape, jnp.float32)
    if parts > 1:
        scratch["part_smem"] = plgpu.SMEM((wgs, c.rows, c.tokens), jnp.float32)
        scratch["written"] = (
            plgpu.ClusterBarrier(collective_axes="split", num_arrivals=wgs)
            if c.splits > 1
            else plgpu.Barrier(num_arrivals=wgs)
        )

    def body(x, w, *refs, w_smem, **memory):
        *extra, out = refs
        named = dict(zip(p.operands, extra, strict=True))
        packed, words = w_smem if by_words else (w_smem, None)
        block = _Worker(
            p, c, x=x, w=w, out=out, w_smem=packed, words=words, **named, **memory
        )
        block.run()

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((p.tokens, p.n), p.out),
        grid=(plgpu.cdiv(p.n, c.rows), plgpu.cdiv(p.tokens, c.tokens)),
        grid_names=("tile", "token_tile"),
        cluster=(c.splits,),
        cluster_names=("split",),
        num_threads=wgs,
        thread_name="wg",
        kernel_name="linear_few",
        compiler_params=compiler_params,
        interpret=interpret,
        scratch_types=scratch,
    )


@dataclasses.dataclass(frozen=True)
class _Worker:
    """One warpgroup: its references, and what it does."""

    p: Problem
    c: LinearFewConfig
    x: Any
    w: Any
    out: Any
    w_smem: Any
    x_smem: Any
    out_smem: Any
    full: Any
    words: Any = None
    masks: Any = None
    group_scale: Any = None
    scale: Any = None
    bias: Any = None
    scale_smem: Any = None
    part_smem: Any = None
    written: Any = None

    @property
    def wg(self) -> Any:
        """The warpgroup's position in its block."""
        return lax.axis_index("wg")

    @property
    def parts(self) -> int:
        """Workers that divide K."""
        return self.c.splits * self.c.warpgroups

    @property
    def rank(self) -> Any:
        """The worker's position among those that divide K."""
        return lax.axis_index("split") * self.c.warpgroups + self.wg

    @property
    def row(self) -> Any:
        """First column of the result."""
        return lax.axis_index("tile") * self.c.rows

    @property
    def token(self) -> Any:
        """First row of the result."""
        return lax.axis_index("token_tile") * self.c.tokens

    def run(self) -> None:
        """Computes a part of K, and with the other workers a tile of the result."""
        p, c = self.p, self.c
        steps = plgpu.cdiv(p.k, _depth(p))
        each = plgpu.cdiv(steps, self.parts)
        first = self.rank * each
        count = jnp.clip(steps - first, 0, each) if steps % self.parts else each
        for i in range(min(c.stages, each)):

            @plgpu.when(i < count)
            def _(i=i):
                self.start_copies(first + i, i)

        def accumulate(acc):
            @plgpu.loop(0, count)
            def _(i):
                slot = lax.rem(i, np.int32(c.stages))
                plgpu.barrier_wait(self.full.at[self.barrier(slot)])
                weights = self.weights(slot)
                # All warps have done that, and their parts of the product before.
                plgpu.commit_smem()

                @plgpu.when(jnp.logical_and(i > 0, i - 1 + c.stages < count))
                def _():
                    before = lax.rem(i - 1, np.int32(c.stages))
                    self.start_copies(first + i - 1 + c.stages, before)

                plgpu.wgmma(acc, weights, self.x_smem.at[self.wg, slot].T)
                plgpu.wgmma_wait(0)

            return acc[...]

        part = plgpu.run_scoped(accumulate, plgpu.ACC((c.rows, c.tokens)))
        self.store(part if self.parts == 1 else self.combine(part))

    def barrier(self, slot) -> Any:
        """The barrier of one of the worker's buffers."""
        return self.wg * self.c.stages + slot

    def start_copies(self, step, slot) -> None:
        """Starts to load a step's weights and tokens, and scales of groups."""
        p, c = self.p, self.c
        start = step * _depth(p)
        depth = plgpu.ds(start, _depth(p))
        rows = plgpu.ds(self.row, c.rows)
        tokens = plgpu.ds(self.token, c.tokens)
        copies: list[tuple[Any, Any, str | None]] = [
            (self.w.at[rows, depth], self.w_smem, "evict_first"),
            (self.x.at[tokens, depth], self.x_smem, "evict_last"),
        ]
        if p.group is not None:
            first = lax.div(start, np.int32(p.group))
            groups = plgpu.ds(first, self.scale_smem.shape[2])
            copies.append((self.group_scale.at[groups, rows], self.scale_smem, None))
        for source, target, hint in copies:
            plgpu.copy_gmem_to_smem(
                source,
                target.at[self.wg, slot],
                self.full.at[self.barrier(slot)],
                oob_mode=_ZEROS,
                cache_hint=hint,
            )

    def weights(self, slot) -> Any:
        """Returns a tile of weights, of the type of x and multiplied by its scales."""
        converter = self.p.converter(self.masks)
        if self.words is None:
            loaded = converter.load(self.w_smem.at[self.wg, slot])
        else:
            loaded = converter.load_words(self.words.at[self.wg, slot])
        wide = converter.finish(loaded)
        if self.p.group is None:
            return wide
        return widen.scaled(wide, self.scale_smem.at[self.wg, slot])

    def combine(self, part) -> Any:
        """Returns the sums of all workers for this one's part of the rows."""
        c = self.c
        self.part_smem[self.wg] = part
        plgpu.barrier_arrive(self.written)
        plgpu.barrier_wait(self.written)
        own = c.rows // self.parts
        rows = plgpu.ds(self.rank * own, own)

        def summand(split: int, wg: int) -> Any:
            ref = self.part_smem.at[wg, rows]
            return (plgpu.cluster_ref(ref, {"split": split}) if c.splits > 1 else ref)[
                ...
            ]

        summands = [
            summand(split, wg)
            for split in range(c.splits)
            for wg in range(c.warpgroups)
        ]
        return functools.reduce(lax.add, summands)

    def store(self, total) -> None:
        """Scales the sums (rows, tokens) and stores them."""
        p, c = self.p, self.c
        own = total.shape[0]
        row = self.row + self.rank * own
        rows = plgpu.ds(row, own)
        vectors = (p.load(ref, rows) for ref in (self.scale, self.bias))
        buffer = self.out_smem.at[self.wg]
        buffer.T[...] = p.finish(total, *vectors)
        plgpu.commit_smem()
        target = self.out.at[plgpu.ds(self.token, c.tokens), rows]
        some = row < p.n if p.n % c.rows else None
        plgpu.copy_smem_to_gmem(buffer, target, some)
        plgpu.wait_smem_to_gmem(0)

# SPDX-License-Identifier: Apache-2.0
"""Few tokens times weights of 8 or 4 bits: as fast as the weights are read.

The product is computed transposed: the rows of a tile of weights are the rows of the
tensor core's instruction, and the tokens its columns, of which 16 suffice. The last
warpgroup of a block copies weights into rings of SMEM buffers, one for each of the
others. These convert weights to 16 bits in registers, and multiply. They divide the
rows of a block's tiles, and K where there are more of them; the blocks of a cluster
divide K further. The sums of all tiles are added at the end, through distributed SMEM.

Tokens that are resident are loaded once for all tiles and warpgroups of a block, and
brought in the order of the weights (`widen.py`) in place, while the first weights are
under way. Others travel beside the weights, as many bytes as weights of 4 bits. Beside
integers of 8 bits a warpgroup orders those of a step while its products are under way;
beside integers of 4 bits they are in order already.
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
from pallas_gpu.ops.gemm.config import LinearFewConfig
from pallas_gpu.ops.gemm.problem import Problem
from pallas_gpu.ops.memory import Memory, launch
from pallas_gpu.ops.narrow import widen
from pallas_gpu.ops.rules import bits, cached
from pallas_gpu.ops.tiles import in_cluster, tiles

_ZEROS = plgpu.OOBFillMode.ZEROS
# Of a thread of the producer, and of one of four consumers: of 65536, of which five
# warpgroups have 96 each when they start.
_REGISTERS = 24, 112
# Of barriers, and to align arrays.
_OTHER_BYTES = 2048
# Rows of a warpgroup: those of an instruction of the tensor core.
_ROWS = 64
# Tokens of a step, at most, that a warpgroup orders.
_MOST_ORDERED = 16


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which tiles and which part of K a warpgroup computes."""

    p: Problem
    c: LinearFewConfig

    @property
    def depth(self) -> int:
        return widen.DEPTH_BYTES * 8 // bits(self.p.right)

    @property
    def groups(self) -> int:
        return 0 if self.p.group is None else widen.groups(self.p, self.depth)

    @property
    def own(self) -> int:
        """Rows of a tile whose sums a warpgroup stores: at least 16 bytes, for TMA."""
        return max(_ROWS // self.c.parts, 8)

    @property
    def steps(self) -> int:
        return plgpu.cdiv(self.p.k, self.depth)

    @property
    def each(self) -> int:
        """Steps of a part of K; the last ones have fewer, or none."""
        return plgpu.cdiv(self.steps, self.c.parts)

    @property
    def chunks(self) -> int:
        """Steps of a block: parts of the tokens in SMEM."""
        return self.each * self.c.along

    @property
    def tiles(self) -> int:
        return plgpu.cdiv(self.p.n, _ROWS)

    @property
    def workers(self) -> int:
        if self.c.blocks is None:
            return plgpu.cdiv(self.tiles, self.c.across)
        # Blocks may have tiles for some of their warpgroups.
        return min(max(self.c.blocks // self.c.splits, 1), self.tiles)

    @property
    def passes(self) -> int:
        """Tiles of a warpgroup, at most."""
        return plgpu.cdiv(self.tiles, self.workers * self.c.across)


def columns(p: Problem, config: LinearFewConfig) -> int:
    """Columns of all tiles: those of the result, and more."""
    del config
    return plgpu.align_to(p.n, _ROWS)


def orders_tokens(p: Problem, config: LinearFewConfig) -> bool:
    """Whether the kernel brings tokens in the order of integer weights.

    Beside weights of 4 bits, which are converted as fast as they are read, a kernel of
    their own takes less time: 14.5 in place of 16.2 microseconds for N = K = 8192 on an
    H200, both kernels together.
    """
    streamed = bits(p.right) == 8 and config.tokens <= _MOST_ORDERED
    return widen.is_integer(p.right) and (config.resident or streamed)


def fits(p: Problem, config: LinearFewConfig) -> bool:
    c, s = config, Schedule(p, config)
    buffers = c.warpgroups * c.stages
    tile = c.tokens * s.depth * p.dtype.itemsize
    total = (s.chunks if c.resident else buffers) * tile
    total += buffers * _ROWS * (widen.DEPTH_BYTES + s.groups * 4)
    if c.parts > 1:
        total += s.passes * c.warpgroups * _ROWS * c.tokens * 4
    else:
        total += c.warpgroups * _ROWS * c.tokens * p.out_dtype.itemsize
    return total + _OTHER_BYTES <= arch.SM_90A.smem_bytes_per_block


@cached
def make_kernel(p: Problem) -> Any:
    """Returns the function of x (tokens, K), w (N, K) and `Problem.operands`.

    Beside integers x is in the order of `widen.reordered`, unless `orders_tokens`.
    `group_scale` is (K / group, N); scale and bias are (N,), with `columns`
    elements.
    """
    c = p.config
    s, wgs = Schedule(p, c), c.warpgroups
    packed = tiles((wgs, c.stages, _ROWS, s.depth), p.right)
    words = tiles((wgs, c.stages, _ROWS, widen.DEPTH_BYTES // 4), jnp.dtype(jnp.uint32))
    chunks = s.chunks if c.resident else wgs * c.stages
    tokens = tiles((chunks, c.tokens, s.depth), p.dtype)
    by_words = widen.is_integer(p.right)
    out_smem = tiles((wgs, c.tokens, s.own), p.out_dtype)
    grouped = p.group is not None
    scratch = {
        "w_smem": plgpu.RefUnion(packed, words) if by_words else packed,
        # Where sums are exchanged, nobody reads tokens when results are stored.
        "x_smem": plgpu.RefUnion(tokens, *[out_smem] * (c.parts > 1)),
        "full": plgpu.Barrier(
            num_arrivals=1 + grouped + (not c.resident), num_barriers=wgs * c.stages
        ),
        "empty": plgpu.Barrier(num_barriers=wgs * c.stages, initially_complete=True),
    }
    if c.resident:
        scratch["x_full"] = plgpu.Barrier(num_barriers=s.chunks)
        scratch["x_ready"] = plgpu.Barrier(num_arrivals=wgs)
    if grouped:
        shape = (wgs, c.stages, widen.groups(p, s.depth), _ROWS)
        scratch["scale_smem"] = plgpu.SMEM(shape, jnp.float32)
    if c.parts == 1:
        scratch["out_smem"] = out_smem
    else:
        sums = (s.passes, wgs, _ROWS, c.tokens)
        scratch["sums"] = plgpu.SMEM(sums, jnp.float32)
        scratch["written"] = (
            plgpu.ClusterBarrier(collective_axes="split", num_arrivals=wgs)
            if c.splits > 1
            else plgpu.Barrier(num_arrivals=wgs)
        )

    def body(mem: Memory) -> None:
        mem.w_smem, mem.words = mem.w_smem if by_words else (mem.w_smem, None)
        if c.parts > 1:
            mem.out_smem = mem.x_smem[-1]
        mem.x_smem = mem.x_smem[0]
        wg = lax.axis_index("wg")
        worker = _Worker(p, c, mem, wg)
        plgpu.Roles(wgs, None if wgs < 4 else _REGISTERS).run(
            wg, worker.produce, worker.consume
        )

    out = jax.ShapeDtypeStruct((p.m, p.n), p.out_dtype)
    return launch(
        *(p, "linear_few", body, ("x", "w", *p.operands), out, scratch),
        grid={"worker": s.workers, "token_tile": plgpu.cdiv(p.m, c.tokens)},
        cluster={"split": c.splits},
        warpgroups=wgs + 1,
    )


@dataclasses.dataclass(frozen=True)
class _Worker(Schedule):
    mem: Memory
    wg: Any

    @property
    def ring(self) -> plgpu.Ring:
        """The warpgroup's ring: weights, the same as words, tokens, scales."""
        mem, stages = self.mem, self.c.stages
        own = plgpu.ds(self.wg * stages, stages)
        buffers = {"w": mem.w_smem.at[self.wg]}
        if mem.words is not None:
            buffers["words"] = mem.words.at[self.wg]
        if not self.c.resident:
            buffers["x"] = mem.x_smem.at[own]
        if self.groups:
            buffers["scale"] = mem.scale_smem.at[self.wg]
        return plgpu.Ring(buffers, mem.empty.at[own], mem.full.at[own])

    @property
    def lane(self) -> Any:
        """The warpgroup's position among those with different rows."""
        return lax.rem(self.wg, np.int32(self.c.across))

    @property
    def half(self) -> Any:
        """The warpgroup's position among those of its block that divide K."""
        return lax.div(self.wg, np.int32(self.c.across))

    @property
    def rank(self) -> Any:
        """The warpgroup's position among all that divide K."""
        return lax.axis_index("split") * self.c.along + self.half

    @property
    def tokens(self) -> Any:
        tokens = self.c.tokens
        return plgpu.ds(lax.axis_index("token_tile") * tokens, tokens)

    def row(self, turn: Any) -> Any:
        """First column of the result of one of the warpgroup's tiles."""
        tile = turn * np.int32(self.c.across) + self.lane
        return (tile * np.int32(self.workers) + lax.axis_index("worker")) * _ROWS

    @property
    def turns(self) -> Any:
        first = self.lane * np.int32(self.workers) + lax.axis_index("worker")
        step = np.int32(self.workers * self.c.across)
        return lax.div(np.int32(self.tiles) - first + (step - np.int32(1)), step)

    @property
    def count(self) -> Any:
        if self.steps % self.c.parts == 0:
            return np.int32(self.each)
        return jnp.clip(self.steps - self.rank * self.each, 0, self.each)

    def produce(self) -> None:
        c = self.c
        workers = [
            dataclasses.replace(self, wg=np.int32(i)) for i in range(c.warpgroups)
        ]
        lasts = [worker.turns * worker.count for worker in workers]

        def copy_step(i) -> None:
            for worker, last in zip(workers, lasts, strict=True):

                @plgpu.when(i < last)
                def _(worker=worker):
                    worker.start_copies(i, worker.ring.fill(i))

        # Tokens are in the L2, most of them: the device's memory is asked first.
        copy_step(np.int32(0))
        if c.resident:
            self.start_tokens()
        plgpu.loop(1, functools.reduce(lax.max, lasts))(copy_step)

    def consume(self) -> None:
        """Computes a part of K of some tiles, and with the others their sums."""
        if self.c.resident:
            self.finish_tokens()

        @plgpu.loop(0, self.turns)
        def _(turn):
            acc = plgpu.ACC((_ROWS, self.c.tokens))
            part = plgpu.run_scoped(functools.partial(self.accumulate, turn), acc)
            if self.c.parts == 1:
                self.store(part, turn)
            else:
                self.mem.sums[turn, self.wg] = part

        if self.c.parts > 1:
            plgpu.barrier_arrive(self.mem.written)
            plgpu.barrier_wait(self.mem.written)

            stored = self.turns
            if self.own * self.c.parts > _ROWS:
                stored = jnp.where(self.rank < _ROWS // self.own, stored, 0)

            @plgpu.loop(0, stored)
            def _(turn):
                self.store(self.combined(turn), turn)

    def accumulate(self, turn, acc) -> Any:
        c, count, ring = self.c, self.count, self.ring

        converter = self.converter()

        def slot(k):
            return ring.slot(turn * count + k)

        def load(k):
            taken = ring.take(turn * count + k)
            if self.mem.words is None:
                loaded = taken.buffers["w"][...]
            else:
                loaded = converter.load_words(taken.buffers["words"])
            if orders_tokens(self.p, c) and not c.resident:
                widen.reorder_tokens(taken.buffers["x"], self.p.right)
                plgpu.commit_smem()
            return loaded

        def spread(loaded, half):
            size = loaded.shape[1] // 2
            part = loaded[:, half * size : (half + 1) * size]
            # This happens while a product is under way, not after it.
            return lax.optimization_barrier(converter.spread(part))

        def multiply(k, half, weights):
            if c.resident:
                tokens = self.mem.x_smem.at[self.half * self.each + k]
            else:
                tokens = slot(k).buffers["x"]
            columns = plgpu.ds(half * self.depth // 2, self.depth // 2)
            plgpu.wgmma(acc, weights, tokens.at[:, columns].T)

        def second(k, loaded, weights):
            """Multiplies half of a step's weights, and returns the other."""
            multiply(k, 0, weights)
            other = spread(loaded, 1)
            plgpu.wgmma_wait(0)
            weights = self.finish(slot(k), 1, other)
            if c.resident:
                ring.release(turn * count + k)
            return weights

        @plgpu.when(count > 0)
        def _():
            zero = np.int32(0)
            loaded = load(zero)
            weights = self.finish(slot(zero), 0, spread(loaded, 0))

            @plgpu.loop(0, count - 1, init_carry=(loaded, weights))
            def final(k, carry):
                multiply(k, 1, second(k, *carry))
                following = load(k + 1)
                half = spread(following, 0)
                plgpu.wgmma_wait(0)
                if not c.resident:
                    ring.release(turn * count + k)
                return following, self.finish(slot(k + 1), 0, half)

            multiply(count - 1, 1, second(count - 1, *final))
            plgpu.wgmma_wait(0)
            if not c.resident:
                ring.release(turn * count + (count - 1))

        return acc[...]

    # --- copies -----------------------------------------------------------------------

    def start_tokens(self) -> None:
        chunks = self.chunks

        @plgpu.loop(0, chunks)
        def _(chunk):
            start = (lax.axis_index("split") * chunks + chunk) * self.depth
            plgpu.copy_gmem_to_smem(
                self.mem.x.at[self.tokens, plgpu.ds(start, self.depth)],
                self.mem.x_smem.at[chunk],
                self.mem.x_full.at[chunk],
                oob_mode=_ZEROS,
                cache_hint="evict_last",
            )

    def finish_tokens(self) -> None:
        """Waits for the tokens, and brings them in the order of the weights."""
        wgs, chunks = self.c.warpgroups, self.chunks

        @plgpu.loop(0, lax.div(chunks - self.wg + (wgs - 1), np.int32(wgs)))
        def _(i):
            chunk = self.wg + i * wgs
            plgpu.barrier_wait(self.mem.x_full.at[chunk])
            if self.mem.words is not None:
                widen.reorder_tokens(self.mem.x_smem.at[chunk], self.p.right)

        plgpu.commit_smem()
        plgpu.barrier_arrive(self.mem.x_ready)
        plgpu.barrier_wait(self.mem.x_ready)

    def start_copies(self, i, slot) -> None:
        """Starts to load the weights of the i-th step, and their scales."""
        p = self.p
        turn, k = lax.div(i, self.count), lax.rem(i, self.count)
        start = (self.rank * self.each + k) * self.depth
        rows, depth = plgpu.ds(self.row(turn), _ROWS), plgpu.ds(start, self.depth)
        copies: list[tuple[Any, Any, str | None]] = [
            (self.mem.w.at[rows, depth], slot.buffers["w"], "evict_first")
        ]
        if not self.c.resident:
            tokens = self.mem.x.at[self.tokens, depth]
            copies.append((tokens, slot.buffers["x"], "evict_last"))
        if p.group is not None:
            first = lax.div(start, np.int32(p.group))
            groups = plgpu.ds(first, self.groups)
            scales = self.mem.group_scale.at[groups, rows]
            copies.append((scales, slot.buffers["scale"], None))
        for source, target, hint in copies:
            plgpu.copy_gmem_to_smem(
                source,
                target,
                slot.full,
                oob_mode=_ZEROS,
                cache_hint=hint,
            )

    # --- weights ----------------------------------------------------------------------

    def converter(self) -> widen.Converter:
        return widen.converter(self.p.right, self.p.dtype, self.mem.get("masks"))

    def finish(self, slot, half: int, loaded) -> Any:
        """Returns weights of the type of x, multiplied by scales of groups."""
        wide = self.converter().finish(loaded)
        if self.p.group is None:
            return wide
        groups = self.groups
        size = max(groups // 2, 1)
        first = half * size if groups > 1 else 0
        return widen.scaled(wide, slot.buffers["scale"].at[plgpu.ds(first, size)])

    # --- results ----------------------------------------------------------------------

    def combined(self, turn) -> Any:
        """Returns the sums of all parts of K for this one's share of a tile."""
        rows = plgpu.ds(self.rank * self.own, self.own)
        found = [
            sums[turn, half * self.c.across + self.lane, rows]
            for sums in in_cluster(self.mem.sums, "split", self.c.splits)
            for half in range(self.c.along)
        ]
        return functools.reduce(lax.add, found)

    def store(self, total, turn) -> None:
        own = total.shape[0]
        row = self.row(turn) + self.rank * own
        rows = plgpu.ds(row, own)
        finish = widen.finisher(self.p, self.mem, rows)
        buffer = self.mem.out_smem.at[self.wg]
        buffer.T[...] = finish(total)
        plgpu.commit_smem()
        target = self.mem.out.at[self.tokens, rows]
        some = row < self.p.n if self.p.n % _ROWS else None
        plgpu.copy_smem_to_gmem(buffer, target, some)
        plgpu.wait_smem_to_gmem(0)

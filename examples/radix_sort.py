# SPDX-License-Identifier: Apache-2.0
"""A radix sort of long arrays, alone or with values: one pass for each digit of 8 bits.

Blocks take tiles in order. A warp ranks its keys in registers, by ballots; a block adds
the counts of its warps, and learns from those of the tiles before it, by a decoupled
look-back, where its keys begin. A pass reads and writes each key once (Adinets and
Merrill, Onesweep, 2022).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from examples import Case, integers

BITS, DIGITS = 8, 256
LANES, WARPGROUPS = 32, 2
WARPS = 4 * WARPGROUPS
OWN_DIGITS = DIGITS // WARPS  # those that a warp adds up for its block
KEYS = 16  # of a lane
TILE = WARPS * LANES * KEYS
WINDOW = 4  # tiles that a look-back reads at once
# What a tile says of a digit: nothing yet (0), how many keys it has, or how many there
# are up to its end.
HAS, UP_TO, COUNT = (np.uint32(x) for x in (1 << 30, 2 << 30, (1 << 30) - 1))


def sort(
    keys: jax.Array, values: jax.Array | None = None, *, bits: int = 32
) -> tuple[jax.Array, ...]:
    """Returns the sorted keys, and the values that move with them; it is stable.

    Args:
      keys: (n,), uint32; n is less than 2**30.
      values: (n,), of 32 bits; None for none.
      bits: how many of the low bits of a key are compared.
    """
    passes = plgpu.cdiv(bits, BITS)
    counts = _counts(keys, passes)
    starts = jnp.cumsum(counts, 1) - counts
    arrays = (keys,) if values is None else (keys, values)
    for i in range(passes):
        arrays = _pass(arrays, starts[i], i * BITS)
    return arrays


def _digit(keys: jax.Array, shift: int) -> jax.Array:
    return (keys >> np.uint32(shift) & np.uint32(DIGITS - 1)).astype(jnp.int32)


def _counts(keys: jax.Array, passes: int) -> jax.Array:
    """How often each digit occurs: (passes, DIGITS)."""
    block, part = 16384, 2048

    def body(keys_ref, _, counts_ref, local_ref):
        local_ref[...] = jnp.zeros(local_ref.shape, jnp.uint32)

        def count(j, carry):
            i = plgpu.program_id(0) * block + j * part + lax.iota(jnp.int32, part)
            inside = i < keys.size
            some = plgpu.load(keys_ref, i, mask=inside, other=np.uint32(0))
            for p in range(passes):
                place = local_ref.at[p, _digit(some, p * BITS)]
                plgpu.atomic_add(place, 1, mask=inside)
            return carry

        lax.fori_loop(0, block // part, count, 0)
        plgpu.atomic_add(counts_ref, local_ref[...])

    whole, shape = plgpu.BlockSpec(memory_space=plgpu.GMEM), (passes, DIGITS)
    return plgpu.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(shape, jnp.uint32),
        grid=(plgpu.cdiv(keys.size, block),),
        in_specs=[whole, whole],
        out_specs=whole,
        scratch_shapes=[plgpu.SMEM(shape, jnp.uint32)],
        input_output_aliases={1: 0},
    )(keys, jnp.zeros(shape, jnp.uint32))


def _pass(arrays: Any, starts: jax.Array, shift: int) -> Any:
    """Sorts by a digit: all arrays move with the first."""
    n = arrays[0].size
    tiles = plgpu.cdiv(n, TILE)

    def body(
        *refs, next_tile, status, counts, totals, places, moved, tile_ref, barrier
    ):
        sources, (starts_ref, *results) = refs[: len(arrays)], refs[len(arrays) :]
        wg = lax.axis_index("wg")

        def meet() -> None:
            plgpu.barrier_arrive(barrier)
            plgpu.barrier_wait(barrier)

        @plgpu.warp_map
        def _(warp_in_wg):
            warp = 4 * wg + warp_in_wg
            lane = lax.iota(jnp.int32, LANES)
            own = plgpu.ds(warp * OWN_DIGITS, OWN_DIGITS)

            @plgpu.when(warp == 0)
            def _():
                tile_ref[0] = plgpu.atomic_add(next_tile.at[0], 1)

            counts[warp] = jnp.zeros(DIGITS, jnp.uint32)
            meet()
            tile = tile_ref[0]

            def rows(ref):
                first = tile * TILE + warp * (KEYS * LANES)
                return [_load(ref, first + r * LANES, lane) for r in range(KEYS)]

            keys = rows(sources[0])
            ranks = [_rank(key, shift, counts, warp, lane) for key in keys]
            meet()
            of_warps = [counts[w, own] for w in range(WARPS)]
            count = sum(of_warps[1:], of_warps[0])
            plgpu.atomic_xchg(status.at[tile, own], count | HAS)
            totals[warp] = jnp.sum(count)
            meet()
            before = [jnp.where(w < warp, totals[w], 0) for w in range(WARPS)]
            begin = jnp.cumsum(count) - count + sum(before[1:], before[0])
            place = begin
            for w in range(WARPS):
                counts[w, own] = place
                place += of_warps[w]
            meet()
            ranks = [
                (rank + counts[warp, _digit(key, shift)]).astype(jnp.int32)
                for key, rank in zip(keys, ranks, strict=True)
            ]
            for key, rank in zip(keys, ranks, strict=True):
                moved[rank] = key
            before = _look_back(status, tile, own, starts_ref[own])
            plgpu.atomic_xchg(status.at[tile, own], (before + count) | UP_TO)
            places[own] = (before - begin).astype(jnp.int32)
            meet()
            first = [(r * WARPS + warp) * LANES for r in range(KEYS)]
            to = []
            for i in first:
                key = moved[plgpu.ds(i, LANES)]
                to.append(places[_digit(key, shift)] + i + lane)
                _store(results[0], to[-1], key)
            for source, result in zip(sources[1:], results[1:], strict=True):
                values = rows(source)
                meet()
                for value, rank in zip(values, ranks, strict=True):
                    moved[rank] = lax.bitcast_convert_type(value, jnp.uint32)
                meet()
                for i, there in zip(first, to, strict=True):
                    value = moved[plgpu.ds(i, LANES)]
                    _store(result, there, lax.bitcast_convert_type(value, result.dtype))

    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays],
        grid=(tiles,),
        grid_names=("block",),
        num_threads=WARPGROUPS,
        thread_name="wg",
        scratch_types={
            "next_tile": plgpu.GMEM((1,), jnp.int32, init=0),
            "status": plgpu.GMEM((tiles, DIGITS), jnp.uint32, init=0),
            "counts": plgpu.SMEM((WARPS, DIGITS), jnp.uint32),
            "totals": plgpu.SMEM((WARPS,), jnp.uint32),
            "places": plgpu.SMEM((DIGITS,), jnp.int32),
            "moved": plgpu.SMEM((TILE,), jnp.uint32),
            "tile_ref": plgpu.SMEM((1,), jnp.int32),
            "barrier": plgpu.Barrier(num_arrivals=WARPS),
        },
    )(*arrays, starts)


def _load(ref: Any, first: Any, lane: jax.Array) -> jax.Array:
    """A row of a warp; what lies beyond the end is sorted as the last of all keys."""
    if ref.size % TILE == 0:
        return ref[plgpu.ds(first, LANES)]
    last = lax.bitcast_convert_type(np.uint32(2**32 - 1), ref.dtype)
    return plgpu.load(ref, first + lane, mask=first + lane < ref.size, other=last)


def _store(ref: Any, to: jax.Array, values: jax.Array) -> None:
    plgpu.store(ref.at[to], (), values, mask=to < ref.size if ref.size % TILE else None)


def _rank(keys: Any, shift: int, counts: Any, warp: Any, lane: Any) -> jax.Array:
    """How many keys before each one, in earlier rows or lanes, have its digit."""
    peers = jnp.full(LANES, 2**32 - 1, jnp.uint32)
    for bit in range(shift, shift + BITS):
        is_set = keys >> np.uint32(bit) & 1 != 0
        votes = plgpu.ballot(is_set)
        peers &= jnp.where(is_set, votes, ~votes)
    digit, lane = _digit(keys, shift), lane.astype(jnp.uint32)
    before = counts[warp, digit]
    before += lax.population_count(peers & ((np.uint32(1) << lane) - 1))
    plgpu.store(counts.at[warp, digit], (), before + 1, mask=peers >> lane == 1)
    return before


def _look_back(status: Any, tile: Any, own: Any, starts: jax.Array) -> jax.Array:
    """How many keys of all tiles come before those of a tile, for each digit."""

    def step(state):
        end, total, missing = state
        rows = []
        for i in range(1, WINDOW + 1):
            # Others are storing these words: an atomic operation reads them.
            row = plgpu.atomic_or(status.at[jnp.maximum(end - i, 0), own], 0)
            rows.append(jnp.where(end >= i, row, starts | UP_TO))
        least = rows[0]
        for row in rows[1:]:
            least = jnp.minimum(least, row)

        def add(_, total, missing):
            for row in rows:
                total += jnp.where(missing, row & COUNT, 0)
                missing &= row < UP_TO
            return end - WINDOW, total, missing

        known = jnp.all(least >= HAS)
        return lax.cond(known, add, lambda *same: same, end, total, missing)

    nothing = tile, jnp.zeros(starts.shape, jnp.uint32), jnp.ones(starts.shape, bool)
    return lax.while_loop(lambda state: jnp.any(state[2]), step, nothing)[1]


def _few(seed: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    keys = integers(seed, 0, 1 << 16, size).astype(np.uint32)
    return keys, np.arange(size, dtype=np.float32)


def _reference(keys: jax.Array, *values: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(lax.sort((keys, *values), num_keys=1, is_stable=True))


CASES = [
    Case(lambda x, y: sort(x, y, bits=16), _reference, _few(0, TILE + 99), 0.0),
    Case(lambda x: sort(x, bits=8), _reference, (_few(1, TILE)[0] % 200,), 0.0),
]

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
    rows = 24 if values is None else 16  # of a warp: two blocks fit in an SM
    tile = WARPS * rows * LANES
    whole = plgpu.cdiv(keys.size, tile) * tile
    for i in range(passes):
        size = keys.size if i == passes - 1 else whole
        arrays = _pass(arrays, starts[i], i * BITS, size, rows)
    return arrays


def _digit(keys: jax.Array, shift: int) -> jax.Array:
    return (keys >> np.uint32(shift) & np.uint32(DIGITS - 1)).astype(jnp.int32)


def _counts(keys: jax.Array, passes: int) -> jax.Array:
    """How often each digit occurs: (passes, DIGITS)."""
    # Neighbours count in copies: fewer of them meet in a bank, or at an element.
    block, part, copies = 32768, 2048, 4

    def body(keys_ref, _, counts_ref, local_ref):
        local_ref[...] = jnp.zeros(local_ref.shape, jnp.uint32)

        def count(j, carry):
            i = plgpu.program_id(0) * block + j * part + lax.iota(jnp.int32, part)
            inside = None if keys.size % block == 0 else i < keys.size
            some = plgpu.load(keys_ref, i, mask=inside)
            for p in range(passes):
                place = local_ref.at[p, _digit(some, p * BITS), i // 4 % copies]
                plgpu.atomic_add(place, 1, mask=inside)
            return carry

        lax.fori_loop(0, block // part, count, 0)
        plgpu.atomic_add(counts_ref, jnp.sum(local_ref[...], -1))

    whole, shape = plgpu.BlockSpec(memory_space=plgpu.GMEM), (passes, DIGITS)
    return plgpu.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(shape, jnp.uint32),
        grid=(plgpu.cdiv(keys.size, block),),
        in_specs=[whole, whole],
        out_specs=whole,
        scratch_shapes=[plgpu.SMEM((*shape, copies), jnp.uint32)],
        input_output_aliases={1: 0},
    )(keys, jnp.zeros(shape, jnp.uint32))


def _pass(arrays: Any, starts: jax.Array, shift: int, size: int, rows: int) -> Any:
    """Sorts by a digit: all arrays move with the first.

    Beyond the end of a source are keys that follow all others. Results have a size.
    """
    tile_size = WARPS * rows * LANES
    tiles = plgpu.cdiv(arrays[0].size, tile_size)

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

            first = ((tile * WARPS + warp) * rows) * LANES
            here = [first + r * LANES for r in range(rows)]
            keys = [_load(sources[0], i, tile_size) for i in here]
            ranks = [_rank(key, shift, counts, warp) for key in keys]
            meet()
            of_warps = [counts[w, own] for w in range(WARPS)]
            count = sum(of_warps[1:], of_warps[0])
            plgpu.atomic_xchg(status.at[tile, own], count | HAS)
            totals[warp] = jnp.sum(count)
            meet()
            begin = _begin(of_warps, count, counts, totals, own, warp)
            meet()
            ranks = _in_tile(keys, ranks, shift, counts, warp)
            _exchange(moved, keys, ranks)
            before = _look_back(status, tile, own, starts_ref[own])
            plgpu.atomic_xchg(status.at[tile, own], (before + count) | UP_TO)
            places[own] = (before - begin).astype(jnp.int32)
            meet()
            there = [(r * WARPS + warp) * LANES for r in range(rows)]
            targets = []
            for i in there:
                key = moved[plgpu.ds(i, LANES)]
                to = places[_digit(key, shift)] + i + lane
                _store(results[0], to, key, tile_size)
                targets.append(to)
            for source, result in zip(sources[1:], results[1:], strict=True):
                values = [_load(source, i, tile_size) for i in here]
                meet()
                _exchange(moved, values, ranks)
                meet()
                for i, to in zip(there, targets, strict=True):
                    _store(result, to, moved[plgpu.ds(i, LANES)], tile_size)

    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((size,), x.dtype) for x in arrays],
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
            "moved": plgpu.SMEM((tile_size,), jnp.uint32),
            "tile_ref": plgpu.SMEM((1,), jnp.int32),
            "barrier": plgpu.Barrier(num_arrivals=WARPS),
        },
    )(*arrays, starts)


def _begin(
    of_warps: Any, count: Any, counts: Any, totals: Any, own: Any, warp: Any
) -> jax.Array:
    """Where the keys of each digit begin in a block; `counts` tells it of each warp."""
    before = [jnp.where(w < warp, totals[w], 0) for w in range(WARPS)]
    begin = place = jnp.cumsum(count) - count + sum(before[1:], before[0])
    for w in range(WARPS):
        counts[w, own] = place
        place += of_warps[w]
    return begin


def _in_tile(
    keys: Any, ranks: Any, shift: int, starts: Any, warp: Any
) -> list[jax.Array]:
    """Ranks among all keys of a tile, of those among the keys with the same digit."""
    return [
        (rank + starts[warp, _digit(key, shift)]).astype(jnp.int32)
        for key, rank in zip(keys, ranks, strict=True)
    ]


def _load(ref: Any, first: Any, tile_size: int) -> jax.Array:
    """A row of a warp; what lies beyond the end is sorted as the last of all keys."""
    if ref.size % tile_size == 0:
        return ref[plgpu.ds(first, LANES)]
    at, last = first + lax.iota(jnp.int32, LANES), np.uint32(2**32 - 1)
    last = lax.bitcast_convert_type(last, ref.dtype)
    return plgpu.load(ref, at, mask=at < ref.size, other=last)


def _store(ref: Any, to: jax.Array, values: jax.Array, tile_size: int) -> None:
    inside = to < ref.size if ref.size % tile_size else None
    values = lax.bitcast_convert_type(values, ref.dtype)
    plgpu.store(ref.at[to], (), values, mask=inside)


def _exchange(moved: Any, values: Any, ranks: Any) -> None:
    for value, rank in zip(values, ranks, strict=True):
        moved[rank] = lax.bitcast_convert_type(value, jnp.uint32)


def _rank(keys: Any, shift: int, counts: Any, warp: Any) -> jax.Array:
    """How many keys before each one, in earlier rows or lanes, have its digit."""
    peers = jnp.full(LANES, 2**32 - 1, jnp.uint32)
    for bit in range(shift, shift + BITS):
        is_set = keys >> np.uint32(bit) & 1 != 0
        votes = plgpu.ballot(is_set)
        peers &= jnp.where(is_set, votes, ~votes)
    digit, lane = _digit(keys, shift), lax.iota(jnp.uint32, LANES)
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
    Case(lambda x, y: sort(x, y, bits=16), _reference, _few(0, 4096 + 99), 0.0),
    Case(lambda x: sort(x, bits=8), _reference, (_few(1, 6144)[0] % 200,), 0.0),
]

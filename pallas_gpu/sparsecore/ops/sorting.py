# SPDX-License-Identifier: Apache-2.0
"""Sorts of rows, and their largest elements: merges of registers that are sorted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gpu import errors
from pallas_gpu import sparsecore as plsc
from pallas_gpu.sparsecore.ops._rows import (
    BOTH,
    ArrayLike,
    Launch,
    padded,
    require_matrix,
    rounded,
)

_TYPES = (jnp.float32, jnp.int32)
# Rows of a block.
_ROWS = 8
_SIGN = np.int32(-(2**31))
# No key is sorted behind the padding of a row.
_LAST = np.uint32(2**32 - 1)


def sort(
    keys: ArrayLike,
    values: ArrayLike | None = None,
    *,
    descending: bool = False,
    target: str | None = None,
    interpret: Any = None,
) -> Any:
    """Sorts each row, and moves the elements of `values` with it.

    Registers are sorted by an instruction, and merged by a bitonic network over them.
    NaN is larger than all numbers, as in `jnp.sort`, and -0 less than 0. The order of
    equal keys is not defined.

    Args:
      keys: (rows, columns) of float32 or int32; 8 rows fit a quarter of VMEM, an
        eighth where there are values.
      values: the same shape, float32 or int32; None: keys alone.
      descending: whether the largest key is first.
      target, interpret: the chip, and as of `plsc.kernel`.

    Returns:
      The sorted keys, or keys and values.

    Raises:
      ShapeError: other shapes or types.
      OutOfResources: a row is too long for VMEM.
    """
    keys = require_matrix(keys, "sort", "keys", _TYPES)
    arrays = [keys]
    if values is not None:
        values = require_matrix(values, "sort", "values", _TYPES)
        if values.shape != keys.shape:
            raise errors.ShapeError(
                "sort: keys and values have different shapes",
                expected=str(list(keys.shape)),
                got=str(list(values.shape)),
                hint="a value for each key",
            )
        arrays.append(values)
    launch = Launch(target, interpret)
    lanes = launch.chip.lanes
    columns = keys.shape[1]
    width = _registers(columns, lanes) * lanes
    arrays[0] = _ordered(keys, descending)
    pads = [_LAST, 0][: len(arrays)]
    flat = [_flat(x, width, pad) for x, pad in zip(arrays, pads, strict=True)]

    def rows(*parts: Any) -> None:
        ins, outs = parts[: len(flat)], parts[len(flat) :]

        @plsc.loop(0, _ROWS)
        def _(row: Any) -> None:
            for source, to in zip(ins, outs, strict=True):

                @plsc.parallel_loop(0, width, step=lanes, unroll=8)
                def _(i: Any, source: Any = source, to: Any = to) -> None:
                    part = plsc.ds(row * width + i, lanes)
                    to[part] = source[part]

            network(outs, row * width, columns, lanes)

    found = _over_rows(launch, rows, flat, width, [(width, x.dtype) for x in arrays])
    shape = (-1, width)
    results = [x.reshape(shape)[: keys.shape[0], :columns] for x in found]
    results[0] = _restored(results[0], keys.dtype, descending)
    return results[0] if values is None else tuple(results)


def _registers(columns: int, lanes: int) -> int:
    """Returns how many registers a row is sorted in: a power of two."""
    return 1 << (-(-columns // lanes) - 1).bit_length()


def network(refs: Any, first: Any, columns: int, lanes: int) -> None:
    """Sorts a row from `first` on, in place.

    Args:
      refs: references in VMEM to keys, and to values that move with them. Behind the
        columns, up to a power of two of registers, is padding that no key exceeds; it
        stays there, as neither an exchange nor the sort of a register moves equal keys.
    """
    count = _registers(columns, lanes)

    def load(place: Any) -> list[jax.Array]:
        return [ref[plsc.ds(place, lanes)] for ref in refs]

    def store(place: Any, values: Any) -> None:
        for ref, value in zip(refs, values, strict=True):
            ref[plsc.ds(place, lanes)] = value

    def each() -> None:
        @plsc.parallel_loop(0, count * lanes, step=lanes, unroll=min(8, count))
        def _(t: Any) -> None:
            key, *values = load(first + t)
            pair = plsc.sort_key_val(key, (values or [key])[0])
            store(first + t, pair[: len(refs)])

    def exchange(pairs: Callable[[Any], tuple[Any, Any]], *, turned: bool) -> None:
        @plsc.parallel_loop(
            0, count * lanes // 2, step=lanes, unroll=min(8, count // 2)
        )
        def _(t: Any) -> None:
            i, j = (first + place for place in pairs(t))
            one, other = load(i), load(j)
            if turned:
                other = [lax.rev(x, (0,)) for x in other]
            keep = one[0] <= other[0]
            both = list(zip(one, other, strict=True))
            store(i, [jnp.where(keep, a, b) for a, b in both])
            store(j, [jnp.where(keep, b, a) for a, b in both])

    each()
    size, ends = 2, columns // lanes
    while size <= count:
        exchange(_mirrored(size * lanes, lanes), turned=True)
        distance = size // 4
        while distance:
            exchange(_apart(distance * lanes), turned=False)
            distance //= 2
        if ends % size >= size // 2 and columns % lanes:
            # It has been turned: the padding is to be its last lanes again.
            last = first + ends * lanes
            store(last, [lax.rev(x, (0,)) for x in load(last)])
        each()
        size *= 2


def _mirrored(size: int, lanes: int) -> Callable[[Any], tuple[Any, Any]]:
    """Pairs of registers from both ends of runs of a size, a power of two."""
    half = size // 2

    def pair(t: Any) -> tuple[Any, Any]:
        before = t & np.int32(-half)
        return t + before, (before + before + before - t) + (size - lanes)

    return pair


def _apart(distance: int) -> Callable[[Any], tuple[Any, Any]]:
    """Pairs of registers at a distance, a power of two."""

    def pair(t: Any) -> tuple[Any, Any]:
        place = t + (t & np.int32(-distance))
        return place, place + distance

    return pair


def top_k(
    x: ArrayLike, k: int, *, target: str | None = None, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Returns the k largest elements of each row, the largest first, and their columns.

    Up to as many as a register has lanes are kept in one register, into which each
    further register is merged; more are taken from the sorted row. NaN is larger than
    all numbers, as in `lax.top_k`. Which of several equal elements is first is not
    defined.

    Args:
      x: (rows, columns) of float32 or int32.
      k: how many, static, at most the number of columns.
      target, interpret: the chip, and as of `plsc.kernel`.

    Returns:
      The elements and their columns as int32, both (rows, k).

    Raises:
      ShapeError, ArgumentError: another shape or type, k out of range.
      OutOfResources: a row is too long for VMEM.
    """
    x = require_matrix(x, "top_k", "x", _TYPES)
    count, columns = x.shape
    if not 1 <= k <= columns:
        raise errors.ArgumentError(
            "top_k: k is out of range",
            expected=f"1 to {columns}",
            got=k,
            hint="a row has that many elements",
        )
    launch = Launch(target, interpret)
    lanes = launch.chip.lanes
    if k > lanes:
        names = jnp.broadcast_to(jnp.arange(columns, dtype=jnp.int32), x.shape)
        keys, found = sort(
            x, names, descending=True, target=target, interpret=interpret
        )
        return keys[:, :k], found[:, :k]
    width = rounded(columns, lanes)

    def rows(part: Any, keys_out: Any, names_out: Any) -> None:
        def merged(i: Any, row: int, best: Any) -> Any:
            new = part[plsc.ds(row * width + i, lanes)]
            names = i + lax.iota(jnp.int32, lanes)
            new, names = plsc.sort_key_val(new, names, descending=True)
            # An ascending and a descending register: the lesser ones of each lane are
            # the least of all. Padding is not less than any.
            keep = best[0] <= new
            return plsc.sort_key_val(
                jnp.where(keep, best[0], new), jnp.where(keep, best[1], names)
            )

        def first(row: int) -> Any:
            key = part[plsc.ds(row * width, lanes)]
            return plsc.sort_key_val(key, lax.iota(jnp.int32, lanes))

        # A sort waits for the one before it of the same row: rows take turns.
        @plsc.loop(lanes, width, step=lanes, init_carry=[*map(first, range(_ROWS))])
        def best(i: Any, bests: Any) -> Any:
            return [merged(i, row, best) for row, best in enumerate(bests)]

        for row, found in enumerate(best):
            for ref, value in zip((keys_out, names_out), found, strict=True):
                ref[plsc.ds(row * lanes, lanes)] = value

    flat = _flat(_ordered(x, descending=True), width, _LAST)
    results = [(lanes, jnp.uint32), (lanes, jnp.int32)]
    keys, names = _over_rows(launch, rows, [flat], width, results)
    keys, names = (found.reshape(-1, lanes)[:count, :k] for found in (keys, names))
    return _restored(keys, x.dtype, descending=True), names


def _ordered(x: jax.Array, descending: bool) -> jax.Array:
    """Returns keys as uint32 whose ascending order is that of the keys, NaN as largest.

    XLA computes it where it makes whole blocks of the rows; subcores sort uint32.
    """
    if x.dtype == jnp.float32:
        x = lax.bitcast_convert_type(jnp.where(x != x, jnp.nan, x), jnp.int32)
        x = _other_order(x)
    x = lax.bitcast_convert_type(x ^ _SIGN, jnp.uint32)
    return ~x if descending else x


def _restored(keys: jax.Array, dtype: Any, descending: bool) -> jax.Array:
    """Returns the keys of what `_ordered` has returned."""
    keys = ~keys if descending else keys
    keys = lax.bitcast_convert_type(keys, jnp.int32) ^ _SIGN
    if dtype == jnp.float32:
        return lax.bitcast_convert_type(_other_order(keys), jnp.float32)
    return keys


def _other_order(bits: jax.Array) -> jax.Array:
    """Reverses the order of negative numbers: sign and magnitude to int32, and back."""
    return bits ^ ((bits >> 31) & np.int32(2**31 - 1))


def _flat(x: jax.Array, width: int, value: Any) -> jax.Array:
    """Returns whole blocks of rows of a width, one behind the other."""
    columns = [(0, 0), (0, width - x.shape[1])]
    x = jnp.pad(x, columns, constant_values=value) if x.shape[1] < width else x
    return padded(x, rounded(x.shape[0], _ROWS), value).reshape(-1)


def _over_rows(
    launch: Launch,
    body: Any,
    arrays: list[jax.Array],
    width: int,
    results: list[tuple[int, Any]],
) -> Any:
    """Runs a body over blocks of rows of flat arrays, which the subcores share.

    Args:
      width: of the rows of the arguments.
      results: widths and types of the rows of the results.
    """
    count = arrays[0].size // width

    def spec(columns: int) -> plsc.BlockSpec:
        return plsc.BlockSpec((_ROWS * columns,), lambda i: (i,))

    def over(*refs: Any) -> None:
        plsc.emit_pipeline(
            body,
            grid=(count // _ROWS,),
            in_specs=[spec(width) for _ in arrays],
            out_specs=[spec(columns) for columns, _ in results],
            core_axis_name=BOTH,
            dimension_semantics=(plsc.PARALLEL,),
        )(*refs)

    types = [jax.ShapeDtypeStruct((count * n,), dtype) for n, dtype in results]
    return launch.kernel(over, types, ())(*arrays)

# SPDX-License-Identifier: Apache-2.0
"""Sorting along an axis: a bitonic network of compare and exchange.

K. Batcher, Sorting networks and their applications (1968).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gpu import types
from pallas_gpu.composites import pairs
from pallas_gpu.composites.functions import by_bits, unsigned
from pallas_gpu.entry.expand import Composite, composite
from pallas_gpu.primitives.moves.sorting import sort_network


def _in_bytes(rule: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """A rule for operands of less than a byte: they are sorted in a wider type."""

    def widened(composite: Composite, *operands: Any) -> list[Any]:
        wide = [lax.convert_element_type(x, _wide(x.dtype)) for x in operands]
        results = rule(composite, *wide)
        return [
            lax.convert_element_type(x, aval.dtype)
            for x, aval in zip(results, composite.out_avals, strict=True)
        ]

    return widened


def _wide(dtype: Any) -> Any:
    if types.itemsize_bits(dtype) >= 8:
        return dtype
    if not jnp.issubdtype(dtype, jnp.integer):
        return jnp.bfloat16
    return np.uint8 if jnp.issubdtype(dtype, jnp.unsignedinteger) else np.int8


@composite("sort")
@_in_bytes
def _sort(composite: Composite, *operands: Any) -> list[Any]:
    params = composite.params
    axis, count = params["dimension"] % operands[0].ndim, params["num_keys"]
    given, moved = operands[:count], operands[count:]
    signs = [_merged_sign(x) for x in given if _is_merged(x.dtype)]
    keys, signs, arrays = _sorted([_ordered(x) for x in given], signs, moved, axis)
    found = [
        _restored(key, signs.pop(0) if _is_merged(x.dtype) else None, x.dtype)
        for key, x in zip(keys, given, strict=True)
    ]
    return [pairs.in_default_layout(composite, x) for x in (*found, *arrays)]


@composite("top_k")
@_in_bytes
def _top_k(composite: Composite, x: Any) -> list[Any]:
    """The order is that of signs and bits; of equal ones the first."""
    axis = composite.params.get("axis", -1) % x.ndim
    kept = composite.out_avals[0].shape[axis]
    if x.ndim == 1 and selects(x.size, kept):
        return _selected(x, kept, composite.out_avals[1].dtype)
    position = lax.broadcasted_iota(np.uint32, x.shape, axis)
    (keys, found), _, _ = _sorted([~by_bits(x), position], [], [], axis)
    results = [_of_bits(~keys, x.dtype), found.astype(composite.out_avals[1].dtype)]
    return [
        pairs.in_default_layout(composite, lax.slice_in_dim(x, 0, kept, axis=axis))
        for x in results
    ]


# A round of a selection takes as long as three steps of a network, for whatever number
# of elements a thread has: on an H100 2.5 with one, 3.5 with 64 (benchmarks/sorts.py).
_STEPS_OF_A_ROUND = 3


def selects(size: int, kept: int) -> bool:
    """Whether elements of a vector are selected one after the other, and not sorted."""
    return kept * _STEPS_OF_A_ROUND <= steps(size)


def steps(size: int) -> int:
    """The number of steps of a network."""
    bits = pairs.raised(size).bit_length() - 1
    return bits * (bits + 1) // 2


def _selected(x: Any, kept: int, dtype: Any) -> list[Any]:
    """The largest elements of a vector, one after the other, and their positions."""
    keys, position = by_bits(x), lax.iota(np.int32, x.shape[0])
    least = np.zeros((), keys.dtype)
    slot = lax.iota(np.int32, kept)

    def select(i: Any, state: Any) -> Any:
        left, values, found = state
        largest = jnp.max(jnp.where(left, keys, least))
        first = jnp.min(
            jnp.where(left & (keys == largest), position, np.int32(x.shape[0]))
        )
        return (
            left & (position != first),
            jnp.where(slot == i, largest, values),
            jnp.where(slot == i, first, found),
        )

    none = jnp.zeros(kept, keys.dtype), jnp.zeros(kept, np.int32)
    state = jnp.ones(x.shape, bool), *none
    _, values, found = lax.fori_loop(0, kept, select, state)
    return [_of_bits(values, x.dtype), found.astype(dtype)]


def _of_bits(keys: Any, dtype: Any) -> Any:
    """The numbers of `by_bits`."""
    if dtype == np.bool_:
        return keys != 0
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        return keys
    if dtype == jnp.float8_e8m0fnu:
        return lax.bitcast_convert_type(keys, dtype)
    sign = keys.dtype.type(1) << keys.dtype.type(8 * keys.dtype.itemsize - 1)
    raw = keys ^ sign
    if not jnp.issubdtype(dtype, jnp.integer):
        raw = jnp.where(keys >= sign, raw, ~keys)
    return lax.bitcast_convert_type(raw, dtype)


def _ordered(x: Any) -> Any:
    """Unsigned integers in the order of sorts: zeros are equal, and NaN is last."""
    ordered = by_bits(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return ordered
    ordered = jnp.where(x == 0, by_bits(jnp.zeros_like(x)), ordered)
    last = np.asarray(np.iinfo(ordered.dtype).max, ordered.dtype)
    return jnp.where(x != x, last, ordered)


def _is_merged(dtype: Any) -> bool:
    """Whether `_ordered` makes one number of zeros, and of NaN, of either sign."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype != jnp.float8_e8m0fnu


def _merged_sign(x: Any) -> Any:
    """Whether it is a negative one of those: a bool."""
    return (unsigned(x) >= _sign_bit(x.dtype)) & ((x == 0) | (x != x))


def _restored(keys: Any, negative: Any, dtype: Any) -> Any:
    """The numbers of `_ordered`, but for what NaN have besides a sign."""
    found = _of_bits(keys, dtype)
    if negative is None:
        return found
    raw = unsigned(found)
    raw = jnp.where(negative, raw | _sign_bit(dtype), raw)
    return lax.bitcast_convert_type(raw, dtype)


def _sign_bit(dtype: Any) -> Any:
    bits = types.itemsize_bits(dtype)
    return np.dtype(f"uint{bits}").type(1 << bits - 1)


def _sorted(
    keys: Sequence[Any], signs: Sequence[Any], moved: Sequence[Any], axis: int
) -> tuple[list[Any], list[Any], list[Any]]:
    """Sorts keys, and what moves with them, by position where keys are equal.

    Bools that are true for few elements, the signs, are bits of the position.
    """
    shape, count = keys[0].shape, len(keys)
    size = pairs.raised(shape[axis])
    arrays = [*keys]
    if moved or signs:
        few = size << len(signs) <= 1 << 16
        position = lax.broadcasted_iota(np.uint16 if few else np.uint32, shape, axis)
        for sign in signs:
            position = position << 1 | sign.astype(position.dtype)
        arrays.append(position)
    compared = len(arrays)
    arrays += [
        x.astype(np.uint8) if x.dtype == np.bool_ else unsigned(x) for x in moved
    ]
    if size != shape[axis]:
        # The padding follows all elements: its position is the last, or it is equal.
        arrays = [_padded(x, axis, size) for x in arrays]
    if size > 1:
        arrays = sort_network(arrays, axis, compared)
    if size != shape[axis]:
        arrays = [lax.slice_in_dim(x, 0, shape[axis], axis=axis) for x in arrays]
    bits = reversed(range(len(signs)))
    return (
        arrays[:count],
        [arrays[count] >> bit & 1 != 0 for bit in bits],
        [
            x != 0 if v.dtype == np.bool_ else lax.bitcast_convert_type(x, v.dtype)
            for x, v in zip(arrays[compared:], moved, strict=True)
        ],
    )


def _padded(x: Any, axis: int, size: int) -> Any:
    config = [(0, 0, 0)] * x.ndim
    config[axis] = (0, size - x.shape[axis], 0)
    return lax.pad(x, np.iinfo(x.dtype).max * np.ones((), x.dtype), config)

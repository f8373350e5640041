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
from pallas_gpu.composites.functions import unsigned
from pallas_gpu.entry.expand import Composite, composite
from pallas_gpu.entry.integers import cdiv
from pallas_gpu.layouts.registers.linear import THREADS


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
    keys = [_ordered(x) for x in operands[:count]]
    return _sorted(composite, keys, operands, axis)


@composite("top_k")
@_in_bytes
def _top_k(composite: Composite, x: Any) -> list[Any]:
    """The order is that of signs and bits; of equal ones the first."""
    axis = composite.params.get("axis", -1) % x.ndim
    kept = composite.out_avals[0].shape[axis]
    if x.ndim == 1 and selects(x.size, kept):
        return _selected(x, kept, composite.out_avals[1].dtype)
    position = lax.broadcasted_iota(np.int32, x.shape, axis)
    values, found = _sorted(composite, [~_by_bits(x)], [x, position], axis)
    dtype = composite.out_avals[1].dtype
    return [
        lax.slice_in_dim(values, 0, kept, axis=axis),
        lax.slice_in_dim(found, 0, kept, axis=axis).astype(dtype),
    ]


# A round of a selection costs as much as so many steps of a network of an element a
# thread. On an H200, 5 of 64: 2.43 us and 1.98; 11 of 512: 4.26 and 6.14; 13 of 1024:
# 4.99 and 19.3. In PTX a round has about 8 instructions for each element that a thread
# has, a step 18: longer vectors have not been measured, and count half a step each.
_ROUND, _ELEMENTS_OF_A_STEP = 7, 2


def selects(size: int, kept: int) -> bool:
    """Whether elements of a vector are selected one after the other, and not sorted."""
    each = cdiv(size, THREADS)
    return kept * (_ROUND + each // _ELEMENTS_OF_A_STEP) <= each * steps(size)


def steps(size: int) -> int:
    """The number of steps of a network."""
    bits = pairs.raised(size).bit_length() - 1
    return bits * (bits + 1) // 2


def _selected(x: Any, kept: int, dtype: Any) -> list[Any]:
    """The largest elements of a vector, one after the other, and their positions."""
    keys, position = _by_bits(x), lax.iota(np.int32, x.shape[0])
    least = np.zeros((), keys.dtype)
    left = jnp.ones(x.shape, bool)
    slot = lax.iota(np.int32, kept)
    values, found = jnp.zeros(kept, keys.dtype), jnp.zeros(kept, np.int32)
    for i in range(kept):
        largest = jnp.max(jnp.where(left, keys, least))
        first = jnp.min(
            jnp.where(left & (keys == largest), position, np.int32(x.shape[0]))
        )
        left &= position != first
        values = jnp.where(slot == i, largest, values)
        found = jnp.where(slot == i, first, found)
    return [_of_bits(values, x.dtype), found.astype(dtype)]


def _of_bits(keys: Any, dtype: Any) -> Any:
    """The numbers of `_by_bits`."""
    if dtype == np.bool_:
        return keys != 0
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        return keys
    sign = keys.dtype.type(1) << keys.dtype.type(8 * keys.dtype.itemsize - 1)
    raw = keys ^ sign
    if not jnp.issubdtype(dtype, jnp.integer):
        raw = jnp.where(keys >= sign, raw, ~keys)
    return lax.bitcast_convert_type(raw, dtype)


def _ordered(x: Any) -> Any:
    """Unsigned integers in the order of sorts: zeros are equal, and NaN is last."""
    ordered = _by_bits(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return ordered
    ordered = jnp.where(x == 0, _by_bits(jnp.zeros_like(x)), ordered)
    last = np.asarray(np.iinfo(ordered.dtype).max, ordered.dtype)
    return jnp.where(x != x, last, ordered)


def _by_bits(x: Any) -> Any:
    """Unsigned integers in the order of numbers, -0 before 0 and NaN at the ends."""
    if x.dtype == np.bool_:
        return x.astype(np.uint8)
    if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        return x
    raw = unsigned(x)
    if x.dtype == jnp.float8_e8m0fnu:
        # Exponents have no sign; NaN is the last.
        return raw
    sign = raw.dtype.type(1) << raw.dtype.type(8 * raw.dtype.itemsize - 1)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return raw ^ sign
    return jnp.where(raw >= sign, ~raw, raw | sign)


def _sorted(
    composite: Composite, keys: Sequence[Any], values: Sequence[Any], axis: int
) -> list[Any]:
    """Sorts values by keys, and by position where keys are equal."""
    shape = values[0].shape
    size = pairs.raised(shape[axis])
    position = lax.broadcasted_iota(np.uint32, shape, axis)
    bits = [x.astype(np.uint8) if x.dtype == np.bool_ else unsigned(x) for x in values]
    arrays = [*keys, position, *bits]
    if size != shape[axis]:
        # The padding's position is the last of all.
        arrays = [_padded(x, axis, size) for x in arrays]
    arrays = [pairs.splittable(composite, x) for x in arrays]
    network = _Network(axis, size, len(keys) + 1)
    arrays = network.sort(arrays)[len(keys) + 1 :]
    if size != shape[axis]:
        arrays = [lax.slice_in_dim(x, 0, shape[axis], axis=axis) for x in arrays]
    results = [
        x != 0 if v.dtype == np.bool_ else lax.bitcast_convert_type(x, v.dtype)
        for x, v in zip(arrays, values, strict=True)
    ]
    return [pairs.in_default_layout(composite, x) for x in results]


def _padded(x: Any, axis: int, size: int) -> Any:
    config = [(0, 0, 0)] * x.ndim
    config[axis] = (0, size - x.shape[axis], 0)
    return lax.pad(x, np.iinfo(x.dtype).max * np.ones((), x.dtype), config)


class _Network:
    """A network along an axis of a power of two elements.

    Args:
      axis: the axis.
      size: its size.
      n_keys: how many of the arrays are compared, the first ones, in lexicographic
        order. No two elements are equal.
    """

    def __init__(self, axis: int, size: int, n_keys: int):
        self._axis, self._size, self._n_keys = axis, size, n_keys

    def sort(self, arrays: list[Any]) -> list[Any]:
        """Returns the arrays, sorted."""
        block = 2
        while block <= self._size:
            distance = block // 2
            while distance:
                arrays = self._step(arrays, block, distance)
                distance //= 2
            block *= 2
        return arrays

    def _step(self, arrays: list[Any], block: int, distance: int) -> list[Any]:
        index = lax.broadcasted_iota(np.int32, arrays[0].shape, self._axis)
        others = [pairs.partner(x, self._axis, distance) for x in arrays]
        follows = self._less(others[: self._n_keys], arrays[: self._n_keys])
        # The first of a pair keeps the smaller one where the block ascends.
        is_second = (index & distance) != 0
        if block < self._size:
            is_second = is_second != ((index & block) != 0)
        takes = follows != is_second
        return [
            jnp.where(takes, other, x) for other, x in zip(others, arrays, strict=True)
        ]

    def _less(self, a: Sequence[Any], b: Sequence[Any]) -> Any:
        """Whether elements are less than others, in lexicographic order."""
        result = a[-1] < b[-1]
        for x, y in zip(a[-2::-1], b[-2::-1], strict=True):
            result = (x < y) | ((x == y) & result)
        return result

# SPDX-License-Identifier: Apache-2.0
"""Operations across the lanes of a register: scans, counts, sorts, masks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import errors, expect
from pallas_gpu.sparsecore.primitives._define import (
    WORDS,
    array_type,
    define,
    mask_of,
    same_shape,
    vector,
)

__all__ = [
    "all_reduce_ffs",
    "all_reduce_population_count",
    "cummax",
    "cummin",
    "cumsum",
    "scan_count",
    "sort_key_val",
]


masked_scan_p = define(
    "masked_scan", "scans", results=lambda x, *_, kind: [array_type(x.shape, x.dtype)]
)
scan_count_p = define(
    "scan_count",
    "scans",
    results=lambda x, *_: [array_type(x.shape, t) for t in (jnp.int32, jnp.bool_)],
)
mask_reduce_p = define(
    "mask_reduce",
    "scans",
    results=lambda x, *, kind, reduce: [array_type((x.size // reduce,), jnp.int32)],
)
sort_key_val_p = define(
    "sort_key_val",
    "scans",
    results=lambda *xs, descending: [array_type(x.shape, x.dtype) for x in xs],
)


@expect.arguments(x=expect.anything, mask=expect.anything)
def cumsum(x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
    """Returns the sums of all lanes up to each one.

    Issued by: a vector subcore.

    Args:
      x: a vector of int32, uint32 or float32.
      mask: bools: other lanes count as 0; lanes before the first true one are
        undefined.

    Returns:
      A vector of that size and type.

    Raises:
      ShapeError, DTypeError: another shape or type of `x` or the mask.
    """
    return _scan(x, mask, "cumsum", "sum")


@expect.arguments(x=expect.anything, mask=expect.anything)
def cummax(x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
    """Returns the maxima of all lanes up to each one.

    Issued by: a vector subcore.

    Args:
      x: a vector of int32, uint32 or float32.
      mask: bools: other lanes do not count; lanes before the first true one are
        undefined.

    Returns:
      A vector of that size and type.

    Raises:
      ShapeError, DTypeError: another shape or type of `x` or the mask.
    """
    return _scan(x, mask, "cummax", "max")


@expect.arguments(x=expect.anything, mask=expect.anything)
def cummin(x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
    """Returns the minima of all lanes up to each one.

    Issued by: a vector subcore.

    Args:
      x, mask: as of `cummax`.

    Returns:
      A vector of that size and type.

    Raises:
      As `cummax`.
    """
    return _scan(x, mask, "cummin", "min")


def _scan(x: Any, mask: Any, who: str, kind: str) -> jax.Array:
    x = vector(x, who, "the operand", WORDS)
    mask = mask_of(mask, x.shape, who)
    (result,) = masked_scan_p.bind(x, *([] if mask is None else [mask]), kind=kind)
    return result


@expect.arguments(x=expect.anything, mask=expect.anything)
def scan_count(
    x: jax.Array, mask: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Counts, for each lane, the lanes up to it with the same value.

    Issued by: a vector subcore.

    Args:
      x: a vector of int32, uint32 or float32.
      mask: bools: other lanes do not count; None: all count.

    Returns:
      The counts as int32: 1 at the first occurrence of a value; and a mask of the last
      occurrences.

    Raises:
      ShapeError, DTypeError: another shape or type of `x` or the mask.
    """
    x = vector(x, "scan_count", "the operand", WORDS)
    mask = mask_of(mask, x.shape, "scan_count")
    counts, last = scan_count_p.bind(
        x, jnp.ones(x.shape, bool) if mask is None else mask
    )
    return counts, last


@expect.arguments(x=expect.anything)
def all_reduce_population_count(x: jax.Array, *, reduce: int = 1) -> jax.Array:
    """Returns the number of true lanes, in every lane.

    Issued by: a vector subcore.

    Args:
      x: a vector of bools.
      reduce: the result has the size of `x` divided by this.

    Returns:
      A vector of int32.

    Raises:
      ShapeError, DTypeError: `x` is not a vector of bools.
      ArgumentError: `reduce` does not divide the size.
    """
    return _mask_reduce(x, reduce, "all_reduce_population_count", "population_count")


@expect.arguments(x=expect.anything)
def all_reduce_ffs(x: jax.Array, *, reduce: int = 1) -> jax.Array:
    """Returns the position of the first true lane, in every lane; the size without one.

    Issued by: a vector subcore.

    Args:
      x, reduce: as of `all_reduce_population_count`.

    Returns:
      A vector of int32.

    Raises:
      As `all_reduce_population_count`.
    """
    return _mask_reduce(x, reduce, "all_reduce_ffs", "ffs")


def _mask_reduce(x: Any, reduce: int, who: str, kind: str) -> jax.Array:
    x = vector(x, who, "the operand", (jnp.bool_,))
    if reduce < 1 or x.size % reduce:
        raise errors.ArgumentError(
            f"{who}: reduce does not divide the number of lanes",
            expected=f"a divisor of {x.size}",
            got=reduce,
            hint="leave it out",
        )
    (result,) = mask_reduce_p.bind(x, kind=kind, reduce=reduce)
    return result


@expect.arguments(keys=expect.anything, values=expect.anything, mask=expect.anything)
def sort_key_val(
    keys: jax.Array,
    values: jax.Array,
    *,
    mask: jax.Array | None = None,
    descending: bool = False,
) -> tuple[jax.Array, ...]:
    """Sorts the lanes of two registers by the first one; equal keys keep their order.

    Issued by: a vector subcore.

    Args:
      keys: a register of int32, uint32 or float32.
      values: a register of 32-bit elements, of the same size.
      mask: bools: lanes that are false follow the others.
      descending: whether the largest key is first.

    Returns:
      Keys and values, and with a mask the sorted mask.

    Raises:
      ShapeError, DTypeError: another shape or type of an operand.

    Example:
      >>> keys, rows = plsc.sort_key_val(keys, rows, descending=True)
    """
    who = "sort_key_val"
    keys = vector(keys, who, "the keys", WORDS)
    values = vector(values, who, "the values", WORDS)
    same_shape(values, keys.shape, who, "the vector of values")
    mask = mask_of(mask, keys.shape, who)
    given = [keys, values] if mask is None else [keys, values, mask]
    return tuple(sort_key_val_p.bind(*given, descending=bool(descending)))

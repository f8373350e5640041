# SPDX-License-Identifier: Apache-2.0
"""Sparse left operands on the host: their stored elements and their metadata."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gpu import errors, expect
from pallas_gpu.layouts.tmem import sparsity as layouts
from pallas_gpu.types import values
from pallas_gpu.types.transforms import itemsize_bits

_ROWS = layouts.ROWS
_WIDTHS = (4, 8, 16, 32)


def _array(value: Any, what: str) -> Any:
    array = isinstance(value, (np.ndarray, jax.Array))
    if array and values.is_element_type(value.dtype):
        return value
    raise expect.wrong_type(
        what, "an array", "an array of numbers", value, "pass numpy.asarray(...)"
    )


@expect.arguments(meta=_array, operand_dtype=values.dtype)
def format_tcgen05_sparse_metadata(meta: Any, operand_dtype: Any) -> jax.Array:
    """Orders the metadata of a sparse operand as `tcgen05_mma` reads it.

    The result is copied to SMEM, and from there to tensor memory by
    `async_copy_sparse_metadata_to_tmem`. PTX ISA, tcgen05 "Sparse matrices".

    Args:
      meta: (M, K / 4, 2) uint2 array: the positions, ascending, of the two elements
        that are stored of each four along K, as `compress_2_of_4` returns them. Of
        4-bit operands (M, K / 8, 2), as `compress_4_of_8`, and of 32-bit ones
        (M, K / 2, 2), as `compress_1_of_2` returns them. M is a multiple of 128, or
        that of a product of 64 rows; the second dimension is a multiple of 32.
      operand_dtype: element type of the product's operands, of 4, 8, 16 or 32 bits.

    Returns:
      (M / 128, groups / 32, 128, 64) uint2 array; the groups are the second dimension
      of `meta`. For 64 rows it is (1, groups / 32, 128, 64), with each row twice.

    Raises:
      ShapeError, DTypeError: the metadata has another shape or type.
      UnsupportedError: no sparse instruction has operands of this type.

    Example:
      >>> stored, meta = plgpu.compress_2_of_4(a)
      >>> metadata = plgpu.format_tcgen05_sparse_metadata(meta, a.dtype)
    """
    who, bits = "format_tcgen05_sparse_metadata", itemsize_bits(operand_dtype)
    meta = jnp.asarray(meta)
    if bits not in _WIDTHS:
        raise errors.UnsupportedError(
            f"{who}: no sparse instruction has operands of this type",
            expected="a type of 4, 8, 16 or 32 bits",
            got=jnp.dtype(operand_dtype).name,
            hint="multiply a dense operand",
        )
    if meta.dtype != jnp.uint2:
        raise errors.DTypeError(
            f"{who}: the metadata has another type",
            expected="uint2",
            got=meta.dtype.name,
            hint="meta.astype(jnp.uint2)",
        )
    pair, tile = layouts.INDICES, layouts.TILE_INDICES
    rows = layouts.HALF_ROWS if meta.shape[:1] == (layouts.HALF_ROWS,) else _ROWS
    if meta.ndim != 3 or meta.shape[2] != pair or meta.shape[0] % rows or (
        meta.shape[1] * pair % tile
    ):  # fmt: skip
        group = layouts.group_of(bits)
        raise errors.ShapeError(
            f"{who}: the metadata has another shape",
            expected=f"(M, K / {group}, 2), M {layouts.HALF_ROWS} or a multiple of "
            f"{_ROWS}, K a multiple of {layouts.tile_k(bits)}",
            got=meta.shape,
            hint="pad the operand with zeros",
        )
    across, along = meta.shape[0] // rows, meta.shape[1] * pair // tile
    tiles = meta.reshape(across, rows, along, tile).swapaxes(1, 2)
    flat = tiles.reshape(across, along, rows * tile)
    return flat[..., layouts.order_of_tile(bits, rows)]


@expect.arguments(a=_array)
def compress_2_of_4(a: Any) -> tuple[np.ndarray, np.ndarray]:
    """Splits a 2:4 sparse matrix into its stored elements and their positions.

    So are left operands of 8 and 16 bits sparse. Runs on the host, in NumPy. Zeros are
    stored where fewer than two of four elements are not zero.

    Args:
      a: (M, K) array; K is a multiple of 4, and of each four elements along K at most
        two are not zero.

    Returns:
      (M, K / 2) stored elements, and (M, K / 4, 2) uint2 positions, ascending, for
      `format_tcgen05_sparse_metadata`.

    Raises:
      ShapeError: the matrix has another shape.
      ArgumentError: more than two of four elements are not zero.

    Example:
      >>> stored, meta = plgpu.compress_2_of_4(a)
    """
    stored, places = _compress("compress_2_of_4", a, units=4, size=1)
    return stored, places.astype(jnp.uint2)


@expect.arguments(a=_array)
def compress_1_of_2(a: Any) -> tuple[np.ndarray, np.ndarray]:
    """Splits a 1:2 sparse matrix into its stored elements and their positions.

    So are left operands of 32 bits, float32 read as tf32, sparse. Runs on the host, in
    NumPy.

    Args:
      a: (M, K) array; K is a multiple of 2, and of each two elements along K at most
        one is not zero.

    Returns:
      (M, K / 2) stored elements, and (M, K / 2, 2) uint2 positions of their halves, of
      four in each group: 0 and 1, or 2 and 3. They are for
      `format_tcgen05_sparse_metadata`.

    Raises:
      ShapeError: the matrix has another shape.
      ArgumentError: both of two elements are not zero.

    Example:
      >>> stored, meta = plgpu.compress_1_of_2(a)
    """
    stored, places = _compress("compress_1_of_2", a, units=2, size=1)
    return stored, (2 * places + np.arange(2)).astype(jnp.uint2)


@expect.arguments(a=_array)
def compress_4_of_8(a: Any) -> tuple[np.ndarray, np.ndarray]:
    """Splits a matrix that is sparse in pairs into stored elements and positions.

    So are left operands of 4 bits sparse: of each eight elements along K, four pairs of
    neighbours, two pairs are stored. Runs on the host, in NumPy. Zeros are stored where
    fewer than two of four pairs have an element that is not zero.

    Args:
      a: (M, K) array; K is a multiple of 8, and of each four pairs of elements along K
        at most two are not zero.

    Returns:
      (M, K / 2) stored elements, and (M, K / 8, 2) uint2 positions of their pairs,
      ascending, for `format_tcgen05_sparse_metadata`.

    Raises:
      ShapeError: the matrix has another shape.
      ArgumentError: more than two of four pairs are not zero.

    Example:
      >>> stored, meta = plgpu.compress_4_of_8(a)
    """
    stored, places = _compress("compress_4_of_8", a, units=4, size=2)
    return stored, places.astype(jnp.uint2)


def _compress(
    who: str, a: Any, *, units: int, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns stored elements and [M, groups, units / 2] positions of stored units.

    Args:
      who: the function, for messages.
      units: of a group, half of which are stored.
      size: elements of a unit.
    """
    a, group = np.asarray(a), units * size
    if a.ndim != 2 or a.shape[1] % group:
        raise errors.ShapeError(
            f"{who}: the matrix has another shape",
            expected=f"(M, K), K a multiple of {group}",
            got=a.shape,
            hint="pad K with zeros",
        )
    groups = a.reshape(a.shape[0], -1, units, size)
    kept = (groups != 0).any(axis=-1)
    crowded = np.argwhere(kept.sum(axis=-1) > units // 2)
    if len(crowded):
        row, number = crowded[0]
        one = "elements" if size == 1 else "pairs of elements"
        raise errors.ArgumentError(
            f"{who}: the matrix is not {group // 2}:{group} sparse",
            expected=f"at most {units // 2} of each {units} {one} along K not zero",
            got=f"row {row}, columns {group * number} to {group * number + group - 1}: "
            f"{groups[row, number].reshape(-1)}",
            hint="set the smaller elements to zero",
        )
    # Units that are not zero first, in order; then the first zeros.
    chosen = np.argsort(~kept, axis=-1, kind="stable")[..., : units // 2]
    places = np.sort(chosen, axis=-1)
    stored = np.take_along_axis(groups, places[..., None], axis=-2)
    return stored.reshape(a.shape[0], -1), places

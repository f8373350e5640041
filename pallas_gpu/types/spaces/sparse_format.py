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

_GROUP, _STORED = layouts.GROUP, layouts.STORED


def _array(value: Any, what: str) -> Any:
    array = isinstance(value, np.ndarray | jax.Array)
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
        that are stored of each four along K. M and K are multiples of 128.
      operand_dtype: element type of the product's operands, of 8 or 16 bits.

    Returns:
      (M / 128, K / 128, 128, 64) uint2 array.

    Raises:
      ShapeError, DTypeError: the metadata has another shape or type.
      UnsupportedError: no sparse instruction has operands of this type.

    Example:
      >>> stored, meta = plgpu.compress_2_of_4(a)
      >>> metadata = plgpu.format_tcgen05_sparse_metadata(meta, a.dtype)
    """
    who, bits = "format_tcgen05_sparse_metadata", itemsize_bits(operand_dtype)
    meta = jnp.asarray(meta)
    if bits not in (8, 16):
        raise errors.UnsupportedError(
            f"{who}: no sparse instruction has operands of this type",
            expected="a type of 8 or 16 bits",
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
    rows, tile = layouts.ROWS, layouts.TILE_K
    groups = tile // _GROUP
    if meta.ndim != 3 or meta.shape[2] != _STORED or meta.shape[0] % rows or (
        meta.shape[1] % groups
    ):  # fmt: skip
        raise errors.ShapeError(
            f"{who}: the metadata has another shape",
            expected="(M, K / 4, 2), M and K multiples of 128",
            got=meta.shape,
            hint="pad the operand with zeros",
        )
    across, along = meta.shape[0] // rows, meta.shape[1] // groups
    tiles = meta.reshape(across, rows, along, groups * _STORED).swapaxes(1, 2)
    flat = tiles.reshape(across, along, rows * groups * _STORED)
    return flat[..., layouts.order_of_tile(bits)]


@expect.arguments(a=_array)
def compress_2_of_4(a: Any) -> tuple[np.ndarray, np.ndarray]:
    """Splits a 2:4 sparse matrix into its stored elements and their positions.

    Runs on the host, in NumPy. Zeros are stored where fewer than two of four elements
    are not zero.

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
    a = np.asarray(a)
    if a.ndim != 2 or a.shape[1] % _GROUP:
        raise errors.ShapeError(
            "compress_2_of_4: the matrix has another shape",
            expected=f"(M, K), K a multiple of {_GROUP}",
            got=a.shape,
            hint="pad K with zeros",
        )
    groups = a.reshape(a.shape[0], -1, _GROUP)
    kept = groups != 0
    crowded = np.argwhere(kept.sum(axis=-1) > _STORED)
    if len(crowded):
        row, group = crowded[0]
        raise errors.ArgumentError(
            "compress_2_of_4: the matrix is not 2:4 sparse",
            expected="at most two of each four elements along K are not zero",
            got=f"row {row}, columns {_GROUP * group} to {_GROUP * group + 3}: "
            f"{groups[row, group]}",
            hint="set the smaller elements to zero",
        )
    # Elements that are not zero first, in order; then the first zeros.
    chosen = np.argsort(~kept, axis=-1, kind="stable")[..., :_STORED]
    places = np.sort(chosen, axis=-1)
    stored = np.take_along_axis(groups, places, axis=-1).reshape(a.shape[0], -1)
    return stored, places.astype(jnp.uint2)

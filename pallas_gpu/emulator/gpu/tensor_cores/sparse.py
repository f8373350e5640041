# SPDX-License-Identifier: Apache-2.0
"""Sparse left operands: the dense matrix that stored elements and metadata are."""

from __future__ import annotations

import numpy as np

from pallas_gpu import errors
from pallas_gpu.layouts.tmem import sparsity as layouts
from pallas_gpu.types.transforms import itemsize_bits

_GROUP, _STORED = layouts.GROUP, layouts.STORED


def expand(stored: np.ndarray, metadata: np.ndarray) -> np.ndarray:
    """Returns the (M, K) matrix.

    Args:
      stored: (M, K / 2) elements.
      metadata: (M, K / 2) indices in the order of TMEM.

    Raises:
      KernelError: PTX does not define what the indices select.
    """
    rows, width = stored.shape
    places = _places(metadata, itemsize_bits(stored.dtype))
    places = places.reshape(rows, -1, _STORED)
    undefined = np.argwhere(places[..., 0] >= places[..., 1])
    if len(undefined):
        row, group = undefined[0]
        raise errors.KernelError(
            "tcgen05_mma: the metadata of a sparse operand is undefined",
            expected="two ascending positions in each group of four elements",
            got=f"{places[row, group]} in row {row}, columns {_GROUP * group} to "
            f"{_GROUP * group + 3}",
            hint="order it with plgpu.format_tcgen05_sparse_metadata, of the type of "
            "the operands",
        )
    dense = np.zeros((rows, width // _STORED, _GROUP), stored.dtype)
    values = stored.reshape(places.shape)
    np.put_along_axis(dense, places, values, axis=-1)
    return dense.reshape(rows, -1)


def _places(metadata: np.ndarray, bits: int) -> np.ndarray:
    """The indices in the order of rows and of K."""
    width = layouts.TILE_K // _STORED
    rows, tiles = metadata.shape[0], metadata.shape[1] // width
    split = metadata.astype(np.int64).reshape(rows, tiles, width).swapaxes(0, 1)
    ordered = np.empty((tiles, rows * width), np.int64)
    ordered[:, layouts.order_of_tile(bits).reshape(-1)] = split.reshape(tiles, -1)
    return ordered.reshape(tiles, rows, width).swapaxes(0, 1).reshape(rows, -1)

# SPDX-License-Identifier: Apache-2.0
"""Sparse left operands: the dense matrix that stored elements and metadata are."""

from __future__ import annotations

import numpy as np

from pallas_gpu import errors
from pallas_gpu.layouts.tmem import sparsity as layouts
from pallas_gpu.types.transforms import itemsize_bits

_UNITS, _INDICES = layouts.UNITS, layouts.INDICES


def expand(stored: np.ndarray, metadata: np.ndarray, half: int = 0) -> np.ndarray:
    """Returns the (M, K) matrix.

    Args:
      stored: (M, K / 2) elements.
      metadata: (128, indices of K) in the order of TMEM.
      half: of 64 rows the half of N, for which the metadata has lanes of its own.
    """
    rows, bits = stored.shape[0], itemsize_bits(stored.dtype)
    group = layouts.group_of(bits)
    metadata = metadata[layouts.lanes_of(rows, half)]
    places = _places(metadata, bits).reshape(rows, -1, _INDICES)
    undefined = places[..., 0] >= places[..., 1]
    # Of two elements one is stored, with both of its halves.
    whole = group < _UNITS
    if whole:
        undefined |= (places[..., 0] % 2 == 1) | (places[..., 1] != places[..., 0] + 1)
    wrong = np.argwhere(undefined)
    if len(wrong):
        row, number = wrong[0]
        raise errors.KernelError(
            "tcgen05_mma: the metadata of a sparse operand is undefined",
            expected="positions 0 and 1, or 2 and 3, in each group of two elements"
            if whole
            else f"two ascending positions in each group of {group} elements",
            got=f"{places[row, number]} in row {row}, columns {group * number} to "
            f"{group * number + group - 1}",
            hint="order it with plgpu.format_tcgen05_sparse_metadata, of the type of "
            "the operands, from as many rows as a has",
        )
    if whole:
        dense = np.zeros((*places.shape[:2], group), stored.dtype)
        first = places[..., :1] // 2
        np.put_along_axis(dense, first, stored[..., None], axis=-1)
    else:
        values = stored.reshape(*places.shape, group // _UNITS)
        dense = np.zeros((*places.shape[:2], _UNITS, values.shape[-1]), stored.dtype)
        np.put_along_axis(dense, places[..., None], values, axis=-2)
    return dense.reshape(rows, -1)


def _places(metadata: np.ndarray, bits: int) -> np.ndarray:
    """The indices, which are in the order of M = 128, in that of rows and of K."""
    width = layouts.TILE_INDICES
    rows, tiles = metadata.shape[0], metadata.shape[1] // width
    split = metadata.astype(np.int64).reshape(rows, tiles, width).swapaxes(0, 1)
    ordered = np.empty((tiles, rows * width), np.int64)
    order = layouts.order_of_tile(bits)[:rows].reshape(-1)
    ordered[:, order] = split.reshape(tiles, -1)
    return ordered.reshape(tiles, rows, width).swapaxes(0, 1).reshape(rows, -1)

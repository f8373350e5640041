# SPDX-License-Identifier: Apache-2.0
"""tcgen05 products of several tiles of M: an accumulator for each, in one array.

TMEM has 128 lanes, so an accumulator of more rows lies in several ranges of columns:
those of an array of three dimensions, whose first one counts the tiles.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_gpu import errors, types
from pallas_gpu.layouts.tmem.sparsity import ROWS
from pallas_gpu.primitives import _operands as ops


@dataclasses.dataclass(frozen=True)
class Tile:
    """The operands of a product that depend on its rows.

    Attributes:
      acc: (M, N).
      a: (M, K).
      a_scale, metadata: of these rows, or None.
    """

    acc: Any
    a: Any
    a_scale: Any
    metadata: Any


def split(acc: Any, a: Any, a_scale: Any, metadata: Any) -> list[Tile]:
    """Returns the tiles of a product, in the order of the rows.

    Args:
      acc: (tiles, M, N); with two dimensions it is the only tile.
      a: (tiles * M, K) or (tiles, M, K).
      a_scale: (tiles, M, columns), or None.
      metadata: (tiles, 128, columns), or None.
    """
    if len(acc.shape) != 3:
        return [Tile(acc, a, a_scale, metadata)]
    count, rows = tuple(acc.shape)[:2]
    given = {"a": a, "a_scale": a_scale, "a_sparse_metadata": metadata}
    for name, ref in given.items():
        if ref is None:
            continue
        ops.require_ref(ref, "tcgen05_mma", name)
        high = ROWS if name == "a_sparse_metadata" else rows
        if not _has_tiles(ref, count, high, name):
            raise errors.ShapeError(
                f"tcgen05_mma: {name} does not have the tiles of the accumulator",
                expected=f"{count} tiles of {high} rows: ({count}, {high}, columns)"
                + (f" or ({count * rows}, K)" if name == "a" else ""),
                got=f"{name} {tuple(ref.shape)}, acc {tuple(acc.shape)}",
                hint="declare one tile for each of the accumulator, or pass acc.at[i] "
                "for a product of one tile",
            )
    return [
        Tile(*(_tile(ref, i, rows) for ref in (acc, a, a_scale, metadata)))
        for i in range(count)
    ]


def _has_tiles(ref: Any, count: int, rows: int, name: str) -> bool:
    shape = tuple(ref.shape)
    if len(shape) == 3:
        return shape[:2] == (count, rows)
    return name == "a" and len(shape) == 2 and shape[0] == count * rows


def _tile(ref: Any, number: int, rows: int) -> Any:
    if ref is None:
        return None
    view = types.as_view(ref)
    if len(view.shape) == 3:
        return view.at[number]
    return view.at[number * rows : (number + 1) * rows]

# SPDX-License-Identifier: Apache-2.0
"""Coordinates of elements when an array is reshaped, row-major; padding stays padding.

The axes of two shapes of one size correspond in groups, the smallest runs of axes with
equal products: (6, 4) and (2, 3, 2, 2) in (6 | 4) and (2, 3 | 2, 2). Within a group
only the first axis may be padded: the row-major index of its padding is beyond the
group.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts.reshaped import groups
from pallas_gpu.layouts.window import row_major_strides


def flatten(coordinates: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The row-major indices of coordinates [..., rank]."""
    return coordinates @ np.array(row_major_strides(shape), dtype=np.int64)


def reshaped(
    coordinates: np.ndarray,
    old: Sequence[int],
    new: Sequence[int],
    padded: Sequence[int] = (),
) -> np.ndarray:
    """The coordinates of the same elements in another shape.

    Args:
      coordinates: integers [..., rank].
      old, new: shapes with equally many elements.
      padded: axes along which coordinates exceed `old`.

    Raises:
      LayoutError: the reshape merges a padded axis into one that precedes it.
    """
    result = np.zeros((*coordinates.shape[:-1], len(new)), dtype=np.int64)
    left, right = ([a for a, n in enumerate(x) if n != 1] for x in (old, new))
    for i, j in groups([old[a] for a in left], [new[a] for a in right]):
        before, after = [left[a] for a in i], [right[a] for a in j]
        _require_mergeable(old, new, before, padded)
        flat = flatten(coordinates[..., list(before)], [old[a] for a in before])
        # The quotient by all but the first axis is not bounded: padding exceeds it too.
        for axis in reversed(after[1:]):
            flat, result[..., axis] = np.divmod(flat, new[axis])
        if after:
            result[..., after[0]] = flat
    return result


def _require_mergeable(
    old: Sequence[int], new: Sequence[int], group: list[int], padded: Sequence[int]
) -> None:
    wrong = [a for a in group[1:] if a in padded]
    if wrong:
        raise LayoutError(
            "a reshape merges a padded axis with the one before it",
            expected="a layout that distributes the elements without padding along "
            f"axes {tuple(wrong)}",
            got=f"shape {tuple(old)} to {tuple(new)}",
            hint="reshape a reference instead, or store the array and load it again",
        )

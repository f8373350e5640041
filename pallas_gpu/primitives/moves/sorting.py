# SPDX-License-Identifier: Apache-2.0
"""A sorting network as one operation: what sorts become. It is not public."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from pallas_gpu.primitives import _registry as registry

sort_network_p = registry.define(
    "sort_network",
    "sorting",
    results=lambda *avals, **_: [jax.core.ShapedArray(x.shape, x.dtype) for x in avals],
)


def sort_network(arrays: Sequence[Any], axis: int, n_keys: int) -> list[Any]:
    """Sorts arrays of unsigned integers of one shape along an axis.

    Args:
      arrays: the first ones are the keys. Elements whose keys are all equal may change
        places.
      axis: its size is a power of two.
      n_keys: number of the arrays that are compared, in lexicographic order.
    """
    return sort_network_p.bind(*arrays, axis=axis, n_keys=n_keys)

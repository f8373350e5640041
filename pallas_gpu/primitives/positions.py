# SPDX-License-Identifier: Apache-2.0
"""Elements of values at positions that are values: what gathers and scatters become.

A position counts the elements of an array in row-major order. These operations are not
public: lax's gathers and scatters are composites of them.
"""

from __future__ import annotations

from typing import Any

import jax

from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry

gather_positions_p = registry.define(
    "gather_positions",
    "positions",
    result=lambda operands, **_: jax.core.ShapedArray(
        operands["index"].shape, operands["x"].dtype
    ),
)
scatter_positions_p = registry.define(
    "scatter_positions",
    "positions",
    result=lambda operands, **_: jax.core.ShapedArray(
        operands["x"].shape, operands["x"].dtype
    ),
)


def gather_positions(x: Any, index: Any, fill: Any) -> Any:
    """Returns the elements of an array at positions."""
    operands = {"x": x, "index": index, "fill": fill}
    return ops.bind(gather_positions_p, operands)


def scatter_positions(
    kind: str, x: Any, index: Any, updates: Any, *, unique: bool
) -> Any:
    """Returns an array with elements at positions updated.

    Args:
      kind: `set`, `add`, `mul`, `max` or `min`.
      x: the array, of rank 1 or more.
      index: int32, of the shape of `updates`; what is outside of the array is dropped.
      updates: of the dtype of `x`, of rank 1 or more.
      unique: no two positions within the array are equal. Otherwise the updates of an
        element are applied in their row-major order.
    """
    operands = {"x": x, "index": index, "updates": updates}
    return ops.bind(scatter_positions_p, operands, kind=kind, unique=unique)

# SPDX-License-Identifier: Apache-2.0
"""Clusters: their barrier, asynchronous stores to the SMEM of another CTA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pallas_gpu.emitters import cluster
from pallas_gpu.layouts import LinearLayout
from pallas_gpu.layouts.registers.defaults import word_layout
from pallas_gpu.layouts.registers.placement import (
    Placement,
    default_placement,
    uniform_length,
)
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families import indexed
from pallas_gpu.lowering.inference.collect import Node
from pallas_gpu.lowering.rules import emits_and_relates
from pallas_gpu.primitives.cluster import (
    WORD_BYTES,
    async_store_smem_p,
)


def _word_layout(
    shape: tuple[int, ...], dtype: np.dtype, adjacent: Sequence[int] | None
) -> Placement | None:
    """Returns the layout for narrow elements whose default layout has no whole words.

    None where the default layout, or any other, has them.

    Args:
      adjacent: see `indexed.Elements`.
    """
    together = WORD_BYTES // dtype.itemsize
    if together <= 1 or not shape or adjacent is None:
        return None
    axis = adjacent[0]
    default = default_placement(shape, 8 * dtype.itemsize)
    if (
        isinstance(default, LinearLayout)
        and default.vector_axis == axis
        and uniform_length(default) % together == 0
    ):
        return None
    return word_layout(shape, axis, together)


@emits_and_relates(async_store_smem_p)
def _store(
    on: RuleContext | Node, *invals: Any, shape, dtype, adjacent, atomic, sem
) -> None:
    words = _word_layout(shape, np.dtype(dtype), adjacent)
    if isinstance(on, Node):
        indexed.related_access(on, "ref", "value", fixed=words)
        return
    elements, (value,), placement = indexed.placed_access(
        on, invals, "ref", "value", default=words
    )
    barrier = on.view(on.operands(invals)["barrier"])
    cluster.store_async(elements, placement, value, barrier, atomic, sem)

# SPDX-License-Identifier: Apache-2.0
"""Sorting networks, of bodies that are expanded: otherwise lax's own sort runs."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.moves.sorting import sort_network_p


@registry.register(sort_network_p, registry.RuleKind.EMULATE)
def _sort_network(*arrays: Any, axis: int, n_keys: int) -> list[Any]:
    order = np.lexsort(arrays[:n_keys][::-1], axis=axis)
    return [np.take_along_axis(np.asarray(x), order, axis) for x in arrays]

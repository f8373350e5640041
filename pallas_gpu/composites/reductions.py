# SPDX-License-Identifier: Apache-2.0
"""Reductions that consist of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gpu.entry.expand import Composite, composite


def _position_of(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """The first position of what a reduction gives; NaN exceeds everything."""

    def rule(composite: Composite, x: Any) -> Any:
        (axis,) = composite.params["axes"]
        found = jnp.expand_dims(reduce(x, axes=(axis,)), axis)
        # If there is a NaN, the reduction gives it, and it equals nothing.
        candidate = (x == found) | (x != x)
        last = np.int32(x.shape[axis] - 1)
        position = lax.broadcasted_iota(np.int32, x.shape, axis)
        first = lax.reduce_min(jnp.where(candidate, position, last), axes=(axis,))
        return first.astype(composite.params["index_dtype"])

    return rule


composite("argmax")(_position_of(lax.reduce_max))
composite("argmin")(_position_of(lax.reduce_min))

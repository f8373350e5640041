# SPDX-License-Identifier: Apache-2.0
"""Operations on shapes that consist of concatenations, broadcasts and reshapes."""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_gpu.entry.expand import Composite, composite


@composite("stack")
def _stack(composite: Composite, *arrays: Any) -> Any:
    axis = composite.params["axis"]
    return lax.concatenate([jnp.expand_dims(x, axis) for x in arrays], axis)


@composite("tile")
def _tile(composite: Composite, x: Any) -> Any:
    """Each axis is preceded by one for its copies."""
    reps = composite.params["reps"]
    shape = tuple(itertools.chain(*zip(reps, x.shape, strict=True)))
    copies = lax.broadcast_in_dim(x, shape, tuple(range(1, len(shape), 2)))
    return copies.reshape(composite.out_aval.shape)


@composite("unstack")
def _unstack(composite: Composite, x: Any) -> Any:
    axis = composite.params["axis"]
    parts = lax.split(x, (1,) * x.shape[axis], axis)
    return [lax.squeeze(part, [axis]) for part in parts]

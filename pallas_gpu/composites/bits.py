# SPDX-License-Identifier: Apache-2.0
"""Conversions of bits to elements of another width: an axis more, or one less."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gpu import _jax, types
from pallas_gpu.composites.functions import unsigned
from pallas_gpu.entry.expand import Composite, composite

_bits = types.itemsize_bits


def _changes_width(eqn: _jax.JaxprEqn) -> bool:
    before, after = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return _bits(before) != _bits(after)


@composite("bitcast_convert_type", when=_changes_width)
def _bitcast(composite: Composite, x: Any) -> Any:
    """The first part of an element is its lowest bits."""
    wanted = composite.out_aval
    width = np.dtype(f"uint{_bits(wanted.dtype)}")
    own = unsigned(x)
    if _bits(wanted.dtype) < _bits(x.dtype):
        distances = _distances(own.dtype, wanted.shape, _bits(wanted.dtype))
        parts = jnp.broadcast_to(own[..., None], wanted.shape) >> distances
        return lax.bitcast_convert_type(parts.astype(width), wanted.dtype)
    distances = _distances(width, x.shape, _bits(x.dtype))
    last = len(x.shape) - 1
    joined = lax.reduce_or(own.astype(width) << distances, axes=(last,))
    return lax.bitcast_convert_type(joined, wanted.dtype)


def _distances(dtype: Any, shape: tuple[int, ...], bits: int) -> Any:
    parts = lax.broadcasted_iota(dtype, shape, len(shape) - 1)
    return parts * np.asarray(bits, dtype)

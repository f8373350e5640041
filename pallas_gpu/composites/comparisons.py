# SPDX-License-Identifier: Apache-2.0
"""Comparisons of floats in their total order: -NaN, -inf, -0, +0, inf, NaN."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_gpu.entry.expand import Composite, composite


def _rank(x: Any) -> Any:
    """An integer that is ordered as the floats are, from their bits."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    bits = 8 * x.dtype.itemsize
    signed = lax.bitcast_convert_type(x, jnp.dtype(f"int{bits}"))
    most = signed.dtype.type((1 << (bits - 1)) - 1)
    return jnp.where(signed < 0, signed ^ most, signed)


@composite("le_to")
def _le_to(composite: Composite, a: Any, b: Any) -> Any:
    return _rank(a) <= _rank(b)


@composite("lt_to")
def _lt_to(composite: Composite, a: Any, b: Any) -> Any:
    return _rank(a) < _rank(b)


@composite("eq_to")
def _eq_to(composite: Composite, a: Any, b: Any) -> Any:
    return _rank(a) == _rank(b)

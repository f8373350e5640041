# SPDX-License-Identifier: Apache-2.0
"""Weights of 8 and 4 bits as 16-bit floats: exact, two elements at a time.

The bits of a small integer are or-ed into the mantissa of a float whose last bit counts
one, and that float is subtracted. Two neighbours of a row in memory become two halves
of a 32-bit register, as the tensor core's operands in registers hold them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_INT8, _INT4 = jnp.dtype(jnp.int8), jnp.dtype(jnp.int4)
# 16-bit floats whose last bit of the mantissa counts one: 2**7 and 2**10.
_ONES = {jnp.dtype(jnp.bfloat16): 0x4300, jnp.dtype(jnp.float16): 0x6400}
# The array in memory as units of two elements.
_UNITS = {_INT8: jnp.uint16, _INT4: jnp.uint8}


def unit_type(dtype: Any) -> jnp.dtype:
    """The type of what two weights are in memory; an 8-bit float's is its own."""
    return jnp.dtype(_UNITS.get(jnp.dtype(dtype), dtype))


def widen(units: Any, stored: Any, dtype: Any) -> jax.Array:
    """Loads a matrix of weights and converts it.

    Args:
      units: SMEM reference (rows, units) of `unit_type(stored)`.
      stored: type of the weights: int8, int4 or an 8-bit float.
      dtype: bfloat16 or float16.

    Returns:
      (rows, columns) of `dtype`, the same numbers.
    """
    dtype, stored = jnp.dtype(dtype), jnp.dtype(stored)
    if stored not in _UNITS:
        return units[...].astype(dtype)
    bits = units[...].astype(jnp.uint32)
    pairs = _from_int8(bits, dtype) if stored == _INT8 else _from_int4(bits, dtype)
    return pairs.reshape(units.shape[0], 2 * units.shape[1])


def _both(half: int) -> Any:
    """A constant in both halves of a register."""
    return np.uint32(half * 0x10001)


def _halves(bits: jax.Array, dtype: Any) -> jax.Array:
    return lax.bitcast_convert_type(bits, dtype)


def _from_int8(units: jax.Array, dtype: Any) -> jax.Array:
    """Pairs of int8 in 16 bits each."""
    one = _ONES[dtype]
    spread = units | units << np.uint32(8)
    if dtype == jnp.float16:
        # The sign's bit flipped is the number plus 128; 1024 + 128 is exact.
        raised = _halves(spread & _both(0xFF) ^ _both(one | 0x80), dtype)
        return raised - np.array(1024 + 128, dtype)
    # bfloat16 has 7 bits of mantissa: of 128 plus the lower bits, 128 is subtracted,
    # or 256 for a negative number: the sign's bit is the last one of the exponent.
    raised = _halves(spread & _both(0x7F) | _both(one), dtype)
    return raised - _halves(spread & _both(0x80) | _both(one), dtype)


def _from_int4(units: jax.Array, dtype: Any) -> jax.Array:
    """Pairs of int4 in a byte each."""
    one = _ONES[dtype]
    spread = (units | units << np.uint32(12)) & _both(0xF)
    # The sign's bit flipped is the number plus 8.
    raised = _halves(spread ^ _both(one | 8), dtype)
    return raised - np.array((128 if dtype == jnp.bfloat16 else 1024) + 8, dtype)


def bits(dtype: Any) -> int:
    """The bits of a weight."""
    return 4 if jnp.dtype(dtype) == _INT4 else 8


def scaled(weights: jax.Array, scales: Any) -> jax.Array:
    """Multiplies weights by the scales of their groups, rounded to the weights' type.

    Args:
      weights: (rows, columns), float16 or bfloat16.
      scales: SMEM reference (groups, rows), of all columns in order.
    """
    groups, _ = scales.shape
    columns = weights.shape[1] // groups
    parts = []
    for i in range(groups):
        scale = scales[i].astype(weights.dtype)
        part = weights[:, i * columns : (i + 1) * columns]
        parts.append(part * lax.broadcast_in_dim(scale, part.shape, (0,)))
    return lax.concatenate(parts, 1) if groups > 1 else parts[0]

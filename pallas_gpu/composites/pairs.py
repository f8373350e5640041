# SPDX-License-Identifier: Apache-2.0
"""Pairs of elements whose indices along an axis differ in one bit.

A thread gets its partners by reducing pairs to their exclusive or: within registers, or
by shuffles. So the exchange needs a layout that splits at every power of two.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gpu import types
from pallas_gpu.entry.expand import Composite
from pallas_gpu.layouts.registers.defaults import default_layout
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives.registers import layout_cast_p


def raised(size: int) -> int:
    """Returns the next power of two."""
    return 1 << (size - 1).bit_length()


def partner(x: Any, axis: int, distance: int) -> Any:
    """Returns for each element the one whose index differs in a bit.

    Args:
      x: unsigned integers.
      axis: an axis of a power of two elements.
      distance: the bit, a power of two.
    """
    shape = x.shape
    pairs = (shape[axis] // (2 * distance), 2, distance)
    split = lax.reshape(x, (*shape[:axis], *pairs, *shape[axis + 1 :]))
    both = lax.reduce_xor(split, axes=(axis + 1,))
    both = jnp.broadcast_to(jnp.expand_dims(both, axis + 1), split.shape)
    return lax.reshape(split ^ both, shape)


def in_default_layout(composite: Composite, x: Any) -> Any:
    """Returns a result in the layout of loads, if layouts are not inferred."""
    if composite.kernel.semantics is not types.LoweringSemantics.Lane or not x.shape:
        return x
    bits = 8 * np.dtype(x.dtype).itemsize
    layout = default_layout(x.shape, bits, composite.kernel.threads)
    return ops.bind(layout_cast_p, x, layout=layout)

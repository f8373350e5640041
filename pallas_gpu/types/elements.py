# SPDX-License-Identifier: Apache-2.0
"""The element types that kernels support, and the kind of arithmetic of each."""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from pallas_gpu import errors

Kind = Literal["float", "signed", "unsigned", "bool", "float8", "float4", "exponent"]

KINDS: dict[np.dtype, Kind] = {
    np.dtype(np.bool_): "bool",
    **dict.fromkeys((np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)), "signed"),
    **dict.fromkeys((np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)), "unsigned"),
    **dict.fromkeys(map(np.dtype, (jnp.int4, jnp.int2)), "signed"),
    **dict.fromkeys(map(np.dtype, (jnp.uint4, jnp.uint2)), "unsigned"),
    **dict.fromkeys(
        map(np.dtype, (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)), "float"
    ),
    **dict.fromkeys(map(np.dtype, (jnp.float8_e4m3fn, jnp.float8_e5m2)), "float8"),
    np.dtype(jnp.float4_e2m1fn): "float4",
    # A power of two: the scale of a block of narrow floats.
    np.dtype(jnp.float8_e8m0fnu): "exponent",
}


@functools.cache
def kind(dtype: Any) -> Kind:
    """Returns the kind of arithmetic of a dtype."""
    found = KINDS.get(dtype)
    if found is None:
        raise errors.DTypeError(
            "Kernels do not support this element type",
            expected="bool, (u)int2 to (u)int64, bfloat16, float16 to float64, "
            "float8_e4m3fn, float8_e5m2, float8_e8m0fnu, float4_e2m1fn",
            got=dtype,
            hint=COMPLEX_PARTS
            if is_complex(dtype)
            else "convert the array outside the kernel",
        )
    return found


# What to write for a complex array: a GPU has no instructions for it.
COMPLEX_PARTS = (
    "pass the real and the imaginary part as two arrays: jnp.real(z), jnp.imag(z)"
)


def is_complex(dtype: Any) -> bool:
    """Whether the elements are complex numbers."""
    return jnp.issubdtype(dtype, jnp.complexfloating)


@functools.cache
def stored_bits(dtype: Any) -> int:
    """Returns the width in bits of an element in memory; a bool takes a byte.

    XLA passes arrays of 2-bit and 4-bit elements packed, as `E(4)` in the layouts of
    its HLO says: element i of the row-major array takes bits 4i to 4i + 3, whatever the
    rows' length, and bits after the last element are undefined.
    """
    if dtype == np.bool_:
        return 8
    is_float = jnp.issubdtype(dtype, jnp.floating)
    return int((jnp.finfo if is_float else jnp.iinfo)(dtype).bits)

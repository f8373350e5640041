# SPDX-License-Identifier: Apache-2.0
"""The element types that kernels support, and the kind of arithmetic of each."""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from pallas_gpu import errors

Kind = Literal["float", "signed", "unsigned", "bool", "float8", "exponent"]

KINDS: dict[np.dtype, Kind] = {
    np.dtype(np.bool_): "bool",
    **dict.fromkeys((np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)), "signed"),
    **dict.fromkeys((np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)), "unsigned"),
    **dict.fromkeys(
        map(np.dtype, (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)), "float"
    ),
    **dict.fromkeys(map(np.dtype, (jnp.float8_e4m3fn, jnp.float8_e5m2)), "float8"),
    # A power of two: the scale of a block of narrow floats.
    np.dtype(jnp.float8_e8m0fnu): "exponent",
}


@functools.cache
def kind(dtype: Any) -> Kind:
    """Returns the kind of arithmetic of a dtype.

    Raises:
      DTypeError: kernels do not support the dtype.
    """
    found = KINDS.get(dtype)
    if found is None:
        raise errors.DTypeError(
            "Kernels do not support this element type",
            expected="bool, (u)int8 to (u)int64, bfloat16, float16 to float64, "
            "float8_e4m3fn, float8_e5m2, float8_e8m0fnu",
            got=dtype,
            hint="convert the array outside the kernel; several elements of less than "
            "8 bits can be passed in one integer and separated by shifts",
        )
    return found

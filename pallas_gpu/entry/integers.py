# SPDX-License-Identifier: Apache-2.0
"""Integer arithmetic of sizes: rounding up, powers of two, strides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_gpu import errors, expect
from pallas_gpu.types import values


@expect.arguments(a=values.integer, b=values.integer)
def cdiv(a: Any, b: Any) -> Any:
    """Returns `a / b` rounded up, for integers.

    PTX: none for Python integers, integer arithmetic for scalars. Since: sm_90.

    Args:
      a: dividend, a Python integer or an integer scalar.
      b: divisor, likewise.

    Raises:
      ArgumentTypeError: an operand is not an integer.
      ArgumentError: a static divisor is 0.
    """
    if isinstance(b, int) and b == 0:
        raise errors.ArgumentError(
            "cdiv: the divisor is 0",
            expected="another integer",
            got=b,
            hint="check the divisor",
        )
    if isinstance(a, int) and isinstance(b, int):
        return -(-a // b)
    if isinstance(b, np.ndarray):
        # NumPy would warn of a division by 0.
        b = jnp.asarray(b)
    # Without a negation, which unsigned types and the minimum of signed ones lack.
    quotient = a // b
    return quotient + (quotient * b != a).astype(quotient.dtype)


@expect.arguments(a=values.integer, alignment=values.integer)
def align_to(a: Any, alignment: Any) -> Any:
    """Returns `a` rounded up to a multiple, for integers.

    PTX: none for Python integers, integer arithmetic for scalars. Since: sm_90.

    Args:
      a: a Python integer or an integer scalar.
      alignment: likewise, positive.

    Returns:
      The smallest multiple of `alignment` that is not less than `a`.

    Raises:
      ArgumentTypeError: an argument is not an integer.
      ArgumentError: the alignment is static and zero.
    """
    return cdiv(a, alignment) * alignment


@expect.arguments(x=expect.integer(0))
def next_power_of_2(x: int) -> int:
    """Returns the smallest power of two that is not less than `x`; 1 for 0.

    PTX: none, it is a constant. Since: sm_90.

    Args:
      x: a Python integer, 0 or more.

    Raises:
      ArgumentError, ArgumentTypeError: `x` is negative or not an integer.
    """
    return 1 << max(0, x - 1).bit_length()


@expect.arguments(shape=expect.integers(0))
def strides_from_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a row-major array, in elements.

    PTX: none, they are constants. Since: sm_90.

    Args:
      shape: sizes of the dimensions.

    Raises:
      ArgumentError, ArgumentTypeError: a size is negative or not an integer.
    """
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))

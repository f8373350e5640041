# SPDX-License-Identifier: Apache-2.0
"""Short kernels, each whole in one file, with what they must compute.

A file defines functions over arrays, and `CASES`: calls of them at small sizes, with
the same computation in plain JAX. The tests run every case in the emulator, and compile
it for a GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of an example.

    Attributes:
      function: the example, a function over arrays.
      reference: the same computation in plain JAX.
      args: arguments for both.
      tolerance: absolute and relative error that the function's arithmetic admits.
    """

    function: Callable[..., Any]
    reference: Callable[..., Any]
    args: tuple[Any, ...]
    tolerance: float = 1e-5


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> np.ndarray:
    """Returns random normal numbers, as an array of NumPy."""
    numbers = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return numbers.astype(dtype)


def integers(seed: int, low: int, high: int, *shape: int) -> np.ndarray:
    """Returns random integers from low to high - 1, int32."""
    rng = np.random.default_rng(seed)
    return rng.integers(low, high, shape, np.int32)

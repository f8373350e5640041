# SPDX-License-Identifier: Apache-2.0
"""Arrays that NumPy makes: `jnp.asarray` and `jnp.zeros` compile for each shape.

That takes 10 to 40 ms of CPU time, longer than many a test.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def array(x: Any, dtype: Any = None) -> jax.Array:
    """Returns an array of the elements of `x`, of type `dtype` if it is given."""
    return jax.device_put(np.asarray(x) if dtype is None else np.asarray(x, dtype))


def zeros(shape: Any, dtype: Any = np.float32) -> jax.Array:
    return jax.device_put(np.zeros(shape, dtype))


def ones(shape: Any, dtype: Any = np.float32) -> jax.Array:
    return jax.device_put(np.ones(shape, dtype))


def counted(shape: Any, dtype: Any) -> np.ndarray:
    """Returns an array of whole numbers in order, modulo a prime."""
    return (np.arange(np.prod(shape)) % 113).reshape(shape).astype(np.dtype(dtype))

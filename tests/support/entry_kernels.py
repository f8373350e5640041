# SPDX-License-Identifier: Apache-2.0
"""A short way to write the kernels of these tests: one array in, one array out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu

SHAPE = (64, 128)
TILE = plgpu.SMEM(SHAPE, jnp.float32)


def numbers(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Different small numbers."""
    shape = shape or SHAPE
    return np.arange(np.prod(shape), dtype=dtype).reshape(shape)


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    """The type of a float32 array."""
    return jax.ShapeDtypeStruct(shape or SHAPE, jnp.float32)


def make(body: Callable[..., None], out: Any = None, **options: Any) -> Any:
    """A kernel whose result is a (64, 128) float32 array unless `out` says more."""
    return plgpu.kernel(body, out_type=f32() if out is None else out, **options)


def run(body: Callable[..., None], **options: Any) -> jax.Array:
    """Runs a kernel on one array."""
    return make(body, **options)(numbers())
